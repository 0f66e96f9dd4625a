"""Parts of dates, computed from seconds since 1970."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import ColumnType, Rows, array_of, flat, like, null_mask, numpy_values
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes, State
from terarec.etl.ops.record_values import RecordFunction
from terarec.ragged import Ragged
from terarec.spec import checks, register

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
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds: column by column, its parts."""
        return tuple(f"{column}_{part}" for column in self.columns for part in self.parts)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return integers, in lists where the times are."""
        made = {}
        for column in self.columns:
            found = self.input_type(types, column)
            for part in self.parts:
                made[f"{column}_{part}"] = ColumnType("integer", found.is_list, found.max_length)
        return made

    def _parts_of(self, seconds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        # Times of the years 1 to 9999 are far from the bounds, other integers wrap around.
        local = seconds + np.int64(self.utc_offset)
        return [_PARTS[part](local) for part in self.parts]

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Compute the parts."""
        made: dict[str, pa.Array] = {}
        for name in self.columns:
            array = rows.columns[name]
            seconds = flat(array)
            missing = null_mask(seconds)
            for part, values in zip(self.parts, self._parts_of(numpy_values(seconds)), strict=True):
                made[f"{name}_{part}"] = like(array, array_of(values, missing))
        return rows.with_columns(made)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return a function for each column."""
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
