"""Grouped steps on more rows than fit in memory: files by the hash of the group, one run at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Rows, array_of, concatenate_rows, numpy_values
from terarec.etl.engine.passes import Passes, Pipeline, ReadRows, stored_name
from terarec.etl.engine.split import hashes
from terarec.etl.ops import Operator, Statistic
from terarec.etl.partitions import Partitions

_SEED = 0x6772_6F75
_BATCH_ROWS = 1 << 12
"""Rows of a result that are read at once; one such batch a file is held."""
_MAX_PARTITIONS = 128
"""Their results are read side by side: each takes a file handle."""
ROW = "\x1frow"
"""Name of the row ids among the columns, which no source has."""


def partition_count(estimated_bytes: int, memory_bytes: int) -> int:
    """Return the number of files for rows of these bytes, so that each file fits in memory."""
    return min(max(8 * estimated_bytes // memory_bytes, 1), _MAX_PARTITIONS)


def run_grouped(passes: Passes, pipeline: Pipeline, directory: Path, count: int) -> None:
    """Run all grouped steps; `GroupedRows` reads their outputs.

    Args:
        passes: The sources.
        pipeline: Steps of the workflow.
        directory: Directory of the files, which are made anew.
        count: Files for each step.

    Raises:
        OSError: The disk is full.
    """
    plan, work = pipeline.plan, pipeline.plan.grouped_pass()
    stages = {
        step: _Scatter(plan.operators[step], step, directory / f"in-{step}", count) for step in plan.grouped_steps
    }
    observing = dataclasses.replace(work, observes=plan.grouped_steps)

    def scatter(read: ReadRows) -> dict[int, Any]:
        # A stage takes the inputs of its step where a statistic would observe them: right before the step.
        rows = pipeline.preprocess(work, read)
        return pipeline.run(observing, rows, None, cast(Mapping[int, Statistic], stages))[1]

    with closing(passes.map(scatter)) as results:
        for found in results:
            for step, (batch, partition) in found.items():
                stages[step].add(batch, partition)
    for step, stage in stages.items():
        stage.finish_into(directory / f"out-{step}")


class _Scatter:
    """Input rows of one grouped step, in files by group."""

    def __init__(self, operator: Operator, step: int, directory: Path, count: int) -> None:
        self._operator = operator
        self._step = step
        self._partitions = Partitions.make(directory, count)

    def observe(self, rows: Rows) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Return the inputs of the step for some rows, and the file of each."""
        operator: Any = self._operator
        partition = hashes(rows.columns[operator.group], _SEED) % self._partitions.count
        return rows_to_batch(rows.select(self._operator.reads)), partition

    def add(self, batch: pa.RecordBatch, partition: NDArray[np.int64]) -> None:
        """Append rows; ids rise from batch to batch."""
        self._partitions.scatter(batch, partition)

    def finish_into(self, directory: Path) -> None:
        """Run the step, file after file; the outputs go to files in `directory`."""
        results = Partitions.make(directory, self._partitions.count)
        for number in range(self._partitions.count):
            table = self._partitions.read(number)
            # Its rows are in memory now: inputs and outputs of all files need not be on the disk together.
            self._partitions.discard(number)
            if table is None:
                continue
            outputs = rows_to_batch(outputs_of(self._operator, self._step, rows_from_table(table)))
            for start in range(0, outputs.num_rows, _BATCH_ROWS):
                results.append(number, outputs.slice(start, _BATCH_ROWS))
        self._partitions.remove()


def outputs_of(operator: Operator, step: int, rows: Rows) -> Rows:
    """Return the outputs of a grouped step for all rows of some groups, under their stored names."""
    done = operator.transform(rows, None)
    return Rows({stored_name(step, name): done.columns[name] for name in operator.writes}, done.ids)


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

    def skip(self, row: int) -> None:
        """Leave out the next rows with ids below `row`, a batch at a time."""
        while self._head is not None and int(self._head.ids[-1]) < row:
            self._head = self._next()
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
    """Return a batch of rows with their ids as one more column."""
    return rows.batch.append_column(ROW, array_of(rows.ids))


def rows_from_table(table: pa.Table) -> Rows:
    """Return the rows of a table of such batches."""
    columns = dict(zip(table.column_names, (column.combine_chunks() for column in table.columns), strict=True))
    return Rows(columns, numpy_values(columns.pop(ROW)))
