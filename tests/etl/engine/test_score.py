# SPDX-License-Identifier: Apache-2.0
"""D1, D2: raw files without labels or splits are encoded as a data set of the same rows is."""

import gzip
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl import fit, prepare
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.ops import (
    Categorify,
    DifferenceLag,
    Explode,
    FillMissing,
    History,
    KeepRows,
    Normalize,
    TargetEncoding,
)
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, OneSplit, PrepareOptions, SourceColumn, SourceSpec, SplitByFiles
from tests.errors import at
from tests.etl.engine.logs import shop_files, shop_workflow
from tests.etl.ready.prepared import CASES, Prepared, make

NO_EARLIER = PrepareOptions(earlier_rows="none")


def encoded(files: EncodedFiles) -> dict[str, Any]:
    """Row numbers, kept columns, the dense matrix, and each categorical column as lists."""
    blocks = list(files.blocks())
    keys: list[list[Any]] = []
    for place in range(len(blocks[0].records.keys)):
        keys.append([])
        for block in blocks:
            column = block.records.keys[place]
            if isinstance(column, tuple):
                values, offsets = column
                keys[-1] += [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
            else:
                keys[-1] += column.tolist()
    return {
        "rows": np.concatenate([block.rows for block in blocks]).tolist(),
        "items": [] if blocks[0].items is None else np.concatenate([block.items for block in blocks]).tolist(),
        "dense": np.concatenate([block.records.dense for block in blocks]),
        "keys": keys,
        "kept": {name: pa.concat_arrays([block.kept[name] for block in blocks]).to_pylist() for name in files.keep},
    }


def check_alike(found: dict[str, Any], workflow: Workflow, columns: dict[str, list[Any]]) -> None:
    spec = workflow.dataset_spec()
    dense = np.array([columns[column.name] for column in spec.dense], dtype=np.float32).T
    np.testing.assert_array_equal(found["dense"], dense)
    for column, keys in zip(spec.categorical, found["keys"], strict=True):
        assert keys == columns[column.name], column.name


@pytest.mark.parametrize("name", list(CASES))
def test_the_rows_of_a_ready_workflow(name: str, tmp_path: Path) -> None:
    case, rows = CASES[name], 60 if name == "mind" else 400
    made = make(name, tmp_path, rows)
    workflow = Workflow.load(made.out / "workflow")
    sources = [made.raw / file for file in case.sources]
    options = PrepareOptions(threads=2, earlier_rows="none", **case.options)
    prepare(workflow.with_split(OneSplit(split="test")), sources, tmp_path / "all", options=options)
    whole = Prepared(made.raw, tmp_path / "all", made.report)
    found = encoded(EncodedFiles(workflow, sources, options=options))
    check_alike(found, workflow, whole.split("test"))
    places = list(zip(found["rows"], found["items"] or found["rows"], strict=True))
    assert places == sorted(set(places))
    assert bool(found["items"]) is (name == "mind")


def drop_column(path: Path, place: int, delimiter: str, to: Path) -> Path:
    lines = [line.split(delimiter) for line in path.read_text().splitlines()]
    to.write_text("".join(delimiter.join(line[:place] + line[place + 1 :]) + "\n" for line in lines))
    return to


@pytest.mark.parametrize("name", ["avazu", "movielens-1m"])
def test_label_column_absent_empty_or_present(name: str, tmp_path: Path) -> None:
    """D2, by a header and without one."""
    made = make(name, tmp_path, 300)
    workflow = Workflow.load(made.out / "workflow")
    path = made.raw / CASES[name].sources[0]
    delimiter = workflow.spec.source.delimiter
    place = path.read_text().splitlines()[0].split(delimiter).index("click") if workflow.spec.source.header else 2
    found = [encoded(EncodedFiles(workflow, [path], options=NO_EARLIER))]
    found.append(
        encoded(EncodedFiles(workflow, [drop_column(path, place, delimiter, tmp_path / "absent")], options=NO_EARLIER))
    )
    for number, content in enumerate(("", "nobody knows")):
        lines = [line.split(delimiter) for line in path.read_text().splitlines()]
        filled = [
            line if workflow.spec.source.header and not at else [*line[:place], content, *line[place + 1 :]]
            for at, line in enumerate(lines)
        ]
        other = tmp_path / f"label{number}"
        other.write_text("".join(delimiter.join(line) + "\n" for line in filled))
        found.append(encoded(EncodedFiles(workflow, [other], options=NO_EARLIER)))
    for other_found in found[1:]:
        np.testing.assert_array_equal(other_found["dense"], found[0]["dense"])
        assert other_found["keys"] == found[0]["keys"]
        assert other_found["rows"] == found[0]["rows"] == list(range(300))


COLUMNS = (
    SourceColumn(name="label", type="integer"),
    SourceColumn(name="x", type="number"),
    SourceColumn(name="city", type="text"),
)


def city_workflow(form: str, **source: Any) -> Workflow:
    return Workflow(
        [
            KeepRows(column="label", values=("0", "1")),
            Normalize(columns=("x",)),
            TargetEncoding(columns=("city",), target="label", outputs=("rate",)),
            Categorify(columns=("city",)),
        ],
        source=SourceSpec(format=form, columns=COLUMNS, **source),
        labels=[LabelSpec(name="label")],
        dense=["x", "rate"],
        categorical=["city"],
        split=SplitByFiles(valid=1),
    )


CITIES = {"label": [0, 1, 7, 1, 0, 1], "x": [1.0, 2.0, 3.5, 4.0, 8.0, 2.0], "city": ["a", "b", "a", None, "c", "a"]}


def write_cities(path: Path, form: str, names: tuple[str, ...]) -> Path:
    table = pa.table({name: CITIES[name] for name in names})
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif form == "json_lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        rows = [names, *zip(*table.to_pydict().values(), strict=True)]
        path.write_text("".join(",".join("" if value is None else str(value) for value in row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", ["delimited", "json_lines", "parquet", "arrow"])
def test_every_format_with_a_split_by_files(form: str, tmp_path: Path) -> None:
    """D1: one new file is enough; KeepRows keeps every row, and target encoding is that of all training rows."""
    source = {"delimiter": ",", "header": True} if form == "delimited" else {}
    files = [write_cities(tmp_path / f"{number}", form, ("label", "x", "city")) for number in range(2)]
    prepare(city_workflow(form, **source), files, tmp_path / "data")
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    served = workflow.encode({"x": CITIES["x"], "city": CITIES["city"]})
    for names in (("label", "x", "city"), ("x", "city"), ("city", "x")):
        new = write_cities(tmp_path / "new", form, names)
        found = encoded(EncodedFiles(workflow, [new], keep=("city",)))
        assert found["rows"] == [0, 1, 2, 3, 4, 5]
        np.testing.assert_array_equal(found["dense"], served.dense)
        assert found["keys"] == [keys.tolist() for keys in served.keys]
        empty = "" if form == "delimited" else None
        assert [value or empty for value in found["kept"]["city"]] == [value or empty for value in CITIES["city"]]


def test_a_bucket_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files were listed for their format, for their number of fields, and for their rows."""
    log = write_cities(tmp_path / "log", "delimited", ("label", "x", "city"))
    log.write_text(log.read_text().partition("\n")[2])
    other = shutil.copy(log, tmp_path / "other")
    prepare(city_workflow("delimited", delimiter=","), [log, other], tmp_path / "data")
    fsspec.filesystem("memory").pipe("/scored/a", b"1.0,a\n2.0,b\n")
    listed: list[str] = []
    glob = MemoryFileSystem.glob
    monkeypatch.setattr(MemoryFileSystem, "glob", lambda fs, path, **kw: listed.append(path) or glob(fs, path, **kw))
    found = encoded(EncodedFiles(Workflow.load(tmp_path / "data" / "workflow"), ["memory://scored/*"]))
    assert (len(listed), found["rows"]) == (1, [0, 1])


@pytest.mark.parametrize("names", ["label,x", "x"])
def test_columns_in_the_names_of_directories(tmp_path: Path, names: str) -> None:
    """They counted as fields of the lines, of which one seemed to be absent."""
    columns = tuple(SourceColumn(name=name, type="integer") for name in ("label", "x", "day"))
    workflow = Workflow(
        [],
        source=SourceSpec(format="delimited", delimiter=",", columns=columns),
        labels=[LabelSpec(name="label")],
        dense=["x", "day"],
    )
    log = tmp_path / "day=3" / "a.csv"
    log.parent.mkdir()
    log.write_text("1,5\n0,6\n")
    prepare(workflow, [log], tmp_path / "data")
    if names == "x":
        log.write_text("5\n6\n")
    found = encoded(EncodedFiles(Workflow.load(tmp_path / "data" / "workflow"), [log]))
    assert found["dense"].tolist() == [[5.0, 3.0], [6.0, 3.0]]


def test_grouped_steps_see_the_rows_of_the_files_in_bounded_memory(tmp_path: Path) -> None:
    files = shop_files(tmp_path / "raw")
    prepare(shop_workflow(), files, tmp_path / "data")
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    options = PrepareOptions(memory_bytes=1 << 26, threads=1, earlier_rows="none")
    prepare(workflow.with_split(OneSplit(split="valid")), files, tmp_path / "all", options)
    found = encoded(EncodedFiles(workflow, files, keep=("item",), options=options))
    check_alike(found, workflow, Prepared(tmp_path, tmp_path / "all", None).split("valid"))  # type: ignore[arg-type]
    assert found["kept"]["item"][:3] == [
        int(line.split("\t")[3]) if line.split("\t")[3] else None for line in files[0].read_text().splitlines()[:3]
    ]


def test_lists_that_become_rows_bring_no_labels(tmp_path: Path) -> None:
    """The label's list, which is exploded with the items, need not be there."""
    lists = (
        SourceColumn(name="user", type="text"),
        SourceColumn(name="shown", type="text", separator=" "),
        SourceColumn(name="clicked", type="integer", separator=" "),
    )
    workflow = Workflow(
        [Explode(columns=("clicked", "shown")), Categorify(columns=("user", "shown"))],
        source=SourceSpec(format="delimited", delimiter=",", header=True, columns=lists),
        labels=[LabelSpec(name="clicked")],
        categorical=["user", "shown"],
    )
    log = tmp_path / "log.csv"
    log.write_text("user,shown,clicked\nu,a b,1 0\nv,b,1\n")
    prepare(workflow, [log], tmp_path / "data")
    new = tmp_path / "new.csv"
    new.write_text("user,shown\nv,b a b\nu,\nw,a\n")
    found = encoded(EncodedFiles(Workflow.load(tmp_path / "data" / "workflow"), [new], keep=("user",)))
    assert (found["rows"], found["items"]) == ([0, 0, 0, 2], [0, 1, 2, 0])
    assert found["kept"] == {"user": ["v", "v", "v", "w"]}
    assert found["keys"] == [[3, 3, 3, 1], [2, 3, 2, 3]]


def test_bad_input_is_reported_and_left_out(tmp_path: Path) -> None:
    logs = [write_cities(tmp_path / f"log{number}.csv", "delimited", ("label", "x", "city")) for number in range(2)]
    workflow = city_workflow("delimited", delimiter=",", header=True)
    prepare(workflow, logs, tmp_path / "data")
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    new = tmp_path / "new.csv"
    new.write_text("x,city\n1,a\nmany,b\n,c\n3,c\n")
    with pytest.raises(FormatError, check=at(f"{new}: line 3, column 'x'")):
        encoded(EncodedFiles(workflow, [new]))
    files = EncodedFiles(workflow, [new], options=PrepareOptions(bad_input="skip"))
    assert encoded(files)["rows"] == [0, 3]
    assert files.bad_input.counts["number"] == 1
    assert sum(files.bad_input.counts.values()) == 2


def test_rejections(tmp_path: Path) -> None:
    logs = [write_cities(tmp_path / f"log{number}.csv", "delimited", ("label", "x", "city")) for number in range(2)]
    workflow = city_workflow("delimited", delimiter=",", header=True)
    with pytest.raises(ConfigError, check=at("workflow 'workflow'")):
        EncodedFiles(workflow, logs)
    prepare(workflow, logs, tmp_path / "data")
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    with pytest.raises(DataNotFoundError):
        EncodedFiles(workflow, [tmp_path / "none.csv"])
    other = tmp_path / "other.csv"
    other.write_text("x,town\n1,a\n")
    with pytest.raises(ConfigError, check=at(other)):
        encoded(EncodedFiles(workflow, [other]))
    with pytest.raises(ConfigError, check=at(logs[0])):
        encoded(EncodedFiles(workflow, logs[:1], keep=("nosuch",)))


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_a_compressed_file_without_rows(tmp_path: Path, content: bytes) -> None:
    """Its bytes do not tell that it is empty, and without a header its first line tells which columns it has."""
    log = write_cities(tmp_path / "log", "delimited", ("label", "x", "city"))
    log.write_text(log.read_text().partition("\n")[2])
    workflow = fit(city_workflow("delimited", delimiter=",").with_split(None), [log])
    (tmp_path / "empty.gz").write_bytes(gzip.compress(content))
    with pytest.raises(FormatError, check=at(tmp_path / "empty.gz", "empty")):
        list(EncodedFiles(workflow, [tmp_path / "empty.gz"]).blocks())


def test_served_records_have_what_grouped_steps_made(tmp_path: Path) -> None:
    """They were refused for want of earlier rows, and then of the label."""
    visits = [(user, time, f"i{(user * time) % 7}") for time in range(20) for user in range(3)]
    log = tmp_path / "log.csv"
    log.write_text("user,time,item,click\n" + "".join(f"{u},{time},{item},{time % 2}\n" for u, time, item in visits))
    columns = [("user", "integer"), ("time", "integer"), ("item", "text"), ("click", "integer")]
    workflow = Workflow(
        [
            History(columns=("item",), outputs=("past",), group="user", order="time", max_length=3),
            DifferenceLag(columns=("time",), outputs=("gap",), group="user", order="time"),
            FillMissing(columns=("gap",), value=0.0),
            Categorify(columns=("item", "past"), joint=True),
        ],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            header=True,
            columns=tuple(SourceColumn(name=name, type=kind) for name, kind in columns),
        ),
        split=OneSplit(split="train"),
        labels=[LabelSpec(name="click")],
        dense=["gap"],
        categorical=["item", "past"],
    )
    prepare(workflow, [log], tmp_path / "data")
    workflow = Workflow.load(tmp_path / "data" / "workflow")
    records = {"item": ["i1", "new", None], "gap": [1.0, None, 7.0], "past": [["i1"], None, ["i0", "i3"]]}
    (tmp_path / "served").mkdir()
    for number in range(2):
        pq.write_table(pa.table({**records, "served.score": [0.5] * 3}), tmp_path / "served" / f"{number}.parquet")
    seen = []
    files = EncodedFiles(workflow, [tmp_path / "served"], keep=("item", "past"), progress=seen.append)
    found = encoded(files)
    assert found["rows"] == list(range(6))
    assert found["kept"] == {name: 2 * records[name] for name in ("item", "past")}
    expected = workflow.encode(records)
    np.testing.assert_array_equal(found["dense"], np.concatenate([expected.dense] * 2))
    assert found["keys"][0] == 2 * expected.keys[0].tolist()
    assert (seen[-1].rows, seen[-1].done_bytes) == (6, seen[-1].total_bytes)
    assert not files.bad_input.counts
    with pytest.raises(ConfigError, match=r"got 'user', expected columns of the workflow's records: item, "):
        EncodedFiles(workflow, [tmp_path / "served"], keep=("user",))
