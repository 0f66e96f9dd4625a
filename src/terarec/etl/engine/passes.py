# SPDX-License-Identifier: Apache-2.0
"""Passes over the sources: threads parse blocks and transform them, results come in the order of the sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.closer import stream
from terarec.etl.columns import LEFT_OUT, RowFaultError, Rows
from terarec.etl.engine.phases import ProgressMeter
from terarec.etl.ops import State
from terarec.etl.ops.states import Statistic
from terarec.etl.ops.user_steps import run_step
from terarec.etl.source.blocks import InputFault, RawBlock
from terarec.etl.source.source import Source, blocks_ahead
from terarec.etl.workflow.plan import Pass, Plan
from terarec.etl.workflow.transform import run_steps, state_of, validate_rows, with_metadata
from terarec.parallel import ordered_map

Result = TypeVar("Result")


class JoinedRows(Protocol):
    """Rows on the disk in the order of the sources, to be joined to them."""

    def rows_before(self, row: int) -> Rows | None:
        """Return the next rows, up to the row id `row` and without it; called with rising ids, from one thread."""
        ...


class InvalidRowHandler:
    """Leaves invalid rows of one block out, or raises, by the source's policy for bad input.

    Args:
        source: Source of the block.
        raw: The block.
        item_bits: Bits of a row id that number the items of an exploded row; 0 where no step explodes.
    """

    def __init__(self, source: Source, raw: RawBlock, item_bits: int) -> None:
        self._source = source
        self._raw = raw
        self._item_bits = item_bits
        self._counts: Counter[str] = Counter()
        self._faults: list[InputFault] = []

    def filter(
        self, function: Callable[[Rows], Result], rows: Rows, *, is_exploded: bool = True
    ) -> tuple[Result, Rows]:
        """Return `function` of the valid ones of `rows`, and these.

        Args:
            function: Work on rows; it raises `RowFaultError` for invalid ones.
            rows: Rows of the block, possibly after some steps.
            is_exploded: Whether the steps that explode rows, if there are any, are done.

        Raises:
            FormatError: A row is invalid, and the policy is "raise"; with file and line or row.
        """
        while True:
            try:
                return function(rows), rows
            # A fault names the rows of one column at one step: without them, `function` may find others.
            except RowFaultError as fault:
                invalid = fault.rows >> self._item_bits if is_exploded else fault.rows
                self._faults += self._source.invalid_rows(self._raw, invalid, fault)
                self._counts[fault.kind] += len(invalid)
                rows = rows.filter(~np.isin(rows.ids, fault.rows))

    def flush(self) -> None:
        """Report all of them to the source, once for the block however many functions ran."""
        self._source.log_invalid_rows(self._raw, self._counts, self._faults)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """A block of the sources."""

    raw: RawBlock
    rows: Rows
    joined: Rows | None
    invalid: InvalidRowHandler


class Passes:
    """Reads the sources once for each pass.

    Args:
        source: Files.
        threads: Threads that parse and transform; one more reads.
        meter: Progress meter, called for every block.
        item_bits: Bits of a row id that number the items of an exploded row; 0 where no step explodes.
    """

    def __init__(self, source: Source, threads: int, meter: ProgressMeter, item_bits: int) -> None:
        self.source = source
        self.meter = meter
        self.item_bits = item_bits
        self._threads = threads

    def count_rows(self) -> Sequence[int]:
        """Return the rows of each file."""
        counts = self.source.count_rows()
        self.meter.add(sum(counts), self.source.num_bytes)
        return counts

    def read_first(self) -> None:
        """Parse the first rows."""
        for raw in self.source.raw_blocks():
            self.source.read_block(raw)
            return

    @stream
    def map(
        self,
        function: Callable[[ReadRows], Result],
        *,
        joined: JoinedRows | None = None,
        blocks: Iterable[RawBlock] | None = None,
    ) -> Generator[Result]:
        """Yield `function` of blocks of the sources, computed in worker threads.

        Args:
            function: Work on a block.
            joined: Rows to join.
            blocks: Blocks in order, iterated in a thread of its own; None for all.
        """

        def work(item: tuple[RawBlock, Rows | None]) -> tuple[Result, int, int]:
            raw, joined_rows = item
            invalid = InvalidRowHandler(self.source, raw, self.item_bits)
            read = self.source.read_block(raw)
            result = function(ReadRows(raw, read, joined_rows, invalid))
            # Only after `function`: where it raises, its error reports the row.
            invalid.flush()
            return result, read.num_rows, raw.read_bytes

        items = self._items(joined, blocks)
        # Closed here, as a consumer that fails leaves threads behind that still read.
        with closing(ordered_map(work, items, self._threads, blocks_ahead(self._threads))) as results:
            for result, rows, read_bytes in results:
                self.meter.add(rows, read_bytes)
                yield result

    def blocks(self, until_row: int | None, after: RawBlock | None = None) -> Iterator[RawBlock]:
        """Yield blocks of the sources.

        Args:
            until_row: Row id before which the last block begins; None for all.
            after: Block before the first one.
        """
        for raw in self.source.raw_blocks(after):
            # The last block may have rows of other splits behind it, which the pipeline tells apart.
            if until_row is not None and raw.first_row << self.item_bits >= until_row:
                return
            yield raw

    def _items(
        self, joined: JoinedRows | None, blocks: Iterable[RawBlock] | None
    ) -> Iterator[tuple[RawBlock, Rows | None]]:
        # Run by the one thread that reads: joined rows come in the order of the sources and are passed out once.
        for raw in self.source.raw_blocks() if blocks is None else blocks:
            end = (raw.first_row + raw.num_rows) << self.item_bits
            yield raw, None if joined is None else joined.rows_before(end)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The steps of a workflow on the blocks of a pass.

    Attributes:
        plan: Plan of the workflow.
        states: Position of a step -> its fitted state, as far as phases have gone.
        assign: Function that returns the split of each row, uint8[n].
    """

    plan: Plan
    states: dict[int, State]
    assign: Callable[[Rows], NDArray[np.uint8]]

    def preprocess(self, work: Pass, read: ReadRows) -> Rows:
        """Return the rows that the row steps keep and that are valid, with their splits where the pass splits them."""
        rows, is_exploded = with_metadata(read.rows, work.metadata), False
        for step in work.row_steps:
            apply = partial(run_step, self.plan.operators[step], state=state_of(self.plan, step, self.states))
            rows = read.invalid.filter(apply, rows, is_exploded=is_exploded)[0]
            is_exploded |= self.plan.operators[step].explodes
        # In every pass, so that no step is fitted to a row that the last pass would leave out.
        rows = read.invalid.filter(partial(validate_rows, self.plan, self.states), rows)[1]
        if not work.is_split:
            return rows
        splits = self.assign(rows)
        return rows.with_split(splits).filter(splits != LEFT_OUT)

    def run(
        self,
        work: Pass,
        rows: Rows,
        joined: Rows | None,
        statistics: Mapping[int, Statistic] | None = None,
    ) -> tuple[Rows, dict[int, Any]]:
        """Run the steps of a pass after the split.

        Args:
            work: The pass.
            rows: Rows that `preprocess` returned; with `statistics` only those for training.
            joined: Outputs of grouped steps for these rows and perhaps for more; None where none is needed.
            statistics: Position of a step -> statistic that observes the rows before it.

        Returns:
            The rows after the last step, and the partial result of each statistic.
        """
        grouped: dict[int, dict[str, pa.Array]] = {}
        if joined is not None:
            # The outputs are of all rows of the block. Invalid rows, and in fit passes those that are not for training,
            # are gone.
            if not np.array_equal(joined.ids, rows.ids):
                joined = joined.filter(np.isin(joined.ids, rows.ids))
            assert joined.num_rows == rows.num_rows, "joined rows are not those of the block"
            for step in work.grouped:
                grouped[step] = {
                    name: joined.columns[stored_name(step, name)] for name in self.plan.operators[step].writes
                }
        return run_steps(self.plan, work, rows, self.states, grouped=grouped, statistics=statistics)


def stored_name(step: int, name: str) -> str:
    """Return the name of output `name` of a grouped step among the outputs of all of them."""
    return f"{step}\x1f{name}"
