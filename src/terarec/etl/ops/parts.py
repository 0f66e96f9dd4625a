# SPDX-License-Identifier: Apache-2.0
"""Operators that take the parts of a value: of a text between separators, or of a date."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError
from terarec.etl.columns import (
    ColumnType,
    Kind,
    Rows,
    array_of,
    flat,
    from_arrow,
    like,
    null_mask,
    numbers_of,
    numpy_values,
)
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes
from terarec.etl.ops.states import State
from terarec.etl.ops.values import HEX_DIGITS, RecordFunction, ValueType, rejected
from terarec.kernels.cpu.encoding import InvalidValueError
from terarec.ragged import Ragged, offsets_of
from terarec.spec import checks
from terarec.spec.registry import register

_FORMS = {
    "integer": "-?0*[0-9]{1,19}",
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
    outputs: checks.ColumnNames
    types: tuple[ValueType, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.columns) != 1:
            checks.fail(self, "columns", "one column name")
        if not isinstance(self.separator, str) or not self.separator:
            checks.fail(self, "separator", "a text that is not empty")
        wrong = any(value_type not in get_args(ValueType) for value_type in self.types)
        if wrong or len(self.types) != len(self.outputs):
            checks.fail(self, "types", f"one of {', '.join(map(repr, get_args(ValueType)))} for each of outputs")

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return self.outputs

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        (name,) = self.columns
        if self.input_type(types, name).is_list:
            raise ConfigError(f"column {name!r}", f"holds {types[name]}, expected one text a row")
        return {output: ColumnType(kind) for output, kind in zip(self.outputs, self.types, strict=True)}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Split the texts.

        Raises:
            RowFaultError: A part is not a value of its type.
        """
        (name,) = self.columns
        split = pc.split_pattern(rows.columns[name].fill_null(""), self.separator)
        offsets = offsets_of(split.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        parts = split.flatten()
        arrays_by_name: dict[str, pa.Array] = {}
        for place, (output, kind) in enumerate(zip(self.outputs, self.types, strict=True)):
            position = offsets[:-1] + place
            there = position < offsets[1:]
            part = parts.take(pa.array(np.where(there, position, 0), mask=~there))
            part = pc.if_else(pc.equal(part, ""), pa.scalar(None, part.type), part)
            arrays_by_name[output] = self._read(rows, part, kind, place)
        return rows.with_columns(arrays_by_name)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
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
        # Arrow's casts also take 0x10 and nan, which are not values here.
        well_formed = pc.fill_null(pc.match_substring_regex(part, f"^({_FORMS[kind]})$"), True)
        try:
            if pc.all(well_formed, min_count=0).as_py():
                read = _numbers(part, kind)
                if kind != "number" or not np.isinf(numbers_of(read)).any():
                    return read
        except pa.ArrowInvalid:
            pass
        # Only now that a value is known to be wrong: Arrow does not tell which one failed to cast.
        pairs = zip(part.to_pylist(), well_formed.to_pylist(), strict=True)
        wrong = np.array([text is not None and not (formed and _is_held(text, kind)) for text, formed in pairs])
        raise rejected(rows, self.columns[0], wrong, accepted_part(self, place))


def accepted_part(op: SplitText, place: int) -> str:
    """Describe the part at `place`, which is not a text."""
    return f"{_NAMES[op.types[place]]} as part {place + 1} between {op.separator!r}"


def _read_parts(part: list[str | None], kind: Kind) -> Any:
    for row, text in enumerate(part):
        if kind == "text" or text is None:
            continue
        if not (re.fullmatch(_FORMS[kind], text) and _is_held(text, kind)):
            raise InvalidValueError(row)
    if kind == "integer":
        return [None if text is None else _integer(text) for text in part]
    if kind == "number":
        return np.array([np.nan if text is None else float(text) for text in part], dtype=np.float64)
    return part


def _numbers(part: pa.Array, kind: Kind) -> pa.Array:
    if kind == "hex32":
        part = pc.binary_join_element_wise(pa.scalar("0x", part.type), part, pa.scalar("", part.type))
    return from_arrow(part, kind)


def _integer(text: str) -> int:
    # Python counts zeros before the number among its 4,300 digits.
    return int(text if len(text) <= 20 else re.sub("^(-?)0+(?=[0-9])", r"\1", text))


def _is_held(text: str, kind: Kind) -> bool:
    """Return whether `text`, which has the form of a value of `kind`, is in its range."""
    if kind == "integer":
        return -(2**63) <= _integer(text) < 2**63
    return kind == "hex32" or bool(np.isfinite(float(text)))


DatePart = Literal["year", "month", "day", "day_of_year", "weekday", "hour", "minute", "second"]
_DAY = 86_400


def _days(seconds: NDArray[np.int64]) -> NDArray[np.datetime64]:
    return (seconds // _DAY).astype("datetime64[D]")


def _since(seconds: NDArray[np.int64], unit: str, step: str) -> NDArray[np.int64]:
    """Count the `step` units since the beginning of the `unit` of the date."""
    days = _days(seconds)
    passed = days.astype(f"datetime64[{step}]") - days.astype(f"datetime64[{unit}]")
    return np.asarray(passed.astype(np.int64))


_PARTS: Mapping[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "year": lambda seconds: _days(seconds).astype("datetime64[Y]").astype(np.int64) + 1970,
    "month": lambda seconds: _since(seconds, "Y", "M") + 1,
    "day": lambda seconds: _since(seconds, "M", "D") + 1,
    "day_of_year": lambda seconds: _since(seconds, "Y", "D") + 1,
    "weekday": lambda seconds: (seconds // _DAY + 3) % 7,  # 1970 began on a Thursday
    "hour": lambda seconds: seconds % _DAY // 3600,
    "minute": lambda seconds: seconds % 3600 // 60,
    "second": lambda seconds: seconds % 60,
}


@register("date_parts")
@dataclass(frozen=True, kw_only=True)
class DateParts(ColumnsOperator):
    """Time -> the integers ``<column>_<part>``, missing where the time is.

    Parts are those of the proleptic Gregorian calendar: month and day from 1, weekday from 0 (Monday) to 6.

    Attributes:
        columns: Integer columns of seconds since 1970 in UTC.
        parts: Some of "year", "month", "day", "day_of_year", "weekday", "hour", "minute", "second".
        utc_offset: Seconds that local time is ahead of UTC, the same all year.
    """

    accepted: ClassVar[tuple[str, ...]] = ("integer",)
    parts: tuple[DatePart, ...] = ("hour", "weekday")
    utc_offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.parts, tuple) or not self.parts or any(part not in _PARTS for part in self.parts):
            checks.fail(self, "parts", f"some of {', '.join(map(repr, _PARTS))}")
        checks.distinct(self, "parts", self.parts)
        checks.int64(self, "utc_offset", minimum=-_DAY)
        if self.utc_offset > _DAY:
            checks.fail(self, "utc_offset", f"at most {_DAY} seconds")
        checks.distinct(self, "columns", self.writes)

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return tuple(f"{column}_{part}" for column in self.columns for part in self.parts)

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        types_of_outputs = {}
        for column in self.columns:
            column_type = self.input_type(types, column)
            for part in self.parts:
                types_of_outputs[f"{column}_{part}"] = ColumnType(
                    "integer", column_type.is_list, column_type.max_length
                )
        return types_of_outputs

    def _parts_of(self, seconds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        # Times of the years 1 to 9999 are far from the bounds, other integers wrap around.
        local = seconds + np.int64(self.utc_offset)
        return [_PARTS[part](local) for part in self.parts]

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs: dict[str, pa.Array] = {}
        for name in self.columns:
            array = rows.columns[name]
            seconds = flat(array)
            missing = null_mask(seconds)
            for part, values in zip(self.parts, self._parts_of(numpy_values(seconds)), strict=True):
                outputs[f"{name}_{part}"] = like(array, array_of(values, missing))
        return rows.with_columns(outputs)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        return [
            RecordFunction((name,), tuple(f"{name}_{part}" for part in self.parts), self._parts_of_values)
            for name in self.columns
        ]

    def _parts_of_values(self, values: Any) -> Sequence[Any]:
        if isinstance(values, Ragged):
            return [Ragged(items, values.offsets) for items in self._parts_of_values(values.values)]
        seconds = np.array([0 if value is None else value for value in values], dtype=np.int64)
        parts = [part.tolist() for part in self._parts_of(seconds)]
        if None not in values:
            return parts
        return [[None if time is None else value for time, value in zip(values, part, strict=True)] for part in parts]
