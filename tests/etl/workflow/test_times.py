# SPDX-License-Identifier: Apache-2.0
"""A15: times are seconds, are never milliseconds, and do not become float32 without a step that rescales them."""

import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl import fit, prepare
from terarec.etl.ops import Categorify, Clip, FillMissing, Normalize, NormalizeMinMax, Rename
from terarec.etl.source.source import open_source
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.errors import at
from tests.etl.source.samples import rows_of

MILLISECONDS = 1_700_000_000_000


def source(file_format="delimited", *, separator=None):
    columns = (SourceColumn(name="y", type="integer"), SourceColumn(name="t", type="time", separator=separator))
    return SourceSpec(format=file_format, columns=columns, delimiter=",", header=True)


def write(path: Path, file_format: str, times: list) -> Path:
    if file_format == "delimited":
        path.write_text("y,t\n" + "".join(f"0,{'' if time is None else time}\n" for time in times))
    elif file_format == "json_lines":
        path.write_text("".join(json.dumps({"y": 0, "t": time}) + "\n" for time in times))
    else:
        pq.write_table(pa.table({"y": [0] * len(times), "t": pa.array(times, pa.int64())}), path)
    return path


@pytest.mark.parametrize("file_format", ["delimited", "json_lines", "parquet"])
def test_milliseconds_are_rejected_in_every_format(tmp_path, file_format):
    path = write(tmp_path / "log", file_format, [5, MILLISECONDS, None, 1_700_000_000])
    place = {"delimited": "line 3", "json_lines": "line 2", "parquet": "row 2"}[file_format]
    with pytest.raises(FormatError, check=at(f"{path}: {place}, column 't'", "got '1700000000000'")):
        rows_of(open_source(source(file_format), [path], "raise"))
    assert rows_of(open_source(source(file_format), [path], "skip"))[1]["t"] == [5, None, 1_700_000_000]
    assert rows_of(open_source(source(file_format), [path], "missing"))[1]["t"] == [5, None, None, 1_700_000_000]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.float64(), pa.timestamp("s")])
def test_times_of_every_type_have_the_same_range(tmp_path: Path, kind: pa.DataType) -> None:
    """Findings N2 and N3: milliseconds are no times in any type, and one bad time does not hide others."""
    times = pa.array([5, MILLISECONDS, None, 1_700_000_000], pa.int64()).cast(kind)
    if kind == pa.uint64():
        times = pa.concat_arrays([times, pa.array([2**63], kind)])
    elif kind == pa.float64():
        times = pa.concat_arrays([times, pa.array([0.5], kind)])
    pq.write_table(pa.table({"y": [0] * len(times), "t": times}), tmp_path / "log")
    with pytest.raises(FormatError, check=at(f"{tmp_path / 'log'}: row 2, column 't'")):
        rows_of(open_source(source("parquet"), [tmp_path / "log"], "raise"))
    skipped = open_source(source("parquet"), [tmp_path / "log"], "skip")
    assert rows_of(skipped)[1]["t"] == [5, None, 1_700_000_000]
    assert sum(skipped.bad_input.counts.values()) == len(times) - 3


def test_texts_that_are_no_times_do_not_hide_milliseconds(tmp_path: Path) -> None:
    """Finding N3: in lists as text, whose block holds both."""
    texts = pa.array(["5", "x", str(MILLISECONDS), "6|7"])
    pq.write_table(pa.table({"y": [0] * 4, "t": texts}), tmp_path / "log")
    rows = rows_of(open_source(source("parquet", separator="|"), [tmp_path / "log"], "skip"))
    assert rows[1]["t"] == [[5], [6, 7]]


@pytest.mark.parametrize("rows", [1, 200])
def test_records_have_times_of_arrow(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "log.csv", "delimited", [0, 60, 120])
    made = Workflow(
        [FillMissing(columns=("t",), value=0), NormalizeMinMax(columns=("t",))],
        source=source(),
        labels=[LabelSpec(name="y")],
        dense=["t"],
    )
    fitted = fit(made, [path])
    for kind in (pa.timestamp("s"), pa.timestamp("ns", "Asia/Tokyo"), pa.timestamp("ms")):
        times = pa.array([60, None] * rows, pa.timestamp("s")).cast(kind)
        assert fitted.encode({"t": times}).dense.ravel().tolist() == [0.5, 0.0] * rows
    with pytest.raises(ConfigError, check=at("column 't', row 1")):
        fitted.encode({"t": pa.array([0, 10**13] * rows, pa.timestamp("s"))})
    with pytest.raises(ConfigError, check=at("column 't'", "duration")):
        fitted.encode({"t": pa.array([0, 1] * rows, pa.duration("ns"))})


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("unit", ["ns", "us", "s", "m", "h"])
def test_records_have_times_of_numpy(tmp_path: Path, rows: int, unit: str) -> None:
    """Finding N3: those of nanoseconds are integers in a list, which a column of integers took for its own."""
    (tmp_path / "log").write_text("y,t,n\n0,0,1\n1,7200,2\n")
    columns = (*source().columns, SourceColumn(name="n", type="integer"))
    made = Workflow(
        [FillMissing(columns=("t", "n"), value=0), NormalizeMinMax(columns=("t",))],
        source=SourceSpec(format="delimited", columns=columns, delimiter=",", header=True),
        labels=[LabelSpec(name="y")],
        dense=["t", "n"],
    )
    fitted = fit(made, [tmp_path / "log"])
    times = np.array([3600, "NaT"] * rows, "datetime64[s]").astype(f"datetime64[{unit}]")
    numbers = [1] * len(times)
    dense = fitted.encode({"t": times, "n": numbers}).dense
    assert dense[:, 0].tolist() == [0.5, 0.0] * rows
    assert fitted.encode({"t": times[:, None], "n": numbers}).dense.tolist() == dense.tolist()
    for values in (times, times - times):
        with pytest.raises(ConfigError, check=at("column 'n'")):
            fitted.encode({"t": times, "n": values})


def test_a_list_with_milliseconds_is_rejected(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"y,t\n0,1|2\n0,1|{MILLISECONDS}\n")
    with pytest.raises(FormatError, check=at(f"{path}: line 3, column 't'")):
        rows_of(open_source(source(separator="|"), [path], "raise"))


@pytest.mark.parametrize("steps", [[], [FillMissing(columns=("t",), value=0)], [Clip(columns=("t",), low=0)]])
def test_a_time_that_no_step_rescales_is_rejected_as_a_dense_column(tmp_path, steps):
    path = write(tmp_path / "log.csv", "delimited", [1_700_000_000, 1_700_000_001])
    made = Workflow(steps, source=source(), labels=[LabelSpec(name="y")], dense=["t"])
    with pytest.raises(ConfigError, check=at("dense", "column 't' is a time")):
        prepare(made, [path], tmp_path / "data")
    renamed = Workflow(
        [*steps, Rename(names={"t": "when"})], source=source(), labels=[LabelSpec(name="y")], dense=["when"]
    )
    with pytest.raises(ConfigError, check=at("dense", "column 'when' is a time")):
        fit(renamed, [path])
    assert not (tmp_path / "data").exists()


def test_a_rescaled_time_keeps_its_seconds(tmp_path):
    """12:00:00.5 in Parquet is its second, neither 64 s early nor late; records come to the same number."""
    noon = datetime.datetime(2024, 1, 2, 12, 0, 0, 500_000)
    moments = [noon + datetime.timedelta(seconds=second) for second in range(5)]
    pq.write_table(pa.table({"y": [0] * 5, "t": pa.array(moments, pa.timestamp("ms"))}), tmp_path / "log")
    made = fit(
        Workflow(
            [NormalizeMinMax(columns=("t",))], source=source("parquet"), labels=[LabelSpec(name="y")], dense=["t"]
        ),
        [tmp_path / "log"],
    )
    block = next(open_source(made.spec.source, [tmp_path / "log"]).blocks())
    assert block.columns["t"].to_pylist() == [1_704_196_800 + second for second in range(5)]
    dense = made.encode_rows(made.apply(block)).dense[:, 0]
    np.testing.assert_allclose(dense, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(
        made.encode({"t": [1_704_196_800 + second for second in range(5)]}).dense[:, 0], dense
    )


@pytest.mark.parametrize("time", [MILLISECONDS, float(MILLISECONDS), -MILLISECONDS, "1700000000", True])
def test_records_with_milliseconds_are_rejected(tmp_path, time):
    path = write(tmp_path / "log.csv", "delimited", [1_700_000_000, 1_700_000_001])
    steps = [Categorify(columns=("t",), outputs=("id",)), Normalize(columns=("t",))]
    steps.append(FillMissing(columns=("t",), value=0.0))
    made = fit(Workflow(steps, source=source(), labels=[LabelSpec(name="y")], dense=["t"], categorical=["id"]), [path])
    with pytest.raises(ConfigError, check=at("column 't', row 1")):
        made.encode({"t": [5, time]})
    assert made.encode({"t": [1_700_000_000, 1_700_000_000.0, None]}).keys[0].tolist() == [2, 2, 0]


@pytest.mark.parametrize("rows", [1, 200])
def test_times_as_float32_are_rejected(tmp_path, rows):
    """Finding N2: float32 holds a time of these years to 128 s only."""
    path = write(tmp_path / "log.csv", "delimited", [1_700_000_000, 1_700_000_001])
    steps = [Categorify(columns=("t",))]
    made = fit(Workflow(steps, source=source(), labels=[LabelSpec(name="y")], categorical=["t"]), [path])
    with pytest.raises(ConfigError, check=at("column 't', row 0")):
        made.encode({"t": np.full(rows, 1_700_000_000, np.float32)})
    assert made.encode({"t": np.full(rows, 1_700_000_000, np.float64)}).keys[0].tolist() == [2] * rows


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("ISO8601", "1969-12-31T23:59:58.999999999Z"),
        ("ISO8601", "1970-01-01T01:59:58.5+02:00"),
        ("%Y-%m-%d %H:%M:%S.%f", "1969-12-31 23:59:58.999999"),
        ("%Y-%m-%dT%H:%M:%S%z", "1970-01-01T01:59:58+02:00"),
    ],
)
@pytest.mark.parametrize("rows", [1, 200])
def test_records_have_the_seconds_of_files(tmp_path, form, text, rows):
    """Finding N3: whole seconds, rounded down, for every form of a text."""
    columns = (SourceColumn(name="y", type="integer"), SourceColumn(name="t", type="time", format=form))
    files = SourceSpec(format="delimited", columns=columns, delimiter=",", header=True)
    (tmp_path / "log").write_text(f"y,t\n0,{text}\n")
    made = fit(
        Workflow([Categorify(columns=("t",))], source=files, labels=[LabelSpec(name="y")], categorical=["t"]),
        [tmp_path / "log"],
    )
    assert rows_of(open_source(files, [tmp_path / "log"]))[1]["t"] == [-2]
    assert made.encode({"t": [text] * rows}).keys[0].tolist() == [2] * rows
    assert made.encode({"t": pa.array([text, None] * rows)}).keys[0].tolist() == [2, 0] * rows
    assert made.encode({"t": [-2] * rows}).keys[0].tolist() == [2] * rows
