"""Operators on numbers. x is a value, n the number of training values that are not missing; see docs/workflows.md."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

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
    number_arrays,
    numbers_of,
    numpy_values,
    write_numbers,
)
from terarec.etl.ops.base import ColumnTypes, MappedColumns, Stage, value_of
from terarec.etl.ops.states import FittedNumbers, Moments, NumberRange, SpillOptions, State, Statistic, SummedStatistic
from terarec.etl.ops.values import RecordFunction, as_numbers, item_function, rejected
from terarec.kernels.encoding_types import InvalidValueError
from terarec.ragged import flat_values, like_values, map_values
from terarec.spec import checks, register

if TYPE_CHECKING:  # they load torch
    from torch import Tensor

    from terarec.etl.tensors import DeviceColumn, TensorBlock, TensorColumn, TensorDevice, TensorFunction


Param: TypeAlias = float | NDArray[np.float64]
"""Parameter of a formula: of one column, or float64[c, 1] of c columns."""


@dataclass(frozen=True, kw_only=True)
class NumberOperator(MappedColumns):
    """Base of operators that compute one number of each number, in float64.

    Columns of one length go through the formula as one matrix: threads that did it column by column would wait for the
    GIL after each of NumPy's short calls. When records are served, integers go as float64, too, where only their number
    matters: the formulas that keep integers keep the order of two numbers, and their bounds are float64.

    Attributes:
        fitted_params: Names of the parameters that are fitted, in the order of `params`; plural ones are lists.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    is_numeric: ClassVar[bool] = True
    fitted_params: ClassVar[tuple[str, ...]] = ()

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return numbers."""
        return {
            output: ColumnType("number", found.is_list, found.max_length)
            for output, found in super().output_types(types).items()
        }

    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the parameters of the formula for the input `name`; by default the fitted ones."""
        if not self.fitted_params:
            return ()
        assert isinstance(state, FittedNumbers)
        return tuple(state.columns[name][param] for param in self.fitted_params)

    def load_state(self, directory: Path, name: str) -> State:
        """Read the parameters that are fitted."""
        return FittedNumbers.load(directory, name, self, self.fitted_params)

    @abstractmethod
    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute the outputs of ``numbers float64[..., n]``, NaN being missing; params are numbers or [..., 1]."""

    def checked_formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute the formula, or raise `InvalidValueError` for a number that it does not take."""
        return self.formula(numbers, *params)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return the formula for all columns at once, and for lists one by one."""
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

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute the formula."""
        outputs = dict(self.pairs)
        arrays = {name: rows.columns[name] for name in self.columns}
        values = {name: flat(array) for name, array in arrays.items()}
        lengths: dict[int, list[str]] = {}
        for name, array in values.items():
            # Columns of lists have other numbers of items than rows, and than each other.
            lengths.setdefault(len(array), []).append(name)
        made = {}
        for length, names in lengths.items():
            numbers = np.empty((len(names), length))
            for row, name in zip(numbers, names, strict=True):
                write_numbers(values[name], row)
            results = np.ascontiguousarray(self.formula(numbers, *self._param_columns(names, state)), dtype=np.float64)
            for name, array in zip(names, number_arrays(results), strict=True):
                made[outputs[name]] = like(arrays[name], array)
        return rows.with_columns(made)

    def tensor_formula(self, numbers: Tensor, *params: Tensor) -> Tensor:
        """Compute `formula` of ``numbers float64[c, m]`` on a device; params are float64[c, 1]."""
        raise NotImplementedError(f"{type(self).__name__} does not run on tensors")

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return `tensor_formula` of all columns of one length at once."""
        params = {name: device.numbers(self.params(name, state)) for name in self.columns}

        def call(block: TensorBlock) -> Mapping[str, DeviceColumn]:
            outputs = dict(self.pairs)
            lengths: dict[int, list[str]] = {}
            for name in self.columns:
                lengths.setdefault(len(flat_values(block.columns[name])), []).append(name)
            made = {}
            for names in lengths.values():
                columns = [block.columns[name] for name in names]
                matrix = device.stack([flat_values(column).numbers() for column in columns])
                param_columns = device.stack([params[name] for name in names]).T[:, :, None]
                results = self.tensor_formula(matrix, *param_columns)
                for name, column, values in zip(names, columns, results, strict=True):
                    made[outputs[name]] = like_values(column, device.values("number", values))
            return made

        return call

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

    fitted_params: ClassVar[tuple[str, ...]] = ("shift",)
    runs_on_tensors: ClassVar[bool] = True
    shift: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift is not None:
            checks.finite_float(self, "shift")

    @property
    def stage(self) -> Stage:
        """A shift that is not provided is fitted."""
        return "fitted" if self.shift is None else "stateless"

    @property
    def may_reject(self) -> bool:
        """A provided shift rejects x <= -shift."""
        return self.shift is not None

    def params(self, name: str, state: State | None) -> tuple[float, ...]:
        """Return the shift."""
        return super().params(name, state) if self.shift is None else (self.shift,)

    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute ln(x + shift); with a fitted shift ln(max(x, 1 - shift) + shift)."""
        (shift,) = params
        if self.shift is not None:
            return np.asarray(np.log(numbers + shift))
        shifted = np.asarray(np.maximum(numbers, 1.0 - shift))
        shifted += shift
        return np.asarray(np.log(shifted, out=shifted))

    def checked_formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute the formula, or raise `InvalidValueError` for x <= -shift."""
        if self.shift is not None and np.count_nonzero(numbers <= -params[0]):
            # The row does not matter: the steps transform the records then, and name it.
            raise InvalidValueError(0)
        return self.formula(numbers, *params)

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

    def tensor_formula(self, numbers: Tensor, *params: Tensor) -> Tensor:
        """Compute ln(x + shift); with a fitted shift ln(max(x, 1 - shift) + shift)."""
        (shift,) = params
        return ((numbers if self.shift is not None else numbers.maximum(1.0 - shift)) + shift).log()

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return the formula; a provided shift rejects x <= -shift."""
        formula = super().tensor_function(state, device)

        def call(block: TensorBlock) -> Mapping[str, DeviceColumn]:
            if self.shift is not None:
                for name in self.columns:
                    numbers = flat_values(block.columns[name]).numbers()
                    block.reject(name, numbers <= -self.shift, accepted_number(self.shift))
            return formula(block)

        return call

    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        """Return exp(y) - shift."""
        (shift,) = self.params(column, state)
        if not is_float32:
            return np.exp(numbers) - shift
        # Rounded before the shift is taken off: the logarithm held digits of x + shift, and not of x.
        return _to_digits(np.exp(numbers) - shift + shift) - shift

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a statistic of minima."""
        return SummedStatistic(
            self.kind, self.columns, NumberRange, lambda found: {"shift": 1.0 - found.minimum if found else 1.0}
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
    if not width > 0.0:
        return numbers
    return np.round(numbers, -math.floor(math.log10(width * 2.0**-20)) - 1)


@register("normalize")
@dataclass(frozen=True, kw_only=True)
class Normalize(NumberOperator):
    """(x - mean) / deviation of the training values; the population's deviation, 1 where it is 0."""

    stage: ClassVar[Stage] = "fitted"
    fitted_params: ClassVar[tuple[str, ...]] = ("mean", "deviation")
    runs_on_tensors: ClassVar[bool] = True

    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute (x - mean) / deviation."""
        mean, deviation = params
        return np.asarray((numbers - mean) / deviation)

    def tensor_formula(self, numbers: Tensor, *params: Tensor) -> Tensor:
        """Compute (x - mean) / deviation."""
        mean, deviation = params
        return (numbers - mean) / deviation

    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        """Return y * deviation + mean."""
        mean, deviation = self.params(column, state)
        found = numbers * deviation + mean
        return _rounded(found) if is_float32 else found

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a statistic of means and deviations."""
        return SummedStatistic(
            self.kind, self.columns, Moments, lambda found: {"mean": found.mean, "deviation": found.deviation}
        )


@register("normalize_min_max")
@dataclass(frozen=True, kw_only=True)
class NormalizeMinMax(NumberOperator):
    """(x - min) / (max - min) of the training values; 0 where max = min."""

    stage: ClassVar[Stage] = "fitted"
    fitted_params: ClassVar[tuple[str, ...]] = ("minimum", "maximum")
    runs_on_tensors: ClassVar[bool] = True

    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
        """Compute (x - minimum) / (maximum - minimum), 0 where both are equal."""
        minimum, maximum = params
        width = np.asarray(maximum - minimum)
        # Where all training values were one, any value gives 0, and a missing one stays NaN.
        return np.asarray((width > 0.0) * (numbers - minimum) / np.where(width > 0.0, width, 1.0))

    def tensor_formula(self, numbers: Tensor, *params: Tensor) -> Tensor:
        """Compute (x - minimum) / (maximum - minimum), 0 where both are equal."""
        minimum, maximum = params
        width = maximum - minimum
        return (width > 0.0) * (numbers - minimum) / width.masked_fill(width <= 0.0, 1.0)

    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        """Return y * (maximum - minimum) + minimum."""
        minimum, maximum = self.params(column, state)
        found = numbers * (maximum - minimum) + minimum
        return _rounded(found) if is_float32 else found

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a statistic of ranges."""
        return SummedStatistic(self.kind, self.columns, NumberRange, _range_params)


def _range_params(found: NumberRange) -> dict[str, float]:
    return {"minimum": found.minimum, "maximum": found.maximum} if found else {"minimum": 0.0, "maximum": 0.0}


@register("clip")
@dataclass(frozen=True, kw_only=True)
class Clip(NumberOperator):
    """min(max(x, low), high); None is not a bound."""

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

    def formula(self, numbers: NDArray[Any], *params: Param) -> NDArray[Any]:
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
        # `output_types` has checked that bounds of integers are whole.
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
                low, high = (None if bound is None else int(bound) for bound in (self.low, self.high))
                clipped = array_of(np.clip(numpy_values(values), low, high), null_mask(values))
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
