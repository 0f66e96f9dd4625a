# SPDX-License-Identifier: Apache-2.0
"""Finding N3: times order rows, bound splits and make differences in the resolution that the source has."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.ops import DifferenceLag, FillMissing, History, Operator, Rename
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByTime
from tests.errors import at
from tests.etl.engine.contents import read_split

START = 1_700_000_000
NANOSECONDS = {"ms": 10**6, "us": 10**3, "ns": 1}


def workflow(
    split: Split | None = None, *, kind: Any = "parquet", form: str | None = None, unit: Any = None
) -> Workflow:
    """Histories and gaps of the events of users."""
    columns = (
        SourceColumn(name="y", type="integer"),
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="item", type="integer"),
        SourceColumn(name="t", type="time", format=form),
    )
    steps: list[Operator] = [
        Rename(names={"t": "when"}),
        History(columns=("item",), outputs=("past",), group="user", order="when", max_length=20),
        DifferenceLag(columns=("when",), outputs=("gap",), group="user", order="when", unit=unit),
        FillMissing(columns=("gap",), value=-1),
    ]
    source = SourceSpec(format=kind, columns=columns, delimiter=",", header=True)
    return Workflow(
        steps, source=source, labels=[LabelSpec(name="y")], dense=["gap"], keys=["past", "item"], split=split
    )


def events(rows: int, unit: str) -> tuple[list[int], list[int], list[int]]:
    """Users, items, and times of a few seconds in nanoseconds, some of them equal."""
    draws = np.random.default_rng(3)
    users, parts = draws.integers(0, 3, rows), draws.integers(0, 12, rows)
    times = START * 10**9 + draws.integers(-2, 3, rows) * 10**9 + parts * NANOSECONDS[unit]
    return users.tolist(), list(range(100, 100 + rows)), times.tolist()


def write(path: Path, kind: str, unit: str, rows: int) -> tuple[list[int], list[int], list[int]]:
    users, items, times = events(rows, unit)
    if kind == "parquet":
        held = pa.array([time // NANOSECONDS[unit] for time in times], pa.timestamp(unit))
        pq.write_table(pa.table({"y": [0] * rows, "user": users, "item": items, "t": held}), path, row_group_size=7)
        return users, items, times
    moments = [datetime.fromtimestamp(0, UTC) + timedelta(seconds=time // 10**9) for time in times]
    texts = [f"{moment:%Y-%m-%dT%H:%M:%S}.{time % 10**9:09d}Z" for moment, time in zip(moments, times, strict=True)]
    if kind == "json_lines":
        lines = [{"y": 0, "user": users[i], "item": items[i], "t": texts[i]} for i in range(rows)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.write_text("y,user,item,t\n" + "".join(f"0,{users[i]},{items[i]},{texts[i]}\n" for i in range(rows)))
    return users, items, times


@pytest.mark.parametrize(
    ("kind", "form"),
    [("parquet", None), ("delimited", "ISO8601"), ("delimited", "%Y-%m-%dT%H:%M:%S.%f%z"), ("json_lines", "ISO8601")],
)
@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_histories_and_gaps(tmp_path: Path, kind: str, form: str | None, unit: str) -> None:
    """Finding N3: against plain Python."""
    users, items, times = write(tmp_path / "log", kind, unit, 40)
    prepare(workflow(kind=kind, form=form, unit=unit), [tmp_path / "log"], tmp_path / "data")
    block = read_split(tmp_path / "data", "train")
    lists: Any = block.keys[0]
    past = [lists.values[start:stop].tolist() for start, stop in pairwise(lists.offsets)]
    for row in range(40):
        mine = sorted((times[i], i) for i in range(40) if users[i] == users[row])
        assert past[row] == [items[i] for time, i in mine if time < times[row]][-20:]
        place = mine.index((times[row], row))
        gap = (times[row] - mine[place - 1][0]) // NANOSECONDS[unit] if place else -1
        assert block.dense[row, 0] == np.float32(gap)


def test_gaps_are_whole_seconds_by_default(tmp_path: Path) -> None:
    """Finding N3: of the exact difference, rounded down."""
    times = pa.array([0, 900, 1100, 2000], pa.timestamp("ms"))
    pq.write_table(pa.table({"y": [0] * 4, "user": [1] * 4, "item": [1] * 4, "t": times}), tmp_path / "log")
    prepare(workflow(), [tmp_path / "log"], tmp_path / "data")
    assert read_split(tmp_path / "data", "train").dense[:, 0].tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize("steps", [[], [FillMissing(columns=("t",), value=0)]])
def test_a_unit_is_for_times_as_the_source_has_them(tmp_path: Path, steps: list[Operator]) -> None:
    write(tmp_path / "log", "parquet", "ms", 5)
    spec = workflow().spec
    name = "t" if steps else "item"
    lag = DifferenceLag(columns=(name,), outputs=("gap",), group="user", order="t", unit="ms")
    made = Workflow(
        [*steps, lag, FillMissing(columns=("gap",), value=0)], source=spec.source, labels=spec.labels, dense=["gap"]
    )
    with pytest.raises(ConfigError, check=at(f"steps[{len(steps)}] DifferenceLag", f"column {name!r}")):
        prepare(made, [tmp_path / "log"], tmp_path / "data")


def rows_of_splits(out: Path) -> dict[str, list[int]]:
    """The items of each split."""
    return {split: read_split(out, split).keys[1].tolist() for split in read_dataset(out).splits}  # type: ignore[union-attr]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_shares_by_time(tmp_path: Path, unit: str) -> None:
    """Finding N3: the last ones by their parts of a second."""
    order = np.random.default_rng(0).permutation(20)
    times = pa.array((order + START * 10**9 // NANOSECONDS[unit]).tolist(), pa.timestamp(unit))
    pq.write_table(pa.table({"y": [0] * 20, "user": [1] * 20, "item": order, "t": times}), tmp_path / "log")
    split = SplitByTime(column="when", valid=0.2, test=0.1)
    prepare(workflow(split), [tmp_path / "log"], tmp_path / "data")
    found = {name: sorted(items) for name, items in rows_of_splits(tmp_path / "data").items()}
    assert found == {"train": list(range(14)), "valid": [14, 15, 16, 17], "test": [18, 19]}


@pytest.mark.parametrize(
    "bound", ["1970-01-01T00:00:00.002Z", "1970-01-01 02:00:00.001000001+02:00", 0.002, "1970-01-01T00:00:00.002"]
)
def test_bounds_in_iso_8601(tmp_path: Path, bound: float | str) -> None:
    """Finding N3, P6: dates as well as seconds."""
    times = pa.array(range(5), pa.timestamp("ms"))
    pq.write_table(pa.table({"y": [0] * 5, "user": [1] * 5, "item": range(5), "t": times}), tmp_path / "log")
    split = SplitByTime(column="when", valid_from=bound, test_from="1970-01-01T00:00:00.004")
    prepare(workflow(split), [tmp_path / "log"], tmp_path / "data")
    assert rows_of_splits(tmp_path / "data") == {"train": [0, 1], "valid": [2, 3], "test": [4]}
    assert Workflow.load(tmp_path / "data" / "workflow").spec.split == split


def test_a_date_bounds_integers_that_are_seconds(tmp_path: Path) -> None:
    """Finding P6: MovieLens has its times as integers."""
    text = "".join(f"0,1,{row},{START + row}\n" for row in range(4))
    (tmp_path / "log").write_text("y,user,item,t\n" + text)
    split = SplitByTime(column="when", valid_from="2023-11-14T22:13:22Z")
    prepare(workflow(split, kind="delimited"), [tmp_path / "log"], tmp_path / "data")
    assert rows_of_splits(tmp_path / "data") == {"train": [0, 1], "valid": [2, 3]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"valid_from": "yesterday"}, "valid_from"),
        ({"valid_from": "2024-13-01"}, "valid_from"),
        ({"valid_from": "2024-05-01", "test_from": "2024-05-01T02:00+02:00"}, "test_from"),
        ({"valid_from": "2024-05-01", "test_from": 1.0}, "test_from"),
        ({"valid_from": True}, "valid_from"),
    ],
)
def test_wrong_bounds(fields: dict[str, float | str], name: str) -> None:
    with pytest.raises(ConfigError, check=at(f"SplitByTime.{name}")):
        SplitByTime(column="t", **fields)  # type: ignore[arg-type]


def test_later_files_continue_within_a_second(tmp_path: Path) -> None:
    """Findings N3 and N11: the rows that are kept for later files have the parts of a second."""
    for day in range(2):
        times = pa.array([START * 1000 + 40 * day + milli for milli in (3, 1, 2)], pa.timestamp("ms"))
        table = pa.table({"y": [0] * 3, "user": [1] * 3, "item": [10 * day + row for row in range(3)], "t": times})
        pq.write_table(table, tmp_path / f"day_{day}")
    days = [tmp_path / f"day_{day}" for day in range(2)]
    prepare(workflow(unit="ms"), days[:1], tmp_path / "first")
    fitted = Workflow.load(tmp_path / "first" / "workflow")
    prepare(fitted, days[1:], tmp_path / "second")
    block = read_split(tmp_path / "second", "train")
    assert block.dense[:, 0].tolist() == [1, 38, 1]
    lists: Any = block.keys[0]
    assert lists.values.tolist() == [1, 2, 0, 11, 12, 1, 2, 0, 1, 2, 0, 11]


def moments(rows: list[int]) -> pa.Table:
    """Events of one user at these milliseconds, in which the rows are not in the order of time."""
    times = pa.array([START * 1000 + row for row in rows], pa.timestamp("ms"))
    return pa.table({"y": [0] * len(rows), "user": [1] * len(rows), "item": rows, "t": times})


@pytest.mark.parametrize("form", [None, "%Y-%m-%d %H:%M:%S"])
@pytest.mark.parametrize("kind", ["delimited", "json_lines", "parquet"])
def test_tables_have_parts_of_a_second_whatever_the_logs_are(tmp_path: Path, kind: str, form: str | None) -> None:
    made, table = workflow(kind=kind, form=form, unit="ms"), moments([3, 1, 2])
    prepare(made, table, tmp_path / "table")
    pq.write_table(table, tmp_path / "log.parquet")
    prepare(made, [tmp_path / "log.parquet"], tmp_path / "file")
    for out in ("table", "file"):
        block = read_split(tmp_path / out, "train")
        assert block.dense[:, 0].tolist() == [1, -1, 1]
        assert block.keys[0].values.tolist() == [1, 2, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["seconds", "timestamps"])
def test_later_files_may_be_of_another_format(tmp_path: Path, kind: str) -> None:
    (tmp_path / "day_0.csv").write_text("y,user,item,t\n" + "".join(f"0,1,{row},{START + row}\n" for row in range(3)))
    prepare(workflow(kind="delimited", unit="ms"), [tmp_path / "day_0.csv"], tmp_path / "first")
    later = moments([5100, 5000])
    if kind == "seconds":
        later = later.set_column(3, "t", pa.array([START + 6, START + 5]))
    pq.write_table(later, tmp_path / "day_1.parquet")
    fitted = Workflow.load(tmp_path / "first" / "workflow")
    expected = [100, 3000] if kind == "timestamps" else [1000, 3000]
    for number, sources in enumerate(([tmp_path / "day_1.parquet"], later)):
        prepare(fitted, sources, tmp_path / f"second{number}")
        assert read_split(tmp_path / f"second{number}", "train").dense[:, 0].tolist() == expected
        (block,) = EncodedFiles(fitted, sources).blocks()
        assert block.records.dense[:, 0].tolist() == expected
