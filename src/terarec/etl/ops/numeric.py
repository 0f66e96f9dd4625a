# SPDX-License-Identifier: Apache-2.0
"""Operators on numbers. x is a value, n the number of training values that are not missing; see docs/workflows.md."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.etl.columns import (
    Kind,
    Rows,
    array_of,
    flat,
    kind_of,
    like,
    null_mask,
    number_arrays,
    numbers_of,
    numpy_values,
    write_numbers,
)
from terarec.etl.ops.base import ColumnTypes, MappedColumns, Stage, value_of
from terarec.etl.ops.fitted_params import FittedParams, RangeParams, ScaleParams, ShiftParams
from terarec.etl.ops.states import FittedNumbers, Moments, NumberRange, SpillOptions, State, Statistic, SummedStatistic
from terarec.etl.ops.values import RecordFunction, as_numbers, item_function, rejected
from terarec.kernels.cpu.encoding import InvalidValueError
from terarec.spec import checks
from terarec.spec.registry import register

Param: TypeAlias = float | NDArray[np.float64]
"""Parameter of a formula: of one column, or float64[c, 1] of c columns."""


@dataclass(frozen=True, kw_only=True)
class NumberOperator(MappedColumns):
    """Base of operators that compute one number of each number, in float64.

    Columns of one length go through the formula as one matrix: threads that did it column by column would wait for the
    GIL after each of NumPy's short calls. When records are served, integers go as float64, too, where only their number
    matters: the formulas that keep integers keep the order of two numbers, and their bounds are float64.

    Attributes:
        fitted_params: Class of the parameters that are fitted; None for none.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    is_numeric: ClassVar[bool] = True
    output_kind: ClassVar[Kind | None] = "number"
    fitted_params: ClassVar[type[FittedParams] | None] = None

    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the parameters of the formula for the input `name`; by default the fitted ones."""
        if self.fitted_params is None:
            return ()
        assert isinstance(state, FittedNumbers)
        return tuple(state.columns[name][field.name] for field in fields(self.fitted_params))

    @override
    def load_state(self, directory: Path, name: str) -> State:
        assert self.fitted_params is not None
        return FittedNumbers.load(directory, name, self, self.fitted_params)

    @abstractmethod
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute the outputs of ``numbers float64[..., n]``, NaN being missing; params are numbers or [..., 1]."""

    def checked_formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute the formula, or raise `InvalidValueError` for a number that it does not take."""
        return self.formula(numbers, *params)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        numbers = [pair for pair in self.pairs if types[pair[0]].kind in ("number", "integer")]
        single = [pair for pair in numbers if not types[pair[0]].is_list]
        functions = [
            self._list_function(name, output, state)
            for name, output in numbers
            # Operators that keep integers have functions of their own for them.
            if types[name].is_list and not (self.keeps_integers and types[name].kind == "integer")
        ]
        if single:
            names, outputs = zip(*single, strict=True)
            call = partial(self._transform_matrix, self._param_columns(names, state))
            functions.append(RecordFunction(names, outputs, call, takes="matrix", gives="matrix"))
        return functions

    def _transform_matrix(self, params: Sequence[NDArray[np.float64]], numbers: NDArray[np.float64]) -> NDArray[Any]:
        return self.checked_formula(numbers, *params)

    def _list_function(self, name: str, output: str, state: State | None) -> RecordFunction:
        params = self.params(name, state)

        def call(items: Any) -> NDArray[Any]:
            return self.checked_formula(as_numbers(items), *params)

        return item_function(name, output, call, is_list=True)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = dict(self.pairs)
        arrays = {name: rows.columns[name] for name in self.columns}
        values = {name: flat(array) for name, array in arrays.items()}
        lengths: dict[int, list[str]] = {}
        for name, array in values.items():
            # Columns of lists have other numbers of items than rows, and than each other.
            lengths.setdefault(len(array), []).append(name)
        arrays_by_name = {}
        for length, names in lengths.items():
            numbers = np.empty((len(names), length))
            for row, name in zip(numbers, names, strict=True):
                write_numbers(values[name], row)
            results = np.ascontiguousarray(self.formula(numbers, *self._param_columns(names, state)), dtype=np.float64)
            for name, array in zip(names, number_arrays(results), strict=True):
                arrays_by_name[outputs[name]] = like(arrays[name], array)
        return rows.with_columns(arrays_by_name)

    def _param_columns(self, names: Sequence[str], state: State | None) -> tuple[NDArray[np.float64], ...]:
        """Return the parameters of the formula for the inputs `names`, float64[len(names), 1] each."""
        params = zip(*(self.params(name, state) for name in names), strict=True)
        return tuple(np.array(values, dtype=np.float64)[:, None] for values in params)


@register("log_op")
@dataclass(frozen=True, kw_only=True)
class LogOp(NumberOperator):
    """ln(x + shift).

    Attributes:
        shift: None fits it: 1 - (least training value), so that this one becomes 0; lower values are raised to it.
    """

    fitted_params: ClassVar[type[FittedParams] | None] = ShiftParams
    shift: checks.Finite | None = 1.0

    @property
    @override
    def stage(self) -> Stage:
        return "fitted" if self.shift is None else "stateless"

    @property
    @override
    def may_reject(self) -> bool:
        return self.shift is not None

    @override
    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        return super().params(name, state) if self.shift is None else (self.shift,)

    @override
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        (shift,) = params
        if self.shift is not None:
            return np.asarray(np.log(numbers + shift))
        # The sum is bounded, and not x: where the least value is beyond 2^53, its sum with the shift may be 0.
        shifted = np.asarray(np.maximum(numbers + shift, 1.0))
        return np.asarray(np.log(shifted, out=shifted))

    @override
    def checked_formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        if self.shift is not None and np.count_nonzero(numbers <= -params[0]):
            # The row does not matter: the steps transform the records then, and name it.
            raise InvalidValueError(0)
        return self.formula(numbers, *params)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute the formula.

        Raises:
            RowFaultError: X + shift is not above 0.
        """
        for name in self.columns if self.shift is not None else ():
            (shift,) = self.params(name, state)
            low = numbers_of(rows.columns[name]) <= -shift
            if low.any():
                raise rejected(rows, name, low, accepted_number(shift))
        return super().transform(rows, state)

    @override
    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        (shift,) = self.params(column, state)
        if not is_float32:
            return np.exp(numbers) - shift
        # Rounded before the shift is taken off: the logarithm held digits of x + shift, and not of x.
        return _to_digits(np.exp(numbers) - shift + shift) - shift

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        return SummedStatistic(
            self.kind, self.columns, NumberRange, lambda span: {"shift": 1.0 - span.minimum if span else 1.0}
        )


def accepted_number(shift: float) -> str:
    """Describe the numbers that have a logarithm."""
    return f"more than {-shift!r} for a logarithm (Clip raises lower ones)"


def _to_digits(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round numbers above 0 to five digits, which logarithms in float32 hold."""
    powers = 10.0 ** (4 - np.floor(np.log10(numbers, where=numbers > 0.0, out=np.zeros_like(numbers))))
    return np.asarray(np.round(numbers * powers) / powers)


def _rounded(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round away the digits that float32 did not hold, so that 38 is 38 after scaling by any mean and deviation."""
    width = float(np.ptp(numbers)) if len(numbers) else 0.0
    if not 0.0 < width < math.inf:
        return numbers
    return np.round(numbers, -math.floor(math.log10(width * 2.0**-20)) - 1)


@register("normalize")
@dataclass(frozen=True, kw_only=True)
class Normalize(NumberOperator):
    """(x - mean) / deviation of the training values; the population's deviation, 1 where it is 0."""

    stage: ClassVar[Stage] = "fitted"
    fitted_params: ClassVar[type[FittedParams] | None] = ScaleParams

    @override
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        mean, deviation = params
        return np.asarray((numbers - mean) / deviation)

    @override
    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        mean, deviation = self.params(column, state)
        originals = numbers * deviation + mean
        return _rounded(originals) if is_float32 else originals

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        return SummedStatistic(
            self.kind, self.columns, Moments, lambda moments: {"mean": moments.mean, "deviation": moments.deviation}
        )


@register("normalize_min_max")
@dataclass(frozen=True, kw_only=True)
class NormalizeMinMax(NumberOperator):
    """(x - min) / (max - min) of the training values; 0 where max = min."""

    stage: ClassVar[Stage] = "fitted"
    fitted_params: ClassVar[type[FittedParams] | None] = RangeParams

    @override
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        minimum, maximum = params
        width = np.asarray(maximum - minimum)
        # Where all training values were one, any value gives 0, and a missing one stays NaN.
        return np.asarray((width > 0.0) * (numbers - minimum) / np.where(width > 0.0, width, 1.0))

    @override
    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        minimum, maximum = self.params(column, state)
        originals = numbers * (maximum - minimum) + minimum
        return _rounded(originals) if is_float32 else originals

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        return SummedStatistic(self.kind, self.columns, NumberRange, _range_params)


def _range_params(span: NumberRange) -> dict[str, float]:
    return {"minimum": span.minimum, "maximum": span.maximum} if span else {"minimum": 0.0, "maximum": 0.0}


@register("clip")
@dataclass(frozen=True, kw_only=True)
class Clip(NumberOperator):
    """min(max(x, low), high).

    Attributes:
        low: Least result; None for no bound.
        high: Greatest result; None for no bound. One of both is required.
    """

    keeps_integers: ClassVar[bool] = True
    low: checks.Finite | None = None
    high: checks.Finite | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            checks.reject(self, "", "got neither low nor high, expected at least one")
        if self.low is not None and self.high is not None and self.low > self.high:
            checks.fail(self, "low", f"at most high, {self.high!r}")

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        types_of_outputs = {output: self.input_type(types, name) for name, output in self.pairs}
        for name in self.columns:
            for bound in (self.low, self.high):
                if bound is not None and types[name].kind == "integer":
                    value_of("integer", bound, f"column {name!r}")
        return types_of_outputs

    @override
    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        low = -np.inf if self.low is None else self.low
        return low, np.inf if self.high is None else self.high

    @override
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        low, high = params
        return np.asarray(np.minimum(np.maximum(numbers, low), high))

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        functions = list(super().record_functions(types, state))
        for name, output in self.pairs:
            if types[name].kind == "integer":
                functions.append(item_function(name, output, self._clip_values, is_list=types[name].is_list))
        return functions

    def _clip_values(self, values: list[int | None]) -> list[int | None]:
        # `output_types` has checked that bounds of integers are whole.
        low = -(2**63) if self.low is None else int(self.low)
        high = 2**63 if self.high is None else int(self.high)
        return [None if value is None else min(max(value, low), high) for value in values]

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            if kind_of(array) == "number":
                clipped = array_of(self.formula(numbers_of(array), *self.params(name, state)))
            else:
                values = flat(array)
                low, high = (None if bound is None else int(bound) for bound in (self.low, self.high))
                clipped = array_of(np.clip(numpy_values(values), low, high), null_mask(values))
            outputs[output] = like(array, clipped)
        return rows.with_columns(outputs)
