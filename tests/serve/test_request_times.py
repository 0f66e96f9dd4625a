# SPDX-License-Identifier: Apache-2.0
"""The client sends times of every kind as seconds, as a session reads them, and takes tables."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from terarec.errors import ConfigError
from terarec.serve.client import request_tensors, table_columns
from terarec.serve.protocol import TensorMetadata

WHEN = TensorMetadata(name="when", datatype="INT64", shape=(-1,))
DAY = datetime(2026, 3, 30, tzinfo=UTC)
SECONDS = int(DAY.timestamp())


def sent(values: Any) -> list[Any]:
    (tensor,) = request_tensors([WHEN], {"when": values})
    return list(tensor.data)


@pytest.mark.parametrize("unit", ["D", "h", "m", "s", "ms", "us", "ns"])
def test_times_of_numpy_are_seconds_whatever_their_unit(unit: str) -> None:
    assert sent(np.array(["2026-03-30", "NaT"], dtype=f"datetime64[{unit}]")) == [SECONDS, None]
    assert sent(np.array([["2026-03-30"]], dtype=f"datetime64[{unit}]")) == [SECONDS]


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "Europe/Berlin"), pa.date32(), pa.date64()]
)
def test_times_of_arrow_are_seconds(kind: pa.DataType) -> None:
    times = (
        pa.array([DAY, None], pa.timestamp("s", "UTC")).cast(pa.timestamp("s", getattr(kind, "tz", None))).cast(kind)
    )
    assert sent(times) == [SECONDS, None]
    assert sent(pa.chunked_array([times, times])) == [SECONDS, None] * 2


def test_what_is_no_time_of_these_years_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'when', row 1: .*expected a time of the years 1 to 9999"):
        sent(np.array(["2026-03-30", "12026-03-30"], dtype="datetime64[s]"))
    with pytest.raises(ConfigError, match=r"got values of type duration\[s\], expected seconds since 1970"):
        sent(np.array([5], dtype="timedelta64[s]"))


def test_a_table_gives_the_columns_of_the_model() -> None:
    frame = pd.DataFrame({"when": [pd.Timestamp(DAY), pd.NaT], "other": [1, 2]})
    (tensor,) = request_tensors([WHEN], table_columns([WHEN], frame))
    assert list(tensor.data) == [SECONDS, None]
