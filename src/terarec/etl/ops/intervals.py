"""Operators that compare numbers with bounds: cut to an interval, or number of the interval; see docs/workflows.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import (
    ColumnType,
    Rows,
    array_of,
    flat,
    kind_of,
    like,
    null_mask,
    numbers_of,
    numpy_values,
)
from terarec.etl.ops.base import MISSING, ColumnTypes, MappedColumns, SpillOptions, Stage, State, Statistic
from terarec.etl.ops.number_states import FittedNumbers, SampleStatistic
from terarec.etl.ops.numeric import NumberOperator
from terarec.etl.ops.record_values import RecordFunction, as_numbers, item_function
from terarec.etl.ops.values import value_of
from terarec.ragged import map_values
from terarec.spec import MISSING_ID, checks, register

if TYPE_CHECKING:  # they load torch
    from terarec.etl.tensors import TensorColumn, TensorDevice, TensorFunction


@register("clip")
@dataclass(frozen=True, kw_only=True)
class Clip(NumberOperator):
    """min(max(x, low), high); None is no bound."""

    keeps_integers: ClassVar[bool] = True
    runs_on_tensors: ClassVar[bool] = True
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for bound in ("low", "high"):
            if getattr(self, bound) is not None:
                checks.finite_float(self, bound)
        if self.low is None and self.high is None:
            checks.reject(self, "", "got neither low nor high, expected at least one")
        if self.low is not None and self.high is not None and self.low > self.high:
            checks.fail(self, "low", f"at most high, {self.high!r}")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of the inputs."""
        made = {output: self.input_type(types, name) for name, output in self.pairs}
        for name in self.columns:
            for bound in (self.low, self.high):
                if bound is not None and types[name].kind == "integer":
                    value_of("integer", bound, f"column {name!r}")
        return made

    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the bounds."""
        low = -np.inf if self.low is None else self.low
        return low, np.inf if self.high is None else self.high

    def formula(self, numbers: NDArray[Any], *params: Any) -> NDArray[Any]:
        """Compute min(max(x, low), high)."""
        low, high = params
        return np.asarray(np.minimum(np.maximum(numbers, low), high))

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return the formula for numbers, and a function for integers that stay integers."""
        functions = list(super().record_functions(types, state))
        for name, output in self.pairs:
            if types[name].kind == "integer":
                functions.append(item_function(name, output, self._clip_values, is_list=types[name].is_list))
        return functions

    def _clip_values(self, values: list[int | None]) -> list[int | None]:
        low = -(2**63) if self.low is None else int(self.low)
        high = 2**63 if self.high is None else int(self.high)
        return [None if value is None else min(max(value, low), high) for value in values]

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute min(max(x, low), high); integers stay integers."""
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            if kind_of(array) == "number":
                clipped = array_of(self.formula(numbers_of(array), *self.params(name, state)))
            else:
                values = flat(array)
                clipped = array_of(self._clip_integers(numpy_values(values)), null_mask(values))
            made[output] = like(array, clipped)
        return rows.with_columns(made)

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return min(max(x, low), high); integers stay integers."""

        def clipped(found: TensorColumn) -> TensorColumn:
            as_own = float if found.type == "number" else int
            low, high = (None if bound is None else as_own(bound) for bound in (self.low, self.high))
            values = found.values.clamp(low, high)
            values = values if found.missing is None else values.masked_fill(found.missing, 0)
            return device.values(found.type, values, found.missing)

        return lambda block: {output: map_values(block.columns[name], clipped) for name, output in self.pairs}

    def _clip_integers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.low is not None:
            values = np.maximum(values, int(self.low))
        return values if self.high is None else np.minimum(values, int(self.high))


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
    runs_on_tensors: ClassVar[bool] = True
    boundaries: tuple[float, ...] = ()
    intervals: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.boundaries) is (self.intervals is not None):
            checks.reject(self, "", "expected exactly one of boundaries and intervals")
        if self.intervals is not None:
            checks.positive_int(self, "intervals", minimum=2)
        numbers = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in self.boundaries)
        if not numbers or not all(a < b for a, b in itertools.pairwise(self.boundaries)):
            checks.fail(self, "boundaries", "rising numbers")

    @property
    def stage(self) -> Stage:
        """Boundaries that are not provided are fitted."""
        return "stateless" if self.intervals is None else "fitted"

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return ids."""
        return {
            output: ColumnType("id", found.is_list, found.max_length)
            for output, found in super().output_types(types).items()
        }

    def boundaries_of(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the boundaries for the input `name`."""
        if self.intervals is None:
            return self.boundaries
        assert isinstance(state, FittedNumbers)
        boundaries: tuple[float, ...] = state.columns[name]["boundaries"]
        return boundaries

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Count the missing value's id, and one interval more than boundaries."""
        return {output: len(self.boundaries_of(name, state)) + 2 for name, output in self.pairs}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute 1 + the number of boundaries that are <= x."""
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            ids = _interval_ids(self._bounds(name, state), numbers_of(array))
            made[output] = like(array, array_of(ids, are_ids=True))
        return rows.with_columns(made)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return a function of numbers for each column."""
        functions = []
        for name, output in self.pairs:
            bounds = self._bounds(name, state)
            if types[name].is_list:
                functions.append(item_function(name, output, partial(_interval_ids_of_items, bounds), is_list=True))
            else:
                functions.append(RecordFunction((name,), (output,), partial(_interval_ids, bounds), takes="matrix"))
        return functions

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return 1 + the number of boundaries that are <= x."""
        bounds = {name: device.numbers(self._bounds(name, state)) for name in self.columns}
        return lambda block: {
            output: map_values(block.columns[name], methodcaller("interval_ids", bounds[name]))
            for name, output in self.pairs
        }

    def _bounds(self, name: str, state: State | None) -> NDArray[np.float64]:
        return np.asarray(self.boundaries_of(name, state), dtype=np.float64)

    def describe_ids(self, column: str, ids: NDArray[np.int64], state: State | None) -> Sequence[str]:
        """Return the intervals."""
        ends = ["-inf", *(f"{boundary:g}" for boundary in self.boundaries_of(column, state)), "inf"]
        return [MISSING if number == MISSING_ID else f"[{ends[number - 1]}, {ends[number]})" for number in ids]

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a statistic that samples."""
        intervals = self.intervals or 0
        return SampleStatistic(self.kind, self.columns, lambda sample: {"boundaries": sample.boundaries(intervals)})

    def load_state(self, directory: Path, name: str) -> FittedNumbers:
        """Read the boundaries."""
        return FittedNumbers.load(directory, name, self, ("boundaries",))


def _interval_ids(boundaries: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Compute ids of ``numbers float64[...]``, NaN being missing."""
    ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int64, copy=False) + 1
    ids[np.isnan(numbers)] = MISSING_ID
    return ids


def _interval_ids_of_items(boundaries: NDArray[np.float64], items: Any) -> NDArray[np.int64]:
    return _interval_ids(boundaries, as_numbers(items))
