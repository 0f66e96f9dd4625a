"""Hour and weekday agree with the calendar of the standard library; lists are counted."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from terarec.etl.ready.row_functions import (
    avazu_hour_and_weekday,
    hour_and_weekday,
    length,
    modulo_10_million,
    modulo_40_million,
)

MOMENTS = [
    datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(second))
    for second in np.random.default_rng(0).integers(-(10**9), 2**32, 500)
]


def test_hour_and_weekday_of_seconds() -> None:
    hour, weekday = hour_and_weekday(pa.array([*(int(moment.timestamp()) for moment in MOMENTS), None]))
    assert hour.to_pylist() == [*(moment.hour for moment in MOMENTS), None]
    assert weekday.to_pylist() == [*(moment.weekday() for moment in MOMENTS), None]


def test_hour_and_weekday_of_avazus_integers() -> None:
    moments = [moment for moment in MOMENTS if 2000 <= moment.year < 2100]
    assert len(moments) > 300
    hour, weekday = avazu_hour_and_weekday(pa.array([*(int(f"{moment:%y%m%d%H}") for moment in moments), None]))
    assert hour.to_pylist() == [*(moment.hour for moment in moments), None]
    assert weekday.to_pylist() == [*(moment.weekday() for moment in moments), None]


def test_length_of_lists() -> None:
    assert length(pa.array([[1, 2], [], [None]], pa.large_list(pa.int64()))).to_pylist() == [2, 0, 1]


def test_hexadecimal_values_modulo_a_number() -> None:
    codes = pa.array([0, 9_999_999, 10_000_000, 2**32 - 1, None], pa.uint32())
    first, second = modulo_10_million(codes, codes[::-1])
    assert first.to_pylist() == [0, 9_999_999, 0, 4_967_295, None]
    assert second.to_pylist() == first.to_pylist()[::-1]
    assert modulo_40_million(codes)[0].to_pylist() == [0, 9_999_999, 10_000_000, 14_967_295, None]
