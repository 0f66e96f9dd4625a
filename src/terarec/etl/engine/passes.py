"""The sources, read several times: threads parse blocks and work on them, results come in the order of the sources."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from terarec.etl.columns import Block
from terarec.etl.engine.progress import ProgressMeter
from terarec.etl.engine.refusals import Refusals
from terarec.etl.in_order import map_in_order
from terarec.etl.source import RawBlock, Source

Result = TypeVar("Result")


class Beside(Protocol):
    """Rows that lie on the disk in the order of the sources, to be joined to them."""

    def rows_before(self, row: int) -> Block | None:
        """The next rows, up to the row id `row` and without it; called with rising ids, from one thread."""
        ...


@dataclass(frozen=True, slots=True)
class ReadRows:
    """A block of the sources.

    Attributes:
        block: its rows as they were read.
        joined: the rows beside that belong to it.
        refusals: takes those that are refused.
    """

    block: Block
    joined: Block | None
    refusals: Refusals


class Passes:
    """Goes through the sources as often as asked.

    Args:
        source: the files.
        threads: that parse and work. One more reads.
        meter: is told of every block.
        item_bits: bits of a row id that tell the item of an exploded row, 0 where no step explodes.
    """

    def __init__(self, source: Source, threads: int, meter: ProgressMeter, item_bits: int) -> None:
        self.source = source
        self.meter = meter
        self.item_bits = item_bits
        self._threads = threads

    def count_rows(self) -> Sequence[int]:
        """Rows of each file."""
        counts = self.source.count_rows()
        self.meter.add(sum(counts), sum(file.bytes for file in self.source.files))
        return counts

    def read_first(self) -> None:
        """Parse the first rows.

        Raises:
            FormatError: with the policy "raise" bad input in them.
        """
        for raw in self.source.raw_blocks():
            self.source.read_block(raw)
            return

    def map(
        self,
        function: Callable[[ReadRows], Result],
        *,
        beside: Beside | None = None,
        blocks: Iterable[RawBlock] | None = None,
    ) -> Generator[Result]:
        """`function` of blocks of the sources, called in worker threads.

        Args:
            function: takes the rows of a block.
            beside: see there.
            blocks: in order, iterated in a thread of its own; None for all.

        Raises:
            FormatError: a damaged source, or with the policy "raise" bad input in it.
        """

        def work(item: tuple[RawBlock, Block | None]) -> tuple[Result, int, int]:
            raw, joined = item
            refusals = Refusals(self.source, raw, self.item_bits)
            block = self.source.read_block(raw)
            result = function(ReadRows(block, joined, refusals))
            refusals.settle()
            return result, block.num_rows, raw.read_bytes

        with closing(map_in_order(work, self._items(beside, blocks), self._threads)) as results:
            for result, rows, read_bytes in results:
                self.meter.add(rows, read_bytes)
                yield result

    def blocks(self, until_row: int | None, after: RawBlock | None = None) -> Iterator[RawBlock]:
        """Blocks of the sources.

        Args:
            until_row: ends with the block before the one that begins with this row id, or with a later one.
            after: begins behind this block.
        """
        for raw in self.source.raw_blocks(after):
            if until_row is not None and raw.first_row << self.item_bits >= until_row:
                return
            yield raw

    def _items(
        self, beside: Beside | None, blocks: Iterable[RawBlock] | None
    ) -> Iterator[tuple[RawBlock, Block | None]]:
        for raw in self.source.raw_blocks() if blocks is None else blocks:
            end = (raw.first_row + raw.num_rows) << self.item_bits
            yield raw, None if beside is None else beside.rows_before(end)
