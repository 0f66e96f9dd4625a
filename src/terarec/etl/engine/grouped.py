# SPDX-License-Identifier: Apache-2.0
"""Grouped steps on more rows than fit in memory: files by the hash of the group, one run at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import NANOSECONDS_PREFIX, Rows, array_of, concatenate_rows, numpy_values
from terarec.etl.engine.left_out import listed_rows, write_listed
from terarec.etl.engine.passes import Passes, Pipeline, ReadRows, stored_name
from terarec.etl.engine.split import hashes
from terarec.etl.ops import Operator
from terarec.etl.ops.states import Statistic
from terarec.etl.ops.user_steps import run_step
from terarec.etl.partitions import Partitions
from terarec.etl.workflow.earlier_rows import EarlierRows, earlier_file, write_earlier_rows
from terarec.etl.workflow.plan import Plan
from terarec.spec import LeaveOneOut

_SEED = 0x6772_6F75
_BATCH_ROWS = 1 << 12
"""Rows of a result that are read at once; one such batch a file is held."""
_MAX_PARTITIONS = 128
"""Their results are read side by side: a batch of each is in memory."""
ROW = "\x1frow"
"""Name of the row ids among the columns, which no source has."""


def partition_count(estimated_bytes: int, memory_bytes: int) -> int:
    """Return the number of files for rows of these bytes, so that each file fits in memory."""
    # More files than memory asks for on average, since groups differ in size.
    return min(max(8 * estimated_bytes // memory_bytes, 1), _MAX_PARTITIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierOptions:
    """What grouped steps know of earlier files, and what they keep for later ones.

    Attributes:
        rows: Earlier rows to continue from; None for none.
        late_rows: See `PrepareOptions.late_rows`.
        out: Directory for the rows to keep; None to keep none.
    """

    rows: EarlierRows | None = None
    late_rows: Literal["raise", "allow"] = "raise"
    out: Path | None = None

    def num_rows(self, plan: Plan) -> int:
        """Return the number of earlier rows of all steps."""
        return 0 if self.rows is None else sum(map(self.rows.num_rows, plan.grouped_steps))


def run_grouped(
    passes: Passes, pipeline: Pipeline, directory: Path, count: int, earlier: EarlierOptions = EarlierOptions()
) -> int:
    """Run all grouped steps; `GroupedRows` reads their outputs.

    Returns:
        The number of late rows, which are allowed.

    Raises:
        FormatError: A late row, unless they are allowed.
        OSError: The disk is full.
    """
    plan, work = pipeline.plan, pipeline.plan.grouped_pass()
    stages = {step: _Scatter(pipeline, step, directory / f"in-{step}", count) for step in plan.grouped_steps}
    observing = dataclasses.replace(work, observes=plan.grouped_steps)
    # First, as they come before all rows of the files.
    for step, stage in stages.items():
        for rows in () if earlier.rows is None else earlier.rows.rows(step):
            stage.add(*stage.observe(rows))

    def scatter(read: ReadRows) -> dict[int, Any]:
        # A stage takes the inputs of its step where a statistic would observe them: right before the step.
        rows = pipeline.preprocess(work, read)
        return pipeline.run(observing, rows, None, cast(Mapping[int, Statistic], stages))[1]

    with closing(passes.map(scatter)) as results:
        for result in results:
            for step, (batch, partition) in result.items():
                stages[step].add(batch, partition)
    late = 0
    for step, stage in stages.items():
        kept = None
        if earlier.out is not None and plan.operators[step].carries_rows:
            kept = Partitions.make(directory / f"kept-{step}", count)
        found_late = stage.finish_into(directory / f"out-{step}", kept)
        if earlier.late_rows == "raise":
            found_late.check(plan, step, passes.source.place_of, passes.item_bits)
        # Not the sum: a row may be late for several steps.
        late = max(late, found_late.count)
        if earlier.out is not None and kept is not None:
            write_earlier_rows(earlier_file(earlier.out, step), plan, step, _in_order(kept))
            kept.remove()
    return late


class _Scatter:
    """Input rows of one grouped step, in files by group."""

    def __init__(self, pipeline: Pipeline, step: int, directory: Path, count: int) -> None:
        self._plan = pipeline.plan
        self._step = step
        self._operator = self._plan.operators[step]
        self._partitions = Partitions.make(directory, count)

    def observe(self, rows: Rows) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Return the inputs of the step for some rows, and the file of each."""
        operator: Any = self._operator
        return _by_group(rows, operator.reads, operator.group, self._partitions.count)

    def add(self, batch: pa.RecordBatch, partition: NDArray[np.int64]) -> None:
        """Append rows; ids rise from batch to batch."""
        self._partitions.scatter(batch, partition)

    def finish_into(self, directory: Path, kept: Partitions | None) -> LateRows:
        """Run the step, file after file; the outputs go to files in `directory`, rows for later files to `kept`."""
        late, results = LateRows(), Partitions.make(directory, self._partitions.count)
        for number in range(self._partitions.count):
            table = self._partitions.read(number)
            # Its rows are in memory now: inputs and outputs of all files need not be on the disk together.
            self._partitions.discard(number)
            if table is None:
                continue
            rows = rows_from_table(table)
            late += LateRows.of(self._operator, rows)
            _append(results, number, outputs_of(self._plan, self._step, rows))
            if kept is not None:
                _append(kept, number, rows.take(self._operator.carried_rows(rows)))
        self._partitions.remove()
        return late


def list_rows(
    passes: Passes, preprocess: Callable[[ReadRows], Rows], split: LeaveOneOut, count: int, path: Path
) -> None:
    """Write the list of `terarec.etl.engine.left_out` for the split of all users."""
    partitions = Partitions.make(path.with_name(f"{path.name}-users"), count)

    def scatter(read: ReadRows) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        return _by_group(preprocess(read), (split.column, split.order), split.column, count)

    with closing(passes.map(scatter)) as results:
        for batch, partition in results:
            partitions.scatter(batch, partition)
    tables = filter(None, map(partitions.read, range(count)))
    write_listed(path, (listed_rows(split, rows_from_table(table)) for table in tables))
    partitions.remove()


def _by_group(rows: Rows, names: Sequence[str], group: str, count: int) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
    """Return columns of rows, and the file of each row: all rows of a group are in one of `count`."""
    return rows_to_batch(rows.select(names)), hashes(rows.columns[group], _SEED) % count


def _append(partitions: Partitions, number: int, rows: Rows) -> None:
    batch = rows_to_batch(rows)
    # In small batches: when they are read, one of each file is in memory.
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        partitions.append(number, batch.slice(start, _BATCH_ROWS))


def outputs_of(plan: Plan, step: int, rows: Rows) -> Rows:
    """Return the outputs of a grouped step for all rows of some groups but earlier ones, under their stored names."""
    operator = plan.operators[step]
    done = run_step(operator, rows, None)
    outputs = Rows({stored_name(step, name): done.columns[name] for name in operator.writes}, done.ids)
    # Earlier rows have negative ids, so they come first.
    return outputs.slice(int(np.searchsorted(done.ids, 0)), done.num_rows)


@dataclass(frozen=True, slots=True)
class LateRows:
    """Rows that are earlier than earlier rows of their group, which a step looks at; parts of them add up.

    Attributes:
        count: Number of them.
        first: The lowest row id.
    """

    count: int = 0
    first: int = np.iinfo(np.int64).max

    @classmethod
    def of(cls, operator: Operator, rows: Rows) -> LateRows:
        """Find those among all rows of some groups."""
        if not rows.num_rows or rows.ids[0] >= 0:  # no earlier row
            return cls()
        late = rows.ids[operator.late_rows(rows)]
        return cls(len(late), int(late.min())) if len(late) else cls()

    def __add__(self, other: LateRows) -> LateRows:
        return LateRows(self.count + other.count, min(self.first, other.first))

    def check(self, plan: Plan, step: int, place_of: Callable[[int], str], item_bits: int) -> None:
        """Raise `FormatError` if there are some.

        Args:
            plan: Plan of the workflow.
            step: Position of the step that looks at them.
            place_of: Function that names the file and line of a row by its position among all rows.
            item_bits: Bits of a row id that number the items of an exploded row.
        """
        if self.count:
            raise FormatError(
                place_of(self.first >> item_bits),
                f"is earlier than rows of its group in files that were prepared before, and {self.count - 1:,} other "
                f"rows are, from which steps[{step}] {type(plan.spec.steps[step]).__name__} continues; expected later "
                "rows only, late_rows='allow' (--late-rows allow), or to prepare all files together with "
                "earlier_rows='none' (--earlier-rows none)",
            )


def _in_order(partitions: Partitions) -> Iterator[Rows]:
    """Yield the rows of all files by rising id; each file has them so."""
    cursors = [_Cursor(partitions, number) for number in range(partitions.count)]
    while ends := [cursor.end for cursor in cursors if cursor.end is not None]:
        # Up to there every file has given all of its rows, so that these can be sorted.
        merged = concatenate_rows([part for cursor in cursors for part in cursor.rows_before(min(ends))])
        yield merged.take(np.argsort(merged.ids))


class GroupedRows:
    """Outputs of the grouped steps, in the order of the sources; see `JoinedRows`.

    Args:
        directory: Directory that `run_grouped` filled.
        steps: Positions of the grouped steps to read.
        count: Files of each.
    """

    def __init__(self, directory: Path, steps: Sequence[int], count: int) -> None:
        self._steps = [
            [_Cursor(Partitions(directory / f"out-{step}", count), number) for number in range(count)] for step in steps
        ]

    def skip(self, row: int) -> None:
        """Leave out the rows up to the id `row` and without it."""
        for cursors in self._steps:
            for cursor in cursors:
                cursor.skip(row)

    def rows_before(self, row: int) -> Rows | None:
        """Return the next rows with the outputs of all grouped steps, up to the id `row` and without it."""
        columns: dict[str, pa.Array] = {}
        ids: NDArray[np.int64] | None = None
        for cursors in self._steps:
            parts = [part for cursor in cursors for part in cursor.rows_before(row)]
            if not parts:
                return None
            merged = concatenate_rows(parts)
            # Ids rise within a file, and the rows of a block lie in all files.
            merged = merged.take(np.argsort(merged.ids))
            # All grouped steps see the same rows: their ids are the same, whichever step's are taken.
            columns.update(merged.columns)
            ids = merged.ids
        return None if ids is None else Rows(columns, ids)


class _Cursor:
    """Position in one file, whose rows have rising ids."""

    def __init__(self, partitions: Partitions, number: int) -> None:
        self._batches = partitions.batches(number)
        self._head: Rows | None = self._next()

    @property
    def end(self) -> int | None:
        """The id behind the last row of the next batch; None at the end."""
        return None if self._head is None else int(self._head.ids[-1]) + 1

    def skip(self, row: int) -> None:
        """Leave out the next rows with ids below `row`, a batch at a time."""
        while self._head is not None and int(self._head.ids[-1]) < row:
            self._head = self._next()
        # What is left below `row` is a part of one batch.
        self.rows_before(row)

    def rows_before(self, row: int) -> list[Rows]:
        """Return the next rows with ids below `row`."""
        parts = []
        while self._head is not None:
            count = int(np.searchsorted(self._head.ids, row))
            if count:
                parts.append(self._head.slice(0, count))
            if count < self._head.num_rows:
                self._head = self._head.slice(count, self._head.num_rows)
                break
            self._head = self._next()
        return parts

    def _next(self) -> Rows | None:
        batch = next(self._batches, None)
        return None if batch is None else rows_from_table(pa.Table.from_batches([batch]))


def rows_to_batch(rows: Rows) -> pa.RecordBatch:
    """Return a batch of rows with their ids, and the nanoseconds of times, as further columns."""
    batch = rows.batch.append_column(ROW, array_of(rows.ids))
    # A file keeps columns alone; both come back by these names, in `rows_from_table`.
    for name, parts in rows.nanoseconds.items():
        batch = batch.append_column(NANOSECONDS_PREFIX + name, pa.array(parts))
    return batch


def rows_from_table(table: pa.Table) -> Rows:
    """Return the rows of a table of such batches."""
    columns = dict(zip(table.column_names, (column.combine_chunks() for column in table.columns), strict=True))
    ids = numpy_values(columns.pop(ROW))
    parts = [name for name in columns if name.startswith(NANOSECONDS_PREFIX)]
    nanoseconds = {name.removeprefix(NANOSECONDS_PREFIX): numpy_values(columns.pop(name)) for name in parts}
    return Rows(columns, ids, nanoseconds=nanoseconds)
