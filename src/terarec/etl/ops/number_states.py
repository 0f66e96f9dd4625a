"""States of operators on numbers: the statistics of training rows, and the parameters made of them.

Statistics are exact sums, moments, ranges and samples by hash, which block sizes and threads do not change. Files are
described in docs/workflows.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import Rows, flat, list_offsets, numbers_of, numpy_values
from terarec.etl.ops.states import read_params, write_params
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import OperatorSpec
from terarec.spec.quoting import quoted

_CHUNK_BITS = 16
_CHUNK = 1 << _CHUNK_BITS
_SPLITTER = 2.0**27 + 1.0
_LARGEST = 2.0**480
"""Beyond it and below its inverse squares and splits leave the range of float64."""


def exact_sum(numbers: NDArray[np.float64]) -> Fraction:
    """Compute the sum of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    return sum(map(_chunk_sum, _chunks(numbers)), sum(extremes, Fraction(0)))


def exact_sum_of_squares(numbers: NDArray[np.float64]) -> Fraction:
    """Compute the sum of the squares of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    total = sum((number * number for number in extremes), Fraction(0))
    for chunk in _chunks(numbers):
        product, error = _square(chunk)
        total += _chunk_sum(product) + _chunk_sum(error)
    return total


def _parted(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[Fraction]]:
    """Return the numbers of ordinary size and the others, too few in real data for their loop to matter."""
    sizes = np.abs(numbers)
    far = (sizes > _LARGEST) | ((sizes < 1.0 / _LARGEST) & (numbers != 0.0))
    return (numbers[~far], list(map(Fraction, numbers[far].tolist()))) if far.any() else (numbers, [])


def _chunks(numbers: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    return (numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK))


def _square(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute Dekker's product: ``numbers ** 2 == product + error``, exactly."""
    scaled = _SPLITTER * numbers
    high = scaled - (scaled - numbers)
    low = numbers - high
    product = numbers * numbers
    return product, ((high * high - product) + 2.0 * high * low) + low * low


def _chunk_sum(numbers: NDArray[np.float64]) -> Fraction:
    """Sum at most 2^16 numbers by the extraction of Rump, Ogita and Oishi (Accurate Floating-Point Summation).

    Added to a large power of two and taken from it again, a number keeps its leading bits only. These leading parts are
    multiples of one unit and so few bits long that their sum is exact; what is left is at least 35 bits smaller.
    """
    total = Fraction(0)
    while len(numbers) and (largest := float(np.abs(numbers).max())) > 0.0:
        sigma = float(np.ldexp(1.0, int(np.frexp(largest)[1]) + _CHUNK_BITS + 1))
        leading = (sigma + numbers) - sigma
        total += Fraction(float(leading.sum()))
        numbers = numbers - leading
    return total


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact sums of numbers: the moments of a column are those of its parts added up, bit for bit.

    Attributes:
        count: Number of numbers.
        total: Their sum.
        squares: Sum of their squares.
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> Moments:
        """Compute those of ``numbers[n]``, float64 or integers; NaN is missing and left out."""
        numbers = numbers.astype(np.float64, copy=False)
        present = numbers[~np.isnan(numbers)]
        if not len(present):
            return cls()
        total, squares = exact_sum(present), exact_sum_of_squares(present)
        return cls(len(present), total, squares)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """The mean, 0 before the first number."""
        return float(self.total / self.count) if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The population's standard deviation; 1 for numbers that do not vary."""
        if not self.count:
            return 1.0
        variance = self.squares / self.count - (self.total / self.count) ** 2
        halves = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
        # The square of a large deviation is no float64: the root is taken near 1.
        deviation = math.ldexp(math.sqrt(variance / Fraction(4) ** halves), halves)
        return deviation if deviation > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The range of numbers; ranges add up.

    Attributes:
        minimum: The least number, infinity before the first.
        maximum: The largest, minus infinity before the first.
    """

    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> NumberRange:
        """Compute that of ``numbers[n]``, float64 or integers; NaN is missing and left out."""
        if numbers.dtype.kind == "i":
            return cls(float(numbers.min()), float(numbers.max())) if len(numbers) else cls()
        least, most = np.fmin.reduce(numbers, initial=math.inf), np.fmax.reduce(numbers, initial=-math.inf)
        return cls(float(least), float(most))

    def __add__(self, other: NumberRange) -> NumberRange:
        return NumberRange(min(self.minimum, other.minimum), max(self.maximum, other.maximum))

    def __bool__(self) -> bool:
        """Return whether there was any number."""
        return self.minimum <= self.maximum


SAMPLE_SIZE = 1 << 20
"""Largest number of values of a sample; quantiles of no more values are exact."""


@dataclass(frozen=True, slots=True)
class NumberSample:
    """A bottom-k sample: the numbers with the lowest hashes of their row ids, the same in every engine.

    Attributes:
        hashes: int64[k].
        numbers: float64[k].
    """

    hashes: NDArray[np.int64]
    numbers: NDArray[np.float64]

    def lowest(self) -> NumberSample:
        """Return at most `SAMPLE_SIZE` of the numbers; of equal hashes (items of one list) the first."""
        if len(self.hashes) <= SAMPLE_SIZE:
            return self
        kept = np.argsort(self.hashes, kind="stable")[:SAMPLE_SIZE]
        return NumberSample(self.hashes[kept], self.numbers[kept])

    def median(self) -> float:
        """Return the lower median: the least number that at least half of them do not exceed; 0 for no numbers."""
        middle = (len(self.numbers) - 1) // 2
        return float(np.partition(self.numbers, middle)[middle]) if len(self.numbers) else 0.0

    def boundaries(self, intervals: int) -> tuple[float, ...]:
        """Return at most ``intervals - 1`` rising boundaries that cut the numbers into intervals of about equal counts.

        With n numbers, q_k the least one that at least k n / intervals do not exceed, boundary k is the least number
        above q_k; where there is none, or the same one again, there is no boundary. So a value that fills several
        intervals gets one of its own: where nine of ten numbers are 0, the first boundary is the least number above 0.
        """
        values, counts = np.unique(self.numbers, return_counts=True)
        reached = np.cumsum(counts) * intervals
        last_inside = np.searchsorted(reached, np.arange(1, intervals) * len(self.numbers))
        firsts = np.unique(last_inside[last_inside + 1 < len(values)] + 1)
        return tuple(values[firsts].tolist())


class GrowingSample:
    """A `NumberSample` to which parts of a column are added."""

    def __init__(self) -> None:
        self._parts: list[NumberSample] = []
        self._size = 0

    def add(self, part: NumberSample) -> None:
        """Add the sample of a block."""
        self._parts.append(part)
        self._size += len(part.numbers)
        if self._size > 2 * SAMPLE_SIZE:
            self._compact()

    def sample(self) -> NumberSample:
        """Return the sample of all parts."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        hashes = np.concatenate([np.empty(0, dtype=np.int64), *(part.hashes for part in self._parts)])
        numbers = np.concatenate([np.empty(0), *(part.numbers for part in self._parts)])
        self._parts = [NumberSample(hashes, numbers).lowest()]
        self._size = len(self._parts[0].numbers)


SAMPLE_SEED = 42
"""Seed of the hash of a row id that decides whether the row's number is in a sample."""

Params: TypeAlias = Mapping[str, Any]
"""Parameter -> float, or a tuple of floats."""

SummandT = TypeVar("SummandT", Moments, NumberRange)


@dataclass(frozen=True, slots=True)
class FittedNumbers:
    """State of a step on numbers.

    Attributes:
        kind: Kind of the step.
        columns: Input column -> its parameters.
    """

    kind: str
    columns: Mapping[str, Params]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        write_params(directory, name, self.kind, {"columns": self.columns})

    @classmethod
    def load(cls, directory: Path, name: str, spec: OperatorSpec, params: Sequence[str]) -> FittedNumbers:
        """Read what `save` wrote.

        Args:
            directory: Directory of the file.
            name: Name of the step.
            spec: The step.
            params: Names of the parameters of each column; plural ones are lists of numbers.

        Raises:
            DataNotFoundError: No such file.
            FormatError: Another kind, another parameter, or one that is no finite number.
        """
        columns = read_params(directory, name, spec.kind).get("columns")
        for column in spec.reads:
            found = columns.get(column) if isinstance(columns, dict) else None
            if not _are_params(found, params):
                expected = " and ".join(params)
                raise FormatError(
                    f"{directory / name}.json: $.state.columns.{column}", f"got {quoted(found)}, expected {expected}"
                )
        assert isinstance(columns, dict)
        return cls(spec.kind, {column: dict(map(_decoded, found.items())) for column, found in columns.items()})


def _are_params(found: Any, names: Sequence[str]) -> bool:
    def is_number(param: Any) -> bool:
        return isinstance(param, int | float) and not isinstance(param, bool) and math.isfinite(param)

    if not isinstance(found, dict) or set(found) != set(names):
        return False
    lists = {name for name in names if name.endswith("s")}
    return all(
        isinstance(param, list) and all(map(is_number, param)) if name in lists else is_number(param)
        for name, param in found.items()
    )


def _decoded(item: tuple[str, Any]) -> tuple[str, Any]:
    name, param = item
    return name, tuple(map(float, param)) if isinstance(param, list) else float(param)


class SummedStatistic(Generic[SummandT]):
    """Gathers statistics of columns that add up.

    Args:
        kind: Kind of the step.
        columns: Its inputs, numbers or integers; each item of a list counts.
        summand: Statistic of numbers, NaN being missing: `Moments` or `NumberRange`.
        params: Function from a column's sum to its parameters.
    """

    def __init__(
        self, kind: str, columns: Sequence[str], summand: type[SummandT], params: Callable[[SummandT], Params]
    ) -> None:
        self._kind = kind
        self._summand: type[SummandT] = summand
        self._figures: Callable[[SummandT], Params] = params
        self._sums: dict[str, SummandT] = {name: summand() for name in columns}

    def observe(self, rows: Rows) -> Mapping[str, SummandT]:
        """Return the summands of the columns of some training rows."""
        return {name: self._summand.of(_summands(rows.columns[name])) for name in self._sums}

    def merge(self, partial: Mapping[str, SummandT]) -> None:
        """Add the summands of a block."""
        for name, summand in partial.items():
            self._sums[name] = self._sums[name] + summand

    def partial(self) -> Mapping[str, SummandT]:
        """Return the sums so far."""
        return dict(self._sums)

    def finish(self) -> FittedNumbers:
        """Return the parameters."""
        return FittedNumbers(self._kind, {name: self._figures(total) for name, total in self._sums.items()})


def _summands(array: pa.Array) -> NDArray[Any]:
    """Return the m numbers of an array; integers as they are where none is missing, which spares a copy."""
    values = flat(array)
    return numbers_of(values) if values.null_count else numpy_values(values)


class SampleStatistic:
    """Gathers a `NumberSample` of columns; arguments as for `SummedStatistic`."""

    def __init__(self, kind: str, columns: Sequence[str], params: Callable[[NumberSample], Params]) -> None:
        self._kind = kind
        self._figures = params
        self._samples = {name: GrowingSample() for name in columns}

    def observe(self, rows: Rows) -> Mapping[str, NumberSample]:
        """Return samples of the columns of some training rows."""
        hashes = xxh64_int64(rows.ids, SAMPLE_SEED)
        return {name: _sample(rows.columns[name], hashes) for name in self._samples}

    def merge(self, partial: Mapping[str, NumberSample]) -> None:
        """Add the samples of a block."""
        for name, sample in partial.items():
            self._samples[name].add(sample)

    def partial(self) -> Mapping[str, NumberSample]:
        """Return the samples so far."""
        return {name: growing.sample() for name, growing in self._samples.items()}

    def finish(self) -> FittedNumbers:
        """Return the parameters."""
        samples = {name: growing.sample() for name, growing in self._samples.items()}
        return FittedNumbers(self._kind, {name: self._figures(sample) for name, sample in samples.items()})


def _sample(array: pa.Array, hashes: NDArray[np.int64]) -> NumberSample:
    numbers, offsets = numbers_of(array), list_offsets(array)
    if offsets is not None:
        hashes = np.repeat(hashes, np.diff(offsets))
    present = ~np.isnan(numbers)
    return NumberSample(hashes[present], numbers[present]).lowest()
