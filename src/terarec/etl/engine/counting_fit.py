"""Rows are counted in the pass that learns first: what is for training however many rows follow is learnt meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from terarec.etl.engine.bounds import bounds_to_data, counted_bounds
from terarec.etl.engine.fit import check_training, fit_phase
from terarec.etl.engine.learning import Statistics
from terarec.etl.engine.passes import Passes
from terarec.etl.engine.splits import RowBounds, assign
from terarec.etl.engine.steps import Steps
from terarec.etl.ops import State
from terarec.etl.source import RawBlock, Source
from terarec.etl.workflow import Plan
from terarec.spec import SplitByFiles, SplitByFraction

_UNSURE = 0.05
"""Share of the training text that waits until the rows are counted. Should the first lines be so much shorter than the
last ones that rows beyond the training part were shown, the pass is done again."""


class CountingLook:
    """Counts the rows of text files, and shows those for training to the statistics of the first fit phase; a `Look`.

    Args:
        passes: the sources.
        plan: of the workflow, without grouped steps.
        states: of the steps that have learnt already.
        split: where training ends.
    """

    def __init__(
        self, passes: Passes, plan: Plan, states: dict[int, State], split: SplitByFiles | SplitByFraction
    ) -> None:
        self._passes = passes
        self._plan = plan
        self._states = states
        self._split = split
        self._bounds: RowBounds | None = None

    def __call__(self, statistics: Statistics) -> dict[str, Any] | None:
        """See `Look`; returns "bounds", too.

        Raises:
            ConfigError, FormatError: nothing is left for training.
        """
        rows, last = 0, None
        if self._bounds is None:
            sure = _SureBlocks(self._passes.source, self._split)
            rows, last = self._show(statistics, sure, None), sure.last
            self._passes.meter.add(0, sure.passed_bytes)
            self._bounds = counted_bounds(self._split, self._passes, sure.counts)
            if sure.end << self._passes.item_bits > self._bounds.valid_from:
                return None
        rows += self._show(statistics, self._passes.blocks(self._bounds.valid_from, last), self._bounds)
        check_training(rows)
        return {"rows": {}, "bounds": bounds_to_data(self._bounds)}

    def _show(self, statistics: Statistics, blocks: Iterable[RawBlock], bounds: RowBounds | None) -> int:
        """Rows for training in `blocks`, which are all of them where there are no bounds."""
        steps = Steps(self._plan, self._states, assign(None if bounds is None else self._split, bounds))
        work = self._plan.fit_pass(0)
        return fit_phase(self._passes, steps, work, statistics, beside=None, blocks=blocks)["train"]


class _SureBlocks:
    """Reads a source to its end, counts all of its rows, and gives the blocks that are surely for training.

    Attributes:
        counts: rows of each file.
        last: the last block that was given.
        end: rows up to its end.
        passed_bytes: of the blocks that were not given.
    """

    def __init__(self, source: Source, split: SplitByFiles | SplitByFraction) -> None:
        self.counts = [0] * len(source.files)
        self.last: RawBlock | None = None
        self.end = self.passed_bytes = 0
        self._source = source
        self._split = split

    def __iter__(self) -> Iterator[RawBlock]:
        read = 0
        for raw in self._source.raw_blocks():
            self.counts[raw.file] += raw.num_rows
            read += raw.read_bytes
            if self._is_sure(raw, read):
                self.last, self.end = raw, raw.first_row + raw.num_rows
                yield raw
            else:
                self.passed_bytes += raw.read_bytes

    def _is_sure(self, raw: RawBlock, read: int) -> bool:
        split, files, training = self._split, self._source.files, 1.0
        if isinstance(split, SplitByFiles):
            files = files[: len(files) - split.valid - split.test]
            if not split.valid_fraction:
                return raw.file < len(files)
            training -= split.valid_fraction
        else:
            training -= split.valid + split.test
        return read <= (1 - _UNSURE) * training * sum(file.bytes for file in files)
