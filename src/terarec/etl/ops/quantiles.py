# SPDX-License-Identifier: Apache-2.0
"""Operators fitted to quantiles of a sample of the training values: Bucketize, and FillMissing by its median.

Samples are taken by the hash of the row id, which block sizes and threads do not change. See docs/workflows.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError
from terarec.etl.columns import (
    ColumnType,
    Kind,
    Rows,
    array_of,
    filled,
    flat,
    is_missing,
    kind_of,
    like,
    list_offsets,
    numbers_of,
    numpy_values,
)
from terarec.etl.ops.base import MISSING, ColumnTypes, MappedColumns, Operator, Stage, value_of
from terarec.etl.ops.fitted_params import BoundaryParams, FittedParams, MedianParams
from terarec.etl.ops.numeric import NumberOperator, Param
from terarec.etl.ops.states import FittedNumbers, MergeableStatistic, Params, SpillOptions, State, Statistic
from terarec.etl.ops.values import RecordFunction, as_numbers, item_function
from terarec.kernels.cpu.encoding import HASH_SEED, xxh64_int64
from terarec.spec import checks
from terarec.spec.dataset import MISSING_ID
from terarec.spec.registry import register

SAMPLE_SIZE = 1 << 20
"""Largest number of values of a sample; quantiles of no more values are exact."""


@dataclass(frozen=True, slots=True)
class NumberSample:
    """A bottom-k sample: the numbers with the lowest hashes of their row ids, the same in every engine.

    Attributes:
        hashes: int64[k].
        numbers: float64[k], or int64[k] of a column of integers.
    """

    hashes: NDArray[np.int64]
    numbers: NDArray[Any]

    def lowest(self) -> NumberSample:
        """Return at most `SAMPLE_SIZE` of the numbers; of equal hashes (items of one list) the first."""
        if len(self.hashes) <= SAMPLE_SIZE:
            return self
        kept = np.argsort(self.hashes, kind="stable")[:SAMPLE_SIZE]
        return NumberSample(self.hashes[kept], self.numbers[kept])

    def median(self) -> float | int:
        """Return the lower median: the least number that at least half of them do not exceed; 0 for no numbers.

        It is an integer only where no float64 is.
        """
        middle = (len(self.numbers) - 1) // 2
        median = np.partition(self.numbers, middle)[middle].item() if len(self.numbers) else 0.0
        return float(median) if float(median) == median else median

    def boundaries(self, intervals: int) -> tuple[float, ...]:
        """Return at most ``intervals - 1`` rising boundaries that cut the numbers into intervals of about equal counts.

        With n numbers, q_k the least one that at least k n / intervals do not exceed, boundary k is the least number
        above q_k; where there is none, or the same one again, there is no boundary. So a value that fills several
        intervals gets one of its own: where nine of ten numbers are 0, the first boundary is the least number above 0.
        """
        values, counts = np.unique(self.numbers.astype(np.float64, copy=False), return_counts=True)
        # Integers on both sides: k n / intervals as a float could fall on the other side of a count.
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
        # No numbers have no type: float64 of an empty statistic would round the integers of the others.
        if not len(part.numbers):
            return
        self._parts.append(part)
        self._size += len(part.numbers)
        # At twice the size: a number that is added costs the sorting of two, however many blocks there are.
        if self._size > 2 * SAMPLE_SIZE:
            self._compact()

    def sample(self) -> NumberSample:
        """Return the sample of all parts."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        parts = self._parts or [NumberSample(np.empty(0, dtype=np.int64), np.empty(0))]
        hashes = np.concatenate([part.hashes for part in parts])
        numbers = np.concatenate([part.numbers for part in parts])
        self._parts = [NumberSample(hashes, numbers).lowest()]
        self._size = len(self._parts[0].numbers)


SAMPLE_SEED = HASH_SEED
"""Seed of the hash of a row id that decides whether the row's number is in a sample."""


class SampleStatistic(MergeableStatistic):
    """Gathers a `NumberSample` of columns; arguments as for `SummedStatistic`."""

    def __init__(self, kind: str, columns: Sequence[str], params: Callable[[NumberSample], Params]) -> None:
        self._kind = kind
        self._figures = params
        self._samples = {name: GrowingSample() for name in columns}

    @override
    def observe(self, rows: Rows) -> Mapping[str, NumberSample]:
        hashes = xxh64_int64(rows.ids, SAMPLE_SEED)
        return {name: _sample(rows.columns[name], hashes) for name in self._samples}

    @override
    def merge(self, partial: Mapping[str, NumberSample]) -> None:
        for name, sample in partial.items():
            self._samples[name].add(sample)

    @override
    def partial(self) -> Mapping[str, NumberSample]:
        return {name: growing.sample() for name, growing in self._samples.items()}

    @override
    def finish(self) -> FittedNumbers:
        samples = {name: growing.sample() for name, growing in self._samples.items()}
        return FittedNumbers(self._kind, {name: self._figures(sample) for name, sample in samples.items()})


def _sample(array: pa.Array, hashes: NDArray[np.int64]) -> NumberSample:
    items, offsets = flat(array), list_offsets(array)
    if offsets is not None:
        # The items of a list share the hash of their row.
        hashes = np.repeat(hashes, np.diff(offsets))
    numbers, present = numpy_values(items), ~is_missing(items)
    return NumberSample(hashes[present], numbers[present]).lowest()


@register("bucketize")
@dataclass(frozen=True, kw_only=True)
class Bucketize(MappedColumns):
    """Number -> id of its interval: 0 missing, else 1 + the number of boundaries that are <= x.

    Attributes:
        boundaries: Rising numbers.
        intervals: Number of about equal parts of the training values, between which boundaries are fitted instead.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    is_numeric: ClassVar[bool] = True
    output_kind: ClassVar[Kind | None] = "id"
    boundaries: tuple[float, ...] = ()
    intervals: Annotated[int, checks.whole(2, checks.MOST_WIDTH)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.boundaries) is (self.intervals is not None):
            checks.reject(self, "", "expected exactly one of boundaries and intervals")
        numbers = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in self.boundaries)
        if not numbers or not all(a < b for a, b in itertools.pairwise(self.boundaries)):
            checks.fail(self, "boundaries", "rising numbers")

    @property
    @override
    def stage(self) -> Stage:
        return "stateless" if self.intervals is None else "fitted"

    def boundaries_of(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the boundaries for the input `name`."""
        if self.intervals is None:
            return self.boundaries
        assert isinstance(state, FittedNumbers)
        boundaries: tuple[float, ...] = state.columns[name]["boundaries"]
        return boundaries

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {output: len(self.boundaries_of(name, state)) + 2 for name, output in self.pairs}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            ids = _interval_ids(self._bounds(name, state), numbers_of(array))
            outputs[output] = like(array, array_of(ids, are_ids=True))
        return rows.with_columns(outputs)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        functions = []
        for name, output in self.pairs:
            bounds = self._bounds(name, state)
            if types[name].is_list:
                functions.append(item_function(name, output, partial(_interval_ids_of_items, bounds), is_list=True))
            else:
                functions.append(RecordFunction((name,), (output,), partial(_interval_ids, bounds), takes="matrix"))
        return functions

    def _bounds(self, name: str, state: State | None) -> NDArray[np.float64]:
        return np.asarray(self.boundaries_of(name, state), dtype=np.float64)

    @override
    def describe_ids(self, column: str, ids: NDArray[np.int64], state: State | None) -> Sequence[str]:
        ends = ["-inf", *(f"{boundary:g}" for boundary in self.boundaries_of(column, state)), "inf"]
        return [MISSING if number == MISSING_ID else f"[{ends[number - 1]}, {ends[number]})" for number in ids]

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        intervals = self.intervals or 0
        return SampleStatistic(self.kind, self.columns, lambda sample: {"boundaries": sample.boundaries(intervals)})

    @override
    def load_state(self, directory: Path, name: str) -> FittedNumbers:
        return FittedNumbers.load(directory, name, self, BoundaryParams)


def _interval_ids(boundaries: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Compute ids of ``numbers float64[...]``, NaN being missing."""
    ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int64, copy=False) + 1
    ids[np.isnan(numbers)] = MISSING_ID
    return ids


def _interval_ids_of_items(boundaries: NDArray[np.float64], items: Any) -> NDArray[np.int64]:
    return _interval_ids(boundaries, as_numbers(items))


@register("fill_missing")
@dataclass(frozen=True, kw_only=True)
class FillMissing(NumberOperator):
    """Fills missing values.

    Attributes:
        value: Replacement of missing values: a number for numbers and integers, a text for text columns.
        median: Take the lower median of the training values instead (the smallest x with at least n / 2 values <= x).
        indicator: Also add the number column ``<output>_missing``, 1 where the value was missing and 0 elsewhere.
    """

    fitted_params: ClassVar[type[FittedParams] | None] = MedianParams
    keeps_integers: ClassVar[bool] = True
    accepted: ClassVar[tuple[str, ...]] = ("number", "integer", "text", "hex32")
    value: float | str | None = None
    median: bool = False
    indicator: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.value is None) is not self.median:
            checks.reject(self, "", f"got value {self.value!r} and median {self.median}, expected exactly one of them")
        if self.value is not None and not isinstance(self.value, str):
            checks.finite_float(self, "value")
        if self.value == "":
            checks.fail(self, "value", "a number or a text that is not empty")

    @property
    @override
    def stage(self) -> Stage:
        return "fitted" if self.median else "stateless"

    @property
    def indicators(self) -> tuple[str, ...]:
        """Names of the columns that `indicator` adds, one for each output."""
        return tuple(f"{name}_missing" for name in self.outputs or self.columns) if self.indicator else ()

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return (*(self.outputs or self.columns), *self.indicators)

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        inputs = [self.input_type(types, name) for name in self.columns]
        for name, column_type in zip(self.columns, inputs, strict=True):
            self._check_fill(name, column_type)
        types_of_outputs = dict(zip(self.writes, inputs, strict=False))
        for name, column_type in zip(self.indicators, inputs, strict=False):
            types_of_outputs[name] = ColumnType("number", column_type.is_list, column_type.max_length)
        return types_of_outputs

    @override
    def restricted_to(self, needed: set[str]) -> Operator:
        marked = zip(self.indicators, self.pairs, strict=False)
        return super().restricted_to({*needed, *(output for name, (_, output) in marked if name in needed)})

    def _check_fill(self, name: str, column_type: ColumnType) -> None:
        if self.median and column_type.kind not in ("number", "integer"):
            raise ConfigError(f"column {name!r}", f"holds {column_type}, expected number or integer to have a median")
        if self.value is not None:
            value_of(column_type.kind, self.value, f"column {name!r}")

    def fill_of(self, name: str, kind: Kind, state: State | None) -> Any:
        """Return the value for missing ones of the input `name`, a column of `kind`; a median of integers is one."""
        if self.value is not None:
            return value_of(kind, self.value)
        assert isinstance(state, FittedNumbers)
        median = state.columns[name]["median"]
        # The lower median is one of the values, so it is whole.
        return int(median) if kind == "integer" else median

    @override
    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        return (float(self.fill_of(name, "number", state)),)

    @override
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        return np.where(np.isnan(numbers), params[0], numbers)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        functions = list(super().record_functions(types, state))
        for name, output in self.pairs:
            column_type = types[name]
            if column_type.kind != "number":
                call = partial(_fill_values, self._record_fill(name, column_type.kind, state))
                functions.append(item_function(name, output, call, is_list=column_type.is_list))
        for name, output in zip(self.columns, self.indicators, strict=False):
            functions.append(item_function(name, output, _indicate_missing, is_list=types[name].is_list))
        return functions

    def _record_fill(self, name: str, kind: Kind, state: State | None) -> Any:
        if kind == "hex32":  # hexadecimal digits are text in records
            return self.value
        fill = self.fill_of(name, kind, state)
        return int(fill) if kind == "integer" else fill

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs: dict[str, pa.Array] = {}
        for position, (name, output) in enumerate(self.pairs):
            array = rows.columns[name]
            value = self.fill_of(name, kind_of(array), state)
            # The parser left 0 under the nulls: without its mask the buffer is the result, and nothing is copied.
            is_filled = name in rows.zero_nulls and value == 0
            outputs[output] = like(array, array_of(numpy_values(array)) if is_filled else _filled(flat(array), value))
            if self.indicator:
                outputs[self.indicators[position]] = like(array, array_of(is_missing(array).astype(np.float64)))
        return rows.with_columns(outputs)

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        return SampleStatistic(self.kind, self.columns, lambda sample: {"median": sample.median()})


def _fill_values(fill: Any, values: list[Any]) -> list[Any]:
    return [fill if value is None or value == "" else value for value in values]


def _indicate_missing(values: Any) -> NDArray[np.float64]:
    if isinstance(values, list):
        return np.array([value is None or value == "" for value in values], dtype=np.float64)
    return np.asarray(np.isnan(values), dtype=np.float64)


def _filled(array: pa.Array, value: Any) -> pa.Array:
    if not array.null_count:
        return array
    if kind_of(array) == "text":
        return array.fill_null(value)
    return array_of(filled(array, value))
