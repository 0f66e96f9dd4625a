"""``terarec workflow draft`` writes a workflow for unknown logs, which prepares them as it is."""

import json
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from terarec.errors import FormatError
from terarec.etl import draft as draft_module
from terarec.etl.workflow import Workflow
from tests.cli.conftest import figures, rejected, terarec

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
FIRST = datetime(2024, 1, 1, tzinfo=UTC)


def rows(count: int = 300) -> list[dict[str, Any]]:
    """Rows of all kinds of columns, in the order of time."""
    source = random.Random(0)
    return [
        {
            "row": row,
            "when": (FIRST + timedelta(minutes=17 * row)).strftime("%Y-%m-%d %H:%M:%S"),
            "user_id": source.randrange(40),
            "session": f"s{row}",
            "device": f"{source.randrange(16) * 0x1F3A5C7 + 0xA0000000:08x}",
            "genres": "|".join(source.sample(["drama", "comedy", "action", "war"], source.randrange(1, 4))),
            "price": source.gauss(20, 4),
            "views": int(source.paretovariate(0.4)),
            "constant": "x",
            "zip": f"{source.randrange(30):05d}",
            "clicked": source.randrange(2),
        }
        for row in range(count)
    ]


def write_lines(path: Path, content: Sequence[Mapping[str, Any]], delimiter: str, *, header: bool = True) -> Path:
    lines = [delimiter.join(map(str, row.values())) for row in content]
    path.write_text("\n".join([delimiter.join(content[0])] * header + lines) + "\n")
    return path


def draft(path: Path, *options: object) -> dict[str, Any]:
    """Draft a workflow; it must prepare the file."""
    out = path.with_suffix(".workflow.json")
    found = figures("workflow", "draft", path, "--out", out, "--force", *options)
    report = figures("prepare", out, path, "--out", path.with_suffix(f".data{len(options)}"))
    assert set(report["splits"]) == {"train", "valid"}
    return {**found, "rows": report["rows"], "uses": {item["column"]: item["use"] for item in found["columns"]}}


USES = {
    "row": "left out",
    "when": "date parts",
    "user_id": "ids",
    "session": "left out",
    "device": "ids",
    "genres": "ids",
    "price": "dense",
    "views": "dense",
    "constant": "left out",
    "zip": "ids",
    "clicked": "label",
}


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "::"])
def test_types_and_roles_of_delimited_text(tmp_path: Path, delimiter: str) -> None:
    content = rows()
    found = draft(write_lines(tmp_path / "log.txt", content, delimiter))
    assert (found["format"], found["delimiter"], found["header"]) == ("delimited", delimiter, True)
    assert found["uses"] == USES
    types = {item["column"]: item["type"] for item in found["columns"]}
    assert types == {
        "row": "integer",
        "when": "time",
        "user_id": "integer",
        "session": "text",
        "device": "hex32",
        "genres": "text",
        "price": "number",
        "views": "integer",
        "constant": "text",
        "zip": "text",
        "clicked": "integer",
    }
    assert (found["label"], found["rows"]) == ("clicked", 300)
    spec = Workflow.from_json(tmp_path / "log.workflow.json").spec
    steps = {type(step).__name__: step for step in spec.steps}
    assert set(steps) == {
        *("DateParts", "Categorify", "ListSlice", "FillMissing", "LogOp", "Normalize"),
    }
    assert steps["LogOp"].columns == ("views",)
    assert steps["Normalize"].columns == ("price",)
    assert spec.source.column("genres").separator == "|"
    assert spec.split.column == "when"
    section = PAGE.split("## terarec workflow draft")[1].split("\n## ")[0]
    assert {name for name in found if f"`{name}`" not in section} == {"rows", "uses"}


def test_files_that_hold_their_types(tmp_path: Path) -> None:
    """Parquet, Arrow and JSON lines: lists and times of their own, and no truth values."""
    content = [
        {**row, "genres": row["genres"].split("|"), "flag": True, "when": FIRST + timedelta(minutes=index)}
        for index, row in enumerate(rows())
    ]
    table = pa.Table.from_pylist(content)
    pq.write_table(table, tmp_path / "log.parquet")
    feather.write_feather(table, str(tmp_path / "log.arrow"))
    lines = [{**row, "when": int(row["when"].timestamp())} for row in content]
    (tmp_path / "log.json").write_text("\n".join(map(json.dumps, lines)))
    for ending, source_format in (("parquet", "parquet"), ("arrow", "arrow"), ("json", "json_lines")):
        found = draft(tmp_path / f"log.{ending}")
        assert (found["format"], found["uses"]) == (source_format, {**USES, "flag": "left out"})
        Path(tmp_path / "log.workflow.json").unlink()
        for path in tmp_path.glob("log.data*"):
            path.rename(tmp_path / f"{ending}-{path.name}")


def test_without_a_header_the_columns_are_numbered(tmp_path: Path) -> None:
    content = [{"label": row["clicked"], **{name: row[name] for name in ("device", "views", "zip")}} for row in rows()]
    content[3]["views"] = content[5]["views"] = "NA"
    found = draft(write_lines(tmp_path / "log.tsv", content, "\t", header=False))
    assert found["header"] is False
    assert found["uses"] == {"column_1": "label", "column_2": "ids", "column_3": "dense", "column_4": "ids"}
    views = found["columns"][2]
    assert (views["type"], views["missing_share"]) == ("integer", pytest.approx(2 / 300))


def test_the_label_is_guessed_or_named(tmp_path: Path) -> None:
    content = [
        {"stars": index % 5 + 1, "income": "<=50K" if index % 3 else ">50K", "brand": f"b{index % 7}"}
        for index in range(60)
    ]
    path = write_lines(tmp_path / "log.csv", content, ",")
    assert draft(path)["label"] == "income"
    assert Workflow.from_json(tmp_path / "log.workflow.json").spec.labels[0].positives == (">50K",)
    assert draft(path, "--label", "stars")["label"] == "stars"
    assert Workflow.from_json(tmp_path / "log.workflow.json").spec.labels[0].at_least in (3.0, 4.0)
    arguments = ["workflow", "draft", path, "--out", tmp_path / "x.json"]
    rejected(*arguments, "--label", "star", where="--label", problem="got 'star' (did you mean 'stars'?)")
    path = write_lines(tmp_path / "none.csv", [{"a": f"{row}a", "b": f"{row}b"} for row in range(60)], ",")
    rejected("workflow", "draft", path, "--out", tmp_path / "x.json", where="--label", problem="no column")


def test_columns_of_very_many_values_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "_MANY_VALUES", 100)
    content = [{"ip": f"10.0.0.{row // 2}", "click": row % 2, "site": f"s{row % 3}"} for row in range(300)]
    found = draft(write_lines(tmp_path / "log.csv", content, ","))
    assert found["uses"] == {"ip": "hashed ids", "click": "label", "site": "ids"}
    assert "hashed into 512 ids" in found["columns"][0]["reason"]


@pytest.mark.parametrize(("preset", "log"), [("criteo", "day_0.tsv"), ("adult", "adult.data"), ("avazu", "train.csv")])
def test_public_layouts(tmp_path: Path, preset: str, log: str) -> None:
    figures("generate", preset, "--rows", 600, "--out", tmp_path / "raw")
    assert draft(tmp_path / "raw" / log)["rows"] >= 400


def test_what_people_read_and_what_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.csv", rows(), ",")
    ended = terarec("workflow", "draft", path, "--out", tmp_path / "w.json")
    assert ended.code == 0
    for words in ("guessed by its name 'clicked'", "the latest 10% of the rows by 'when'", "left out"):
        assert words in ended.out
    rejected(
        "workflow", "draft", path, "--out", tmp_path / "w.json", where="--out", problem=f"{tmp_path / 'w.json'} exists"
    )
    (tmp_path / "prose.txt").write_text("one\ntwo\nthree\n")
    typed = ["workflow", "draft", tmp_path / "prose.txt", "--out", tmp_path / "x.json"]
    rejected(*typed, error=FormatError, where=tmp_path / "prose.txt")
    (tmp_path / "narrow.csv").write_text("a,b,c\n" + "1,2\n" * 50)
    typed = ["workflow", "draft", tmp_path / "narrow.csv", "--out", tmp_path / "x.json"]
    rejected(*typed, error=FormatError, where=f"{tmp_path / 'narrow.csv'}: line 1", problem="found 3 fields")
    (tmp_path / "log.json").write_text('{"click": true, "user": 3}\n' * 9)
    arguments = ["workflow", "draft", tmp_path / "log.json", "--out", tmp_path / "x.json", "--label", "click"]
    rejected(*arguments, where="--label", problem="got 'click'")
    assert not (tmp_path / "x.json").exists()


def test_quotes_line_ends_and_latin_1(tmp_path: Path) -> None:
    quoted = "".join(f'"x, {row % 4}","caf\u00e9 {row % 6}\n2",{row % 2}\n' for row in range(200))
    (tmp_path / "log.csv").write_bytes(f'"a b","c""d",label\n{quoted}'.encode("latin-1"))
    found = draft(tmp_path / "log.csv")
    assert found["uses"] == {"a b": "ids", 'c"d': "ids", "label": "label"}
    spec = Workflow.from_json(tmp_path / "log.workflow.json").spec
    assert (spec.source.quote, spec.source.encoding) == (True, "latin-1")
    assert found["rows"] == 200
