# SPDX-License-Identifier: Apache-2.0
"""Written times are read as Python reads them, and Arrow's timestamps in their own resolution."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.times import arrow_times, parse_times, read_time
from terarec.spec import SourceColumn
from terarec.spec.workflow import ISO_FORMAT

FORMATS = ["%Y-%m-%d %H:%M:%S", "%d/%m/%Y", "%Y%m%d%H", "%m/%d/%Y %I:%M:%S %p", "%Y-%m-%dT%H:%M:%S UTC", "%H:%M", "%Y"]
FORMATS += ["%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S%z", "%d.%m.%Y %H:%M:%S.%f %z", "%H:%M:%S,%f"]
ODD = ["", "x", "2023-02-29 00:00:00", "2024-02-29 24:00:00", "0000-01-01 00:00:00", "1/2/2019", "1/2/2019 9:05:00 pm"]
ODD += [
    "99/99/9999",
    "2014102199",
    "2014-10-21 05:06:60",
    "2014-1-2 3:4:5",
    "12:60",
    "01/31/2019 13:00:00 AM",
    "04/31/2019 12:00:00 AM",
    "2014-10-21 05:06:07.5",
    "2014-10-21 05:06:07.",
    "2014-10-21T05:06:07Z",
    "2014-10-21T05:06:07z",
    "2014-10-21T05:06:07+0260",
    "2014-10-21T05:06:07-01:30",
]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(min_value=datetime(1000, 1, 1), max_value=datetime(9998, 1, 1), timezones=ZONES)


def plain(text: str, form: str) -> tuple[int, int] | None:
    try:
        moment = datetime.strptime(text, form)
    except ValueError:
        return None
    passed = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
    return passed // timedelta(seconds=1), passed % timedelta(seconds=1) // timedelta(microseconds=1) * 1000


def read(texts: Sequence[str], form: str) -> list[tuple[int, int] | None]:
    times = parse_times(pa.array(texts, type=pa.large_string()), form)
    found = zip(times.seconds.tolist(), times.nanoseconds.tolist(), strict=True)
    return [None if bad else time for time, bad in zip(found, times.bad, strict=True)]


@given(st.sampled_from(FORMATS), st.lists(st.one_of(st.sampled_from(ODD), MOMENTS), max_size=12))
def test_times_are_read_as_python_reads_them(form: str, moments: list[str | datetime]) -> None:
    """Finding N3, too: %f and %z."""
    texts = [moment if isinstance(moment, str) else moment.strftime(form) for moment in moments]
    expected = [plain(text, form) for text in texts]
    assert read(texts, form) == expected
    for text, time in zip(texts, expected, strict=True):  # as in records
        assert time is None or read_time(text, form) == time


@given(MOMENTS, st.sampled_from("T "), st.sampled_from(["auto", "seconds", "milliseconds", "microseconds"]))
def test_iso_times_are_read_as_python_reads_them(moment: datetime, separator: str, parts: str) -> None:
    """Finding N3: ISO 8601 with offsets."""
    text = moment.isoformat(separator, parts)
    passed = datetime.fromisoformat(text) - EPOCH
    expected = passed // timedelta(seconds=1), passed % timedelta(seconds=1) // timedelta(microseconds=1) * 1000
    assert read([text, text.replace(" ", "T").replace("+00:00", "Z")], ISO_FORMAT) == [expected] * 2
    assert read_time(text, ISO_FORMAT) == expected


def test_other_forms_of_iso_times() -> None:
    """Finding N3: days, minutes, the basic format, and nanoseconds."""
    noon = 1_704_196_800
    assert read(
        ["2024-01-02", "2024-01-02T12", "20240102T120000Z", "2024-01-02T14:00+02", "2024-01-02 12:00:00.000000001Z"],
        ISO_FORMAT,
    ) == [(noon - 43_200, 0), (noon, 0), (noon, 0), (noon, 0), (noon, 1)]
    assert read(["2024-01-02T12:00:00z"], ISO_FORMAT) == [(noon, 0)]
    assert read(["2024-01-02T12:00:00z", "2024-01-02T12:00:00Z"], "%Y-%m-%dT%H:%M:%S%z") == [None, (noon, 0)]
    wrong = ["2024-1-2", "2023-02-29", "2024-01-02T24:00", "2024-01-02T12:00:60", "2024-01-02T12:00+24:00", "noon"]
    assert read(wrong, ISO_FORMAT) == [None] * len(wrong)


def test_digits_behind_microseconds_are_nanoseconds() -> None:
    """Finding N3."""
    form = "%H:%M:%S.%f"
    texts = ["00:00:01.123456789", "0:0:1.123456789", "00:00:01.1", "00:00:01.1234567890"]
    first = plain("00:00:01.0", form)
    assert first is not None
    expected = [(first[0], 123_456_789), (first[0], 123_456_789), (first[0], 100_000_000), None]
    assert read(texts, form) == expected
    assert read_time(texts[1], form) == expected[1]


@pytest.mark.parametrize(("unit", "a_second"), [("s", 1), ("ms", 1000), ("us", 10**6), ("ns", 10**9)])
def test_timestamps_keep_their_resolution(unit: str, a_second: int) -> None:
    """Finding N3."""
    values = [0, 1, -1, a_second * 1_700_000_000 + a_second // 2, None]
    times = arrow_times(pa.array(values, pa.timestamp(unit)))
    assert times.seconds.tolist() == [(value or 0) // a_second for value in values]
    assert times.nanoseconds.tolist() == [(value or 0) % a_second * (10**9 // a_second) for value in values]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_dates_are_midnights(kind: pa.DataType) -> None:
    times = arrow_times(pa.array([datetime(2024, 1, 2), None]).cast(pa.timestamp("s")).cast(kind))
    assert (times.seconds.tolist(), times.nanoseconds.tolist()) == ([1_704_153_600, 0], [0, 0])


@pytest.mark.parametrize("start", [0, 2])
def test_nulls_are_neither_times_nor_bad(start: int) -> None:
    texts = pa.array(["1970", None, "1971", "x", None], type=pa.large_string()).slice(start)
    times = parse_times(texts, "%Y")
    np.testing.assert_array_equal(times.seconds, [0, 0, 365 * 86400, 0, 0][start:])
    assert times.bad.tolist() == [False, False, False, True, False][start:]


@pytest.mark.parametrize("form", ["", "%", "%y", "%H%f%f", "ISO", "x"])
def test_other_formats_are_rejected(form: str) -> None:
    with pytest.raises(ConfigError):
        SourceColumn(name="t", type="time", format=form)
