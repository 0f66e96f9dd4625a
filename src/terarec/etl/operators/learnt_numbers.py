"""What steps on numbers learn: a few figures for each column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import Block, Column
from terarec.etl.operators.state_files import read_figures, write_figures
from terarec.etl.statistics.moments import Moments
from terarec.etl.statistics.number_range import NumberRange
from terarec.etl.statistics.number_sample import GrowingSample, NumberSample
from terarec.kernels.cpu.hashes import xxh64_int64
from terarec.spec import Operator
from terarec.spec.quoting import quoted

SAMPLE_SEED = 42
"""Of the hash of a row id that decides whether the row's number is in a sample."""

Figures: TypeAlias = Mapping[str, Any]
"""Figure -> float, or a tuple of floats."""

SummandT = TypeVar("SummandT", Moments, NumberRange)


@dataclass(frozen=True, slots=True)
class LearntNumbers:
    """The state of a step on numbers.

    Attributes:
        kind: of the step.
        columns: input column -> its figures.
    """

    kind: str
    columns: Mapping[str, Figures]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        write_figures(directory, name, self.kind, {"columns": self.columns})

    @classmethod
    def load(cls, directory: Path, name: str, spec: Operator, figures: Sequence[str]) -> LearntNumbers:
        """Read what `save` wrote.

        Args:
            directory: holds the file.
            name: of the step.
            spec: the step.
            figures: names of those of each column; plural ones are lists of numbers.

        Raises:
            DataNotFoundError: no such file.
            FormatError: another kind, another figure, or one that is no finite number.
        """
        columns = read_figures(directory, name, spec.kind).get("columns")
        for column in spec.reads:
            found = columns.get(column) if isinstance(columns, dict) else None
            if not _are_figures(found, figures):
                expected = " and ".join(figures)
                raise FormatError(
                    f"{directory / name}.json: $.state.columns.{column}: got {quoted(found)}, expected {expected}"
                )
        assert isinstance(columns, dict)
        return cls(spec.kind, {column: dict(map(_decoded, found.items())) for column, found in columns.items()})


def _are_figures(found: Any, names: Sequence[str]) -> bool:
    def is_number(figure: Any) -> bool:
        return isinstance(figure, int | float) and not isinstance(figure, bool) and math.isfinite(figure)

    if not isinstance(found, dict) or set(found) != set(names):
        return False
    lists = {name for name in names if name.endswith("s")}
    return all(
        isinstance(figure, list) and all(map(is_number, figure)) if name in lists else is_number(figure)
        for name, figure in found.items()
    )


def _decoded(item: tuple[str, Any]) -> tuple[str, Any]:
    name, figure = item
    return name, tuple(map(float, figure)) if isinstance(figure, list) else float(figure)


class SummedStatistic(Generic[SummandT]):
    """Gathers something of columns that adds up.

    Args:
        kind: of the step.
        columns: its inputs, numbers or integers; each item of a list counts.
        summand: makes it of numbers, NaN being missing: `Moments` or `NumberRange`.
        figures: what the step keeps of a column's sum.
    """

    def __init__(
        self, kind: str, columns: Sequence[str], summand: type[SummandT], figures: Callable[[SummandT], Figures]
    ) -> None:
        self._kind = kind
        self._summand: type[SummandT] = summand
        self._figures: Callable[[SummandT], Figures] = figures
        self._sums: dict[str, SummandT] = {name: summand() for name in columns}

    def observe(self, block: Block) -> Mapping[str, SummandT]:
        """What the columns add in a block of training rows."""
        return {name: self._summand.of(block.columns[name].numbers()) for name in self._sums}

    def merge(self, partial: Mapping[str, SummandT]) -> None:
        """Take in that of a block."""
        for name, summand in partial.items():
            self._sums[name] = self._sums[name] + summand

    def finish(self) -> LearntNumbers:
        """The figures."""
        return LearntNumbers(self._kind, {name: self._figures(total) for name, total in self._sums.items()})


class SampleStatistic:
    """Gathers a `NumberSample` of columns; the arguments are as for `SummedStatistic`."""

    def __init__(self, kind: str, columns: Sequence[str], figures: Callable[[NumberSample], Figures]) -> None:
        self._kind = kind
        self._figures = figures
        self._samples = {name: GrowingSample() for name in columns}

    def observe(self, block: Block) -> Mapping[str, NumberSample]:
        """Samples of the columns in a block of training rows."""
        tickets = xxh64_int64(block.rows, SAMPLE_SEED)
        return {name: _sample(block.columns[name], tickets) for name in self._samples}

    def merge(self, partial: Mapping[str, NumberSample]) -> None:
        """Take in those of a block."""
        for name, sample in partial.items():
            self._samples[name].add(sample)

    def finish(self) -> LearntNumbers:
        """The figures."""
        samples = {name: growing.sample() for name, growing in self._samples.items()}
        return LearntNumbers(self._kind, {name: self._figures(sample) for name, sample in samples.items()})


def _sample(column: Column, tickets: NDArray[np.int64]) -> NumberSample:
    numbers = column.numbers()
    if column.offsets is not None:
        tickets = np.repeat(tickets, np.diff(column.offsets))
    present = ~np.isnan(numbers)
    return NumberSample(tickets[present], numbers[present]).lowest()
