"""The operator that fills missing values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
    numpy_values,
)
from terarec.etl.ops.base import ColumnTypes, SpillOptions, Stage, State, Statistic
from terarec.etl.ops.number_states import FittedNumbers, SampleStatistic
from terarec.etl.ops.numeric import NumberOperator
from terarec.etl.ops.record_values import RecordFunction, item_function
from terarec.etl.ops.values import value_of
from terarec.ragged import flat_values, like_values
from terarec.spec import checks, register

if TYPE_CHECKING:  # they load torch
    from terarec.etl.tensors import DeviceColumn, TensorBlock, TensorDevice, TensorFunction


@register("fill_missing")
@dataclass(frozen=True, kw_only=True)
class FillMissing(NumberOperator):
    """Fills missing values.

    Attributes:
        value: Replacement of missing values: a number for numbers and integers, a text for text columns.
        median: Take the lower median of the training values instead (the smallest x with at least n / 2 values <= x).
        indicator: Also add the number column ``<output>_missing``, 1 where the value was missing and 0 elsewhere.
    """

    fitted_params: ClassVar[tuple[str, ...]] = ("median",)
    keeps_integers: ClassVar[bool] = True
    runs_on_tensors: ClassVar[bool] = True
    accepted: ClassVar[tuple[str, ...]] = ("number", "integer", "text", "hex32")
    value: float | str | None = None
    median: bool = False
    indicator: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self, "median", (False, True))
        checks.one_of(self, "indicator", (False, True))
        if (self.value is None) is not self.median:
            checks.reject(self, "", f"got value {self.value!r} and median {self.median}, expected exactly one of them")
        if self.value is not None and not isinstance(self.value, str):
            checks.finite_float(self, "value")
        if self.value == "":
            checks.fail(self, "value", "a number or a text that is not empty")

    @property
    def stage(self) -> Stage:
        """A median is fitted."""
        return "fitted" if self.median else "stateless"

    @property
    def indicators(self) -> tuple[str, ...]:
        """Names of the columns that `indicator` adds, one for each output."""
        return tuple(f"{name}_missing" for name in self.outputs or self.columns) if self.indicator else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return (*(self.outputs or self.columns), *self.indicators)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of the inputs, and numbers for the indicators."""
        inputs = [self.input_type(types, name) for name in self.columns]
        for name, found in zip(self.columns, inputs, strict=True):
            self._check_fill(name, found)
        made = dict(zip(self.writes, inputs, strict=False))
        for name, found in zip(self.indicators, inputs, strict=False):
            made[name] = ColumnType("number", found.is_list, found.max_length)
        return made

    def _check_fill(self, name: str, found: ColumnType) -> None:
        if self.median and found.kind not in ("number", "integer"):
            raise ConfigError(f"column {name!r}", f"holds {found}, expected number or integer to have a median")
        if self.value is not None:
            value_of(found.kind, self.value, f"column {name!r}")

    def fill_of(self, name: str, kind: Kind, state: State | None) -> Any:
        """Return the value for missing ones of the input `name`, a column of `kind`; a median of integers is one."""
        if self.value is not None:
            return value_of(kind, self.value)
        assert isinstance(state, FittedNumbers)
        median = state.columns[name]["median"]
        return int(median) if kind == "integer" else median

    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the number for missing ones."""
        return (float(self.fill_of(name, "number", state)),)

    def formula(self, numbers: NDArray[Any], *params: Any) -> NDArray[Any]:
        """Replace missing numbers."""
        return np.where(np.isnan(numbers), params[0], numbers)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return the formula for numbers, functions of single values for others, and the indicators."""
        functions = list(super().record_functions(types, state))
        for name, output in self.pairs:
            found = types[name]
            if found.kind != "number":
                call = partial(_fill_values, self._record_fill(name, found.kind, state))
                functions.append(item_function(name, output, call, is_list=found.is_list))
        for name, output in zip(self.columns, self.indicators, strict=False):
            functions.append(item_function(name, output, _indicate_missing, is_list=types[name].is_list))
        return functions

    def _record_fill(self, name: str, kind: Kind, state: State | None) -> Any:
        if kind == "hex32":  # hexadecimal digits are text in records
            return self.value
        fill = self.fill_of(name, kind, state)
        return int(fill) if kind == "integer" else fill

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Fill missing values and add the indicators."""
        made: dict[str, pa.Array] = {}
        for position, (name, output) in enumerate(self.pairs):
            array = rows.columns[name]
            value = self.fill_of(name, kind_of(array), state)
            is_filled = name in rows.zero_nulls and value == 0
            made[output] = like(array, array_of(numpy_values(array)) if is_filled else _filled(flat(array), value))
            if self.indicator:
                made[self.indicators[position]] = like(array, array_of(is_missing(array).astype(np.float64)))
        return rows.with_columns(made)

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return a function that fills missing values and adds the indicators."""

        def call(block: TensorBlock) -> Mapping[str, DeviceColumn]:
            made = {}
            for position, (name, output) in enumerate(self.pairs):
                column = block.columns[name]
                found = flat_values(column)
                missing, fill = found.is_missing(), self.fill_of(name, found.type, state)
                fill = float(fill) if found.type == "number" else int(fill)
                filled = device.values(found.type, found.values.masked_fill(missing, fill))
                made[output] = like_values(column, filled)
                if self.indicator:
                    made[self.indicators[position]] = like_values(column, device.values("number", missing.double()))
            return made

        return call

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a statistic that samples."""
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
