# SPDX-License-Identifier: Apache-2.0
"""States of fitted operators: how they are gathered, their files, and exact sums and ranges of numbers.

Parameters are saved as JSON, and tables with a row for each value as Parquet. Sums are exact, so that block sizes and
threads change no bit of a state. Described in docs/workflows.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError
from terarec.etl.columns import Rows, flat, numbers_of, numpy_values
from terarec.etl.ops.fitted_params import FittedParams, decode_state, params_of
from terarec.formats.parquet import arrow_errors
from terarec.io.files import AtomicFile, read_versioned_json, write_versioned_json
from terarec.io.opening import arrow_file
from terarec.spec.checks import quoted
from terarec.spec.registry import OperatorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillOptions:
    """Resources of a statistic while it gathers.

    Attributes:
        directory: An existing directory for what does not fit in memory; emptied at the end of the phase.
        memory_bytes: Approximate size before it spills; None for no bound.
    """

    directory: Path
    memory_bytes: int | None = None


@runtime_checkable
class State(Protocol):
    """State of a fitted step. Frozen."""

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``, ``<name>.parquet`` or both (or ``<name>-<part>.parquet``) into `directory`.

        Files need not be forced to the disk: the caller does it.
        """


class Statistic(Protocol):
    """Gathers the state of a step, block by block."""

    def observe(self, rows: Rows) -> Any:
        """Return the partial state of some training rows for `merge`; several threads call it at a time."""

    def merge(self, partial: Any) -> None:
        """Add a partial state. One thread calls it, in the order of the blocks."""

    def finish(self) -> State:
        """Return the state after the last block."""


@runtime_checkable
class MergeableStatistic(Statistic, Protocol):
    """A statistic with small states, which a cluster merges in a tree, in any order."""

    def partial(self) -> Any:
        """Return the merged state so far as one partial state, for `merge` of another statistic."""


@runtime_checkable
class KeyedStatistic(Statistic, Protocol):
    """A statistic whose state has a row for each value: a cluster shuffles partial states by value.

    Attributes:
        in_order: Whether rows must be merged in the order of the blocks. Otherwise `observe` gathers what `split`
            returns, once for many blocks.
    """

    in_order: bool

    def split(self, partial: Any) -> tuple[Mapping[str, pa.Table], Any]:
        """Return tables by name, whose first column "value" they are shuffled by, and the rest of a partial state."""

    def merge_rest(self, rest: Any) -> None:
        """Add the rest of a partial state. Every process gets all of them, in order, before any rows."""

    def merge_rows(self, rows: Mapping[str, pa.Table]) -> None:
        """Add rows of `split`, or of `reduced`."""

    def reduced(self, name: str) -> pa.Table:
        """Return the merged rows of table `name`, which hold all rows of their values, and free them."""


STATE_FORMAT = "terarec.state"
STATE_VERSION = 1


def write_params(directory: Path, name: str, kind: str, state: Mapping[str, Any]) -> None:
    """Write ``<name>.json``: the parameters of the step `name` of this `kind`; numbers are restored bit for bit.

    The file is not forced to the disk; see `State.save`.
    """
    write_versioned_json(
        directory / f"{name}.json", STATE_FORMAT, STATE_VERSION, {"kind": kind, "state": state}, flushes=False
    )


def read_params(directory: Path, name: str, kind: str) -> Mapping[str, Any]:
    """Read the file of `write_params`."""
    path = directory / f"{name}.json"
    content = read_versioned_json(path, STATE_FORMAT, STATE_VERSION)
    if content.get("kind") != kind:
        raise FormatError(f"{path}: $.kind", f"got {quoted(content.get('kind'))}, expected {kind!r}")
    state = content.get("state")
    if not isinstance(state, dict):
        raise FormatError(f"{path}: $.state", f"got {quoted(state)}, expected an object")
    return state


_MOST_NAME = 220


def table_path(directory: Path, name: str, part: str) -> Path:
    """Return ``<name>-<part>.parquet``; characters of `part`, a column, that no file name holds become ``%2F``.

    Of a longer name than file systems take there is the beginning, and a digest of the column.
    """
    quoted_part = quote(part, safe=" ")
    if len(name) + len(quoted_part) > _MOST_NAME:
        quoted_part = f"{quoted_part[: _MOST_NAME // 2]}-{hashlib.sha256(part.encode()).hexdigest()[:16]}"
    return directory / f"{name}-{quoted_part}.parquet"


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically, but do not force it to the disk; see `State.save`."""
    file = AtomicFile(path, flushes=False)
    with file.guard():
        # A flipped bit in a vocabulary would go unnoticed: other values would get ids, and scores would be wrong.
        pq.write_table(table, file.partial, write_page_checksum=True)
    file.commit()


def read_table(path: Path, types: Mapping[str, Sequence[pa.DataType]], nullable: Sequence[str] = ()) -> pa.Table:
    """Read the file of `write_table`.

    Args:
        path: Path of the file.
        types: Its columns, and the types that each may have.
        nullable: Columns that may hold nulls.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a Parquet file, other columns or types, or a null.
    """
    with arrow_errors(str(path)), arrow_file(path) as file:
        # In this thread alone: these files are small, and Arrow's threads are one more thing to wait for.
        opened = pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
        table = opened.read(use_threads=False)
    fields = {field.name: field.type for field in table.schema}
    if fields.keys() != types.keys() or any(arrow_type not in types[name] for name, arrow_type in fields.items()):
        shown = ", ".join(f"{name}: {arrow_type}" for name, arrow_type in fields.items())
        expected = ", ".join(f"{name}: {' or '.join(map(str, accepted))}" for name, accepted in types.items())
        raise FormatError(path, f"got columns {shown}, expected {expected}")
    for name in types:
        if name not in nullable and table.column(name).null_count:
            raise FormatError(f"{path}, column {name!r}", "holds nulls, expected none")
    return table.combine_chunks()


_CHUNK_BITS = 16
_CHUNK = 1 << _CHUNK_BITS
# Veltkamp's constant, which splits the 53 bits of a float64 into halves whose products are exact.
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
    # NumPy has no fused multiply-add, which would give the error of the product in one operation.
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
    """Exact sums of numbers: the moments of a column are those of its parts added up, bit for bit."""

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
        # In fractions: float64 would cancel where numbers lie far from 0.
        variance = self.squares / self.count - (self.total / self.count) ** 2
        halves = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
        # The square of a large deviation is not a float64: the root is taken near 1.
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
        # `fmin` and `fmax` pass over NaN.
        least, most = np.fmin.reduce(numbers, initial=math.inf), np.fmax.reduce(numbers, initial=-math.inf)
        return cls(float(least), float(most))

    def __add__(self, other: NumberRange) -> NumberRange:
        return NumberRange(min(self.minimum, other.minimum), max(self.maximum, other.maximum))

    def __bool__(self) -> bool:
        """Return whether there was any number."""
        return self.minimum <= self.maximum


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
    def load(
        cls, directory: Path, name: str, spec: OperatorSpec, params: type[FittedParams] | Sequence[str]
    ) -> FittedNumbers:
        """Read what `save` wrote.

        `params` is the class of the parameters of each column; or their names, where any finite numbers are accepted.

        Raises:
            DataNotFoundError: No such file.
            FormatError: Another kind, another parameter, or one out of its range.
        """
        kind = params if isinstance(params, type) else params_of(params)
        params_by_column = read_params(directory, name, spec.kind).get("columns")
        columns = params_by_column if isinstance(params_by_column, dict) else {}
        where = f"{directory / name}.json: $.state.columns"
        return cls(
            spec.kind,
            {
                column: dataclasses.asdict(decode_state(kind, columns.get(column), f"{where}.{column}"))
                for column in spec.reads
            },
        )


class SummedStatistic(MergeableStatistic, Generic[SummandT]):
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

    @override
    def observe(self, rows: Rows) -> Mapping[str, SummandT]:
        return {name: self._summand.of(_summands(rows.columns[name])) for name in self._sums}

    @override
    def merge(self, partial: Mapping[str, SummandT]) -> None:
        for name, summand in partial.items():
            self._sums[name] = self._sums[name] + summand

    @override
    def partial(self) -> Mapping[str, SummandT]:
        return dict(self._sums)

    @override
    def finish(self) -> FittedNumbers:
        return FittedNumbers(self._kind, {name: self._figures(total) for name, total in self._sums.items()})


def _summands(array: pa.Array) -> NDArray[Any]:
    """Return the m numbers of an array; integers without a copy if none is missing."""
    values = flat(array)
    return numbers_of(values) if values.null_count else numpy_values(values)
