# SPDX-License-Identifier: Apache-2.0
"""Hour and weekday agree with the calendar of the standard library; lists are counted."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from terarec.etl.ready.row_functions import (
    avazu_hour_and_weekday,
    avazu_hour_and_weekday_of_record,
    hour_and_weekday,
    hour_and_weekday_of_record,
    length,
    length_of_record,
    modulo_10_million,
    modulo_10_million_of_record,
    modulo_40_million,
    modulo_40_million_of_record,
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


def first_row(columns: Sequence[pa.Array]) -> tuple[Any, ...]:
    return tuple(column[0].as_py() for column in columns)


@given(st.none() | st.integers(-(2**40), 2**40))
def test_a_record_has_the_hour_and_weekday_of_a_row(seconds: int | None) -> None:
    assert hour_and_weekday_of_record(seconds) == first_row(hour_and_weekday(pa.array([seconds], pa.int64())))


@example(23000)
@example(200_013_124)
@example(18_043_100)
@given(st.none() | st.integers(-10, 2 * 10**8) | st.datetimes(datetime(2000, 1, 1), datetime(2099, 12, 31)))
def test_a_record_has_what_a_row_has_of_avazus_integers(hours: int | datetime | None) -> None:
    """30 February was 1 March in rows, and an error in records."""
    given = int(f"{hours:%y%m%d%H}") if isinstance(hours, datetime) else hours
    try:
        expected = first_row(avazu_hour_and_weekday(pa.array([given], pa.int64())))
    except ValueError:
        with pytest.raises(ValueError, match=r"\w"):
            avazu_hour_and_weekday_of_record(given)
    else:
        assert avazu_hour_and_weekday_of_record(given) == expected


@given(st.lists(st.none() | st.integers(0, 2**32 - 1), max_size=5))
def test_a_record_has_the_length_and_the_remainders_of_a_row(codes: list[int | None]) -> None:
    assert length_of_record(codes) == length(pa.array([codes], pa.large_list(pa.uint32())))[0].as_py()
    columns = [pa.array([code], pa.uint32()) for code in codes]
    assert modulo_10_million_of_record(*codes) == first_row(modulo_10_million(*columns))
    assert modulo_40_million_of_record(*codes) == first_row(modulo_40_million(*columns))


def test_length_of_lists() -> None:
    assert length(pa.array([[1, 2], [], [None]], pa.large_list(pa.int64()))).to_pylist() == [2, 0, 1]


def test_hexadecimal_values_modulo_a_number() -> None:
    codes = pa.array([0, 9_999_999, 10_000_000, 2**32 - 1, None], pa.uint32())
    first, second = modulo_10_million(codes, codes[::-1])
    assert first.to_pylist() == [0, 9_999_999, 0, 4_967_295, None]
    assert second.to_pylist() == first.to_pylist()[::-1]
    assert modulo_40_million(codes)[0].to_pylist() == [0, 9_999_999, 10_000_000, 14_967_295, None]
