"""Written times are read as Python's strptime reads them."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.etl.cleaning import parse_times

FORMATS = ["%Y-%m-%d %H:%M:%S", "%d/%m/%Y", "%Y%m%d%H", "%m/%d/%Y %I:%M:%S %p", "%Y-%m-%dT%H:%M:%S UTC", "%H:%M", "%Y"]
ODD = ["", "x", "2023-02-29 00:00:00", "2024-02-29 24:00:00", "0000-01-01 00:00:00", "1/2/2019", "1/2/2019 9:05:00 pm"]
ODD += [
    "99/99/9999",
    "2014102199",
    "2014-10-21 05:06:60",
    "2014-1-2 3:4:5",
    "12:60",
    "01/31/2019 13:00:00 AM",
    "04/31/2019 12:00:00 AM",
]


def plain(text, form):
    try:
        return int(datetime.strptime(text, form).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


@given(
    st.sampled_from(FORMATS),
    st.lists(st.one_of(st.sampled_from(ODD), st.datetimes(min_value=datetime(1000, 1, 1))), max_size=12),
)
def test_times_are_read_as_python_reads_them(form, moments):
    texts = [moment if isinstance(moment, str) else moment.strftime(form) for moment in moments]
    seconds, bad = parse_times(pa.array(texts, type=pa.large_string()), form)
    expected = [plain(text, form) for text in texts]
    assert [None if wrong else value for value, wrong in zip(seconds.tolist(), bad, strict=True)] == expected


@pytest.mark.parametrize("start", [0, 2])
def test_nulls_are_neither_times_nor_bad(start):
    texts = pa.array(["1970", None, "1971", "x", None], type=pa.large_string()).slice(start)
    seconds, bad = parse_times(texts, "%Y")
    np.testing.assert_array_equal(seconds, [0, 0, 365 * 86400, 0, 0][start:])
    assert bad.tolist() == [False, False, False, True, False][start:]
