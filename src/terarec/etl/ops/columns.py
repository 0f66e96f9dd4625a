"""Operators that name, cut and compute columns, or choose rows. See docs/workflows.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import (
    ColumnType,
    Kind,
    Rows,
    from_arrow,
    ids_as_integers,
    numbers_of,
)
from terarec.etl.ops.base import (
    ColumnsOperator,
    ColumnTypes,
    Operator,
    Stage,
    State,
    check_column,
    check_columns,
    result_array,
)
from terarec.etl.ops.record_values import (
    RecordFunction,
    arrow_of_values,
    python_of_values,
    values_of_array,
    values_of_python,
)
from terarec.etl.ops.values import HEX_DIGITS, is_among, rejected, value_of
from terarec.kernels.encoding_types import InvalidValueError
from terarec.ragged import offsets_of
from terarec.spec import checks, register
from terarec.spec.named_code import imported
from terarec.spec.quoting import quoted

if TYPE_CHECKING:  # it loads torch
    from terarec.etl.tensors import TensorDevice, TensorFunction

ValueType = Literal["text", "integer", "number", "hex32"]
_VALUE_TYPES = ("text", "integer", "number", "hex32")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
FUNCTION_FIELDS = ("function", "record_function")
"""Fields of `LambdaOp` that name a function."""


@register("rename")
@dataclass(frozen=True, kw_only=True)
class Rename(Operator):
    """New names for columns, all at once: {"a": "b", "b": "a"} swaps two."""

    runs_on_tensors: ClassVar[bool] = True
    names: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [*self.names, *self.names.values()]
        if not self.names or not all(isinstance(name, str) and name for name in names):
            checks.reject(self, "names", f"got {quoted(dict(self.names))}, expected old names with their new names")
        checks.distinct(self, "names", tuple(self.names.values()))

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared; they are gone after it."""
        return tuple(self.names)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return tuple(self.names)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return tuple(self.names.values())

    @property
    def removes(self) -> tuple[str, ...]:
        """Old names that are no new ones."""
        return tuple(name for name in self.names if name not in self.names.values())

    @property
    def renames(self) -> Mapping[str, str]:
        """All names."""
        return self.names

    def restricted_to(self, needed: set[str]) -> Rename:
        """Return the operator for the new names that are `needed`."""
        return replace(self, names={old: new for old, new in self.names.items() if new in needed})

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of the old names."""
        return {new: types[old] for old, new in self.names.items()}

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Return those of the old names."""
        return {new: rows[old] for old, new in self.names.items() if old in rows}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Rename the columns."""
        kept = {name: array for name, array in rows.columns.items() if name not in self.names}
        named = {new: rows.columns[old] for old, new in self.names.items()}
        return Rows({**kept, **named}, rows.ids, rows.split)

    def tensor_function(self, state: State | None, device: TensorDevice) -> TensorFunction:
        """Return the columns under their new names; nothing reads the old ones."""
        return lambda block: {new: block.columns[old] for old, new in self.names.items()}


@register("lambda_op")
@dataclass(frozen=True, kw_only=True)
class LambdaOp(ColumnsOperator):
    """Calls a function that can be imported, such as "shop.features:price_per_item".

    It takes one Arrow array for each of `columns` (nulls are missing) and returns one for each of `outputs`: the array
    for one output, a tuple of arrays for several. Row i of the result may depend on row i of the arguments alone.

    Attributes:
        columns: The inputs.
        outputs: Columns that the function returns.
        function: "package.module:name".
        output_type: Type of all outputs.
        record_function: "package.module:name" of the same on one row's Python values, None for a missing one and hex32
            as int; it gives a value, or a tuple for several outputs. It spares a served record Arrow's arrays.
    """

    outputs: tuple[str, ...]
    function: str
    output_type: ValueType
    record_function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_columns(self, "outputs")
        checks.one_of(self, "output_type", _VALUE_TYPES)
        for field in FUNCTION_FIELDS:
            value = getattr(self, field)
            if (value is not None or field == "function") and not (
                isinstance(value, str) and _FUNCTION.fullmatch(value)
            ):
                checks.fail(self, field, "a function that can be imported, as 'package.module:name'")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.outputs

    @property
    def functions(self) -> Mapping[str, str]:
        """The functions that are provided."""
        return {field: getattr(self, field) for field in FUNCTION_FIELDS if getattr(self, field) is not None}

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return `output_type`, one value a row."""
        imported(self.function)
        if self.record_function is not None:
            imported(self.record_function)
        return {output: ColumnType(self.output_type) for output in self.outputs}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Call the function.

        Raises:
            ConfigError: It returned other arrays than `outputs` says.
        """
        made = self._made([ids_as_integers(rows.columns[name]) for name in self.columns], rows.num_rows)
        return rows.with_columns(dict(zip(self.outputs, made, strict=True)))

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return a function that calls `record_function` for each record, or else `function` with Arrow arrays."""
        kinds = [types[name].kind for name in self.columns]
        if self.record_function is None:
            call = partial(self._call_with_arrays, kinds)
        else:
            call = partial(self._call_by_record, kinds, imported(self.record_function))
        return [RecordFunction(self.columns, self.outputs, call)]

    def _call_with_arrays(self, kinds: Sequence[Kind], *columns: Any) -> Sequence[Any]:
        arrays = [arrow_of_values(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        return [values_of_array(array) for array in self._made(arrays, len(arrays[0]))]

    def _call_by_record(self, kinds: Sequence[Kind], function: Callable[..., Any], *columns: Any) -> Sequence[Any]:
        arguments = [python_of_values(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        try:
            results = [function(*row) for row in zip(*arguments, strict=True)]
        except ValueError:
            raise InvalidValueError(0) from None  # `function` says what is wrong with the value
        made = zip(*results, strict=True) if len(self.outputs) > 1 else (results,)
        outputs = [values_of_python(list(values), self.output_type) for values in made]
        return outputs or [values_of_python([], self.output_type)] * len(self.outputs)

    def _made(self, arguments: Sequence[pa.Array], num_rows: int) -> list[pa.Array]:
        """Call the function with Arrow arrays; return an array for each output."""
        result = imported(self.function)(*arguments)
        arrays = result if isinstance(result, tuple) else (result,)
        if len(arrays) != len(self.outputs):
            raise ConfigError(
                self.function, f"returned {len(arrays)} arrays, expected {len(self.outputs)}, one for each of outputs"
            )
        expected = ColumnType(self.output_type)
        return [result_array(self.function, array, expected, num_rows) for array in arrays]


_FORMS = {
    "integer": "-?[0-9]+",
    "hex32": HEX_DIGITS.pattern,
    "number": r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?",
}
_NAMES = {"integer": "a 64-bit integer", "hex32": "up to 8 hexadecimal digits", "number": "a finite number"}


@register("split_text")
@dataclass(frozen=True, kw_only=True)
class SplitText(ColumnsOperator):
    """Cuts a text column at `separator` into its first parts; a part that is absent or empty is missing.

    Attributes:
        columns: One text column.
        separator: Text between the parts.
        outputs: One for each part that is needed; the rest after the last one's separator is left out.
        types: Types of the outputs, one for each; a part that is no such value is bad input.
    """

    accepted: ClassVar[tuple[str, ...]] = ("text",)
    may_reject: ClassVar[bool] = True
    separator: str
    outputs: tuple[str, ...]
    types: tuple[ValueType, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_columns(self, "outputs")
        if len(self.columns) != 1:
            checks.fail(self, "columns", "one column name")
        if not isinstance(self.separator, str) or not self.separator:
            checks.fail(self, "separator", "a text that is not empty")
        wrong = any(value_type not in _VALUE_TYPES for value_type in self.types)
        if wrong or len(self.types) != len(self.outputs):
            checks.fail(self, "types", f"one of {', '.join(map(repr, _VALUE_TYPES))} for each of outputs")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.outputs

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return `types`."""
        (name,) = self.columns
        if self.input_type(types, name).is_list:
            raise ConfigError(f"column {name!r}", f"holds {types[name]}, expected one text a row")
        return {output: ColumnType(kind) for output, kind in zip(self.outputs, self.types, strict=True)}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Split the texts.

        Raises:
            RowFaultError: A part is no value of its type.
        """
        (name,) = self.columns
        split = pc.split_pattern(rows.columns[name].fill_null(""), self.separator)
        offsets = offsets_of(split.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        parts = split.flatten()
        made: dict[str, pa.Array] = {}
        for place, (output, kind) in enumerate(zip(self.outputs, self.types, strict=True)):
            position = offsets[:-1] + place
            there = position < offsets[1:]
            part = parts.take(pa.array(np.where(there, position, 0), mask=~there))
            part = pc.if_else(pc.equal(part, ""), pa.scalar(None, part.type), part)
            made[output] = self._read(rows, part, kind, place)
        return rows.with_columns(made)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return a function that splits Python texts."""
        return [RecordFunction(self.columns, self.outputs, self._split)]

    def _split(self, texts: list[str | None]) -> Sequence[Any]:
        split = [text.split(self.separator) if text else () for text in texts]
        return [
            _read_parts([(parts[place] or None) if place < len(parts) else None for parts in split], kind)
            for place, kind in enumerate(self.types)
        ]

    def _read(self, rows: Rows, part: pa.Array, kind: Kind, place: int) -> pa.Array:
        if kind == "text":
            return part.cast(pa.large_string())
        well_formed = pc.fill_null(pc.match_substring_regex(part, f"^({_FORMS[kind]})$"), True)
        try:
            if pc.all(well_formed, min_count=0).as_py():
                read = _numbers(part, kind)
                if kind != "number" or not np.isinf(numbers_of(read)).any():
                    return read
        except pa.ArrowInvalid:
            pass
        pairs = zip(part.to_pylist(), well_formed.to_pylist(), strict=True)
        wrong = np.array([text is not None and not (formed and _is_held(text, kind)) for text, formed in pairs])
        raise rejected(rows, self.columns[0], wrong, accepted_part(self, place))


def accepted_part(op: SplitText, place: int) -> str:
    """Describe the part at `place`, which is no text."""
    return f"{_NAMES[op.types[place]]} as part {place + 1} between {op.separator!r}"


def _read_parts(part: list[str | None], kind: Kind) -> Any:
    for row, text in enumerate(part):
        if kind == "text" or text is None:
            continue
        if not (re.fullmatch(_FORMS[kind], text) and _is_held(text, kind)):
            raise InvalidValueError(row)
    if kind == "integer":
        return [None if text is None else int(text) for text in part]
    if kind == "number":
        return np.array([np.nan if text is None else float(text) for text in part], dtype=np.float64)
    return part


def _numbers(part: pa.Array, kind: Kind) -> pa.Array:
    if kind == "hex32":
        part = pc.binary_join_element_wise(pa.scalar("0x", part.type), part, pa.scalar("", part.type))
    return from_arrow(part, kind)


def _is_held(text: str, kind: Kind) -> bool:
    """Return whether `text`, which has the form of a value of `kind`, is in its range."""
    if kind == "integer":
        return -(2**63) <= int(text) < 2**63
    return kind == "hex32" or bool(np.isfinite(float(text)))


@register("keep_rows")
@dataclass(frozen=True, kw_only=True)
class KeepRows(Operator):
    """Rows are kept whose `column` is one of `values`, or lies within the bounds; a missing value is not kept.

    At serving every record is kept.

    Attributes:
        column: Text, integer or hex32 for `values`; number or integer for the bounds.
        values: Texts; integers in decimal, hex32 as hexadecimal digits.
        at_least: The lowest number that is kept.
        at_most: The highest number that is kept.
    """

    stage: ClassVar[Stage] = "rows"
    filters: ClassVar[bool] = True
    column: str
    values: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        check_column(self, "column")
        bounds = [bound for bound in ("at_least", "at_most") if getattr(self, bound) is not None]
        if bool(self.values) is bool(bounds):
            checks.reject(self, "", "expected either values, or at_least or at_most or both")
        if not isinstance(self.values, tuple) or not all(isinstance(value, str) and value for value in self.values):
            checks.fail(self, "values", "texts that are not empty")
        for bound in bounds:
            checks.finite_float(self, bound)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return (self.column,)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: none, as every record is kept."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return ()

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return nothing: no column is written."""
        found = types[self.column]
        accepted = ("text", "integer", "hex32") if self.values else ("number", "integer")
        if found.is_list or found.kind not in accepted:
            raise ConfigError(f"column {self.column!r}", f"holds {found}, expected {' or '.join(accepted)}")
        for value in self.values:
            value_of(found.kind, value, f"column {self.column!r}")
        return {}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Keep the rows with such a value."""
        return rows.filter(self._kept(rows.columns[self.column]))

    def _kept(self, array: pa.Array) -> NDArray[np.bool_]:
        if self.values:
            return is_among(array, self.values)
        numbers = numbers_of(array)  # NaN is not kept
        low = -np.inf if self.at_least is None else self.at_least
        high = np.inf if self.at_most is None else self.at_most
        return (numbers >= low) & (numbers <= high)
