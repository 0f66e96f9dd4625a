# SPDX-License-Identifier: Apache-2.0
"""Functions of rows in the presets, for `LambdaOp`, on Arrow arrays and on one record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from terarec.etl.times import parse_times


def hour_and_weekday(seconds: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return hour 0 to 23 and weekday 0 (Monday) to 6 of seconds since 1970 UTC; missing stays missing."""
    moments = seconds.cast(pa.timestamp("s"))
    return pc.hour(moments), pc.day_of_week(moments)


def hour_and_weekday_of_record(seconds: int | None) -> tuple[int | None, int | None]:
    """Return the same of one value."""
    if seconds is None:
        return None, None
    days, second = divmod(seconds, 86_400)
    return second // 3600, (days + 3) % 7


def avazu_hour_and_weekday(hours: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the same of Avazu's integers YYMMDDHH, of this century."""
    digits = pc.utf8_lpad(hours.cast(pa.string()), width=8, padding="0")
    # Arrow's `strptime` takes 30 February for 1 March.
    texts = pc.binary_join_element_wise("20", digits, "").cast(pa.large_string())
    times = parse_times(texts, "%Y%m%d%H")
    if times.bad.any():
        raise ValueError(f"got {hours[int(times.bad.argmax())].as_py()}, expected YYMMDDHH")
    return hour_and_weekday(pa.array(times.seconds, mask=hours.is_null().to_numpy(zero_copy_only=False)))


def avazu_hour_and_weekday_of_record(hours: int | None) -> tuple[int | None, int | None]:
    """Return the same of one integer."""
    if hours is None:
        return None, None
    days, hour = divmod(hours, 100)
    if not 0 <= days < 1_000_000 or hour > 23:
        raise ValueError(f"got {hours}, expected YYMMDDHH")
    return hour, date(2000 + days // 10_000, days // 100 % 100, days % 100).weekday()


def length(lists: pa.Array) -> pa.Array:
    """Return the number of items of each list."""
    return pc.list_value_length(lists).cast(pa.int64())


def length_of_record(items: Sequence[Any]) -> int:
    """Return the same of one list."""
    return len(items)


def modulo_10_million(*codes: pa.Array) -> tuple[pa.Array, ...]:
    """Return each of some columns of hex32 modulo 10 million."""
    return tuple(_modulo(column, 10_000_000) for column in codes)


def modulo_10_million_of_record(*codes: int | None) -> tuple[int | None, ...]:
    """Return the same of the values of one record."""
    return tuple([None if code is None else code % 10_000_000 for code in codes])


def modulo_40_million(*codes: pa.Array) -> tuple[pa.Array, ...]:
    """Return each of some columns of hex32 modulo 40 million."""
    return tuple(_modulo(column, 40_000_000) for column in codes)


def modulo_40_million_of_record(*codes: int | None) -> tuple[int | None, ...]:
    """Return the same of the values of one record."""
    return tuple([None if code is None else code % 40_000_000 for code in codes])


def _modulo(codes: pa.Array, divisor: int) -> pa.Array:
    wide = codes.cast(pa.int64())
    return pc.subtract(wide, pc.multiply(pc.divide(wide, divisor), divisor))
