# SPDX-License-Identifier: Apache-2.0
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

from terarec.apps import draft as draft_module
from terarec.errors import FormatError
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
    """Parquet, Arrow and JSON lines: lists and times of their own, and no truth values or lists of lists."""
    content = [
        {
            **row,
            "genres": row["genres"].split("|"),
            "flag": True,
            "boxes": [[1, 2]],
            "when": FIRST + timedelta(minutes=index),
        }
        for index, row in enumerate(rows())
    ]
    table = pa.Table.from_pylist(content)
    pq.write_table(table, tmp_path / "log.parquet")
    # As Polars writes its categories, and the newer layouts of Arrow.
    views = {"genres": pa.list_view(pa.string_view()), "session": pa.string_view()}
    for name, kind in views.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(table[name].to_pylist(), kind))
    devices = pa.array(table["device"].to_pylist()).dictionary_encode()
    devices = pa.DictionaryArray.from_arrays(devices.indices, devices.dictionary.cast(pa.string_view()))
    table = table.set_column(table.column_names.index("device"), "device", devices)
    feather.write_feather(table, str(tmp_path / "log.arrow"))
    lines = [{**row, "when": int(row["when"].timestamp())} for row in content]
    (tmp_path / "log.json").write_text("\n".join(map(json.dumps, lines)))
    for ending, source_format in (("parquet", "parquet"), ("arrow", "arrow"), ("json", "json_lines")):
        found = draft(tmp_path / f"log.{ending}")
        assert (found["format"], found["uses"]) == (source_format, {**USES, "flag": "left out", "boxes": "left out"})
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


def uses(path: Path, content: Sequence[Mapping[str, Any]], delimiter: str = ",") -> dict[str, str]:
    found: dict[str, str] = draft(write_lines(path, content, delimiter))["uses"]
    return found


def test_integers_named_like_ids_are_ids(tmp_path: Path) -> None:
    """Finding N10: they became standardized numbers."""
    source, names = random.Random(1), ("user", "item", "uid", "sku", "lastItem", "product_id", "id_count")
    content = [
        {**{name: 10**6 + source.randrange(300) ** 2 for name in names}, "click": source.randrange(2)}
        for _ in range(300)
    ]
    assert uses(tmp_path / "log.csv", content) == {
        **dict.fromkeys(names, "ids"),
        "id_count": "dense",
        "click": "label",
    }


def test_integers_that_fill_their_range_or_are_large_are_ids(tmp_path: Path) -> None:
    """Finding N10: codes are numbered without gaps, and what is measured is not."""
    source = random.Random(2)
    large = [source.randrange(2**40) for _ in range(50)]
    content = [
        {
            "a": source.randrange(120),
            "b": source.choice(large),
            "c": int(source.gauss(5000, 900)),
            "click": row // 9 % 2,
        }
        for row in range(2000)
    ]
    assert uses(tmp_path / "log.csv", content) == {"a": "ids", "b": "ids", "c": "dense", "click": "label"}


def test_columns_that_give_the_label_away_are_left_out(tmp_path: Path) -> None:
    """Finding N10: columns that exist only after the event became features."""
    source = random.Random(3)
    content = []
    for _ in range(400):
        bought = source.randrange(3) == 0
        content.append(
            {
                "paid": source.randrange(1, 50) if bought and source.random() < 0.5 else 0,
                "shipped": source.choice("ab") if bought and source.random() < 0.5 else "",
                "state": "done" if bought or source.random() < 0.01 else "open",
                "margin": source.gauss(9.0 * bought, 1),
                "price": round(source.gauss(20.0 + bought, 4), 2),
                "bought": int(bought),
            }
        )
    found = draft(write_lines(tmp_path / "log.csv", content, ","))
    left_out = {"paid", "shipped", "state", "margin"}
    assert {name for name, use in found["uses"].items() if use == "left out"} == left_out
    assert all("known only after" in item["reason"] for item in found["columns"] if item["column"] in left_out)


@pytest.mark.parametrize(
    ("days", "form"),
    [(range(1, 13), None), (range(13, 29), "%d/%m/%Y"), (sorted(range(1, 13)), "%d/%m/%Y")],
    ids=["shuffled", "above 12", "in order"],
)
def test_the_order_of_day_and_month(tmp_path: Path, days: Sequence[int], form: str | None) -> None:
    """Finding N10: 03/04 was read as the 4th of March, whatever was meant."""
    source = random.Random(4)
    dates = [f"{day:02d}/{month:02d}/2024" for month in (1, 2) for day in days for _ in range(8)]
    if isinstance(days, range) and form is None:
        source.shuffle(dates)
    content = [{"date": date, "x": source.random(), "click": source.randrange(2)} for date in dates]
    found = draft(write_lines(tmp_path / "log.csv", content, ","))
    (column,) = [item for item in found["columns"] if item["column"] == "date"]
    assert (column["format"], column["use"]) == (form, "left out" if form is None else "date parts")
    assert "month" in column["reason"] or "%d/%m/%Y" in column["reason"]


def test_quotes_that_are_characters_and_dropped_lines_are_told(tmp_path: Path) -> None:
    """Finding N10: lines that did not fit the guessed quotes were dropped without a word."""
    lines = [
        f'{row % 5},"{row % 40} inch tv,{row // 3 % 2}' if row % 2 else f"{row % 5},radio,{row // 3 % 2}"
        for row in range(600)
    ]
    (tmp_path / "log.csv").write_text("a,b,click\n" + "\n".join(lines) + "\n")
    found = draft(tmp_path / "log.csv")
    assert (found["rows"], found["dropped_rows"]) == (600, 0)
    lines[::10] = [f"{line},one,more" for line in lines[::10]]
    (tmp_path / "log.csv").write_text("a,b,click\n" + "\n".join(lines) + "\n")
    found = figures("workflow", "draft", tmp_path / "log.csv", "--out", tmp_path / "w.json")
    assert (found["sample_rows"], found["dropped_rows"]) == (540, 60)
    assert any("60 of 600 rows" in reason for reason in found["format_reasons"])


def test_quotes_line_ends_and_latin_1(tmp_path: Path) -> None:
    quoted = "".join(f'"x, {row % 4}","caf\u00e9 {row % 6}\n2",{row // 7 % 2}\n' for row in range(200))
    (tmp_path / "log.csv").write_bytes(f'"a b","c""d",label\n{quoted}'.encode("latin-1"))
    found = draft(tmp_path / "log.csv")
    assert found["uses"] == {"a b": "ids", 'c"d': "ids", "label": "label"}
    spec = Workflow.from_json(tmp_path / "log.workflow.json").spec
    assert (spec.source.quote, spec.source.encoding) == (True, "latin-1")
    assert found["rows"] == 200


def test_a_few_damaged_rows_change_neither_the_label_nor_a_column_of_decimals(tmp_path: Path) -> None:
    content = [{**row, "price": f"{row['price']:.2f}"} for row in rows()]
    content[7]["price"] = "1.299,00 EUR"
    content[9]["clicked"] = ""
    path = write_lines(tmp_path / "log.tsv", content, "\t")
    for options in ([], ["--label", "clicked"]):
        found = figures("workflow", "draft", path, "--out", tmp_path / "w.json", "--force", *options)
        assert {item["column"]: item["use"] for item in found["columns"]} == USES
        assert "missing in 1 of 300 rows" in found["label_reason"]
        assert any(
            "1 of 300 values of 'price' are no numbers, such as '1.299,00 EUR'" in why
            for why in found["format_reasons"]
        )
    report = figures("prepare", tmp_path / "w.json", path, "--out", tmp_path / "data", "--bad-input", "missing")
    assert (report["rows"], report["bad_input"]["counts"]) == (299, {"label": 1, "number": 1})


def test_a_column_that_cannot_be_the_label_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.tsv", rows(), "\t")
    for column in ("genres", "when", "constant", "session"):
        expected = "expected a column of several numbers, or of 2 to 12 texts, one value a row"
        rejected("workflow", "draft", path, "--out", tmp_path / "w.json", "--label", column, problem=expected)


def test_files_of_two_formats_are_told(tmp_path: Path) -> None:
    table = write_lines(tmp_path / "a.csv", rows(), ",")
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    rejected(
        "workflow",
        "draft",
        table,
        lines,
        "--out",
        tmp_path / "w.json",
        error=FormatError,
        problem="is JSON lines, expected delimited text",
    )
    rejected(
        "workflow",
        "draft",
        lines,
        table,
        "--out",
        tmp_path / "w.json",
        error=FormatError,
        problem="none of its first 301 rows can be read",
    )
