# SPDX-License-Identifier: Apache-2.0
"""``terarec prepare --dry-run`` shows what would be written, and writes nothing."""

from pathlib import Path

import pytest

from terarec.errors import FormatError
from terarec.etl import dry_run
from terarec.formats import read_dataset
from terarec.formats.shard import open_shard
from terarec.spec import SplitByFraction
from tests.cli.conftest import figures, rejected, terarec
from tests.cli.test_limit import WRITERS, rows_of, workflow, write_csv

PAGES = [(Path(__file__).parents[2] / "docs" / page).read_text() for page in ("cli.md", "preparing.md")]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 200 rows, and ``w.json`` next to it."""
    workflow("delimited", SplitByFraction(valid=0.1)).to_json(tmp_path / "w.json")
    write_csv(tmp_path / "log.csv", rows_of(0))
    return tmp_path / "log.csv"


def test_a_log_that_the_sample_holds_is_described_exactly(log: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "data"
    preview = figures("prepare", tmp_path / "w.json", log, "--out", out, "--dry-run")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    report = figures("prepare", tmp_path / "w.json", log, "--out", out)
    assert (preview["estimated_rows"], preview["sample_rows"], preview["is_complete"]) == (200, 200, True)
    assert preview["estimated_bytes"] == sum(path.stat().st_size for path in out.glob("*/*.parquet"))
    assert preview["tables"] == report["tables"]
    lists = {"empty_share": None, "mean_length": None}
    found = [column["name"] for column in preview["columns"] if column["mean_length"] is not None]
    assert found == [column["name"] for column in report["columns"] if column["hotness"] > 1]  # finding N12
    assert [{**column, "type": None, **lists} for column in preview["columns"]] == [
        {**column, "type": None, **lists} for column in report["columns"]
    ]
    assert [column["type"] for column in preview["columns"]] == ["float32", "float32", "int32"]
    types = {column["name"]: column["type"] for column in preview["inputs"]}
    assert types == {"time": "integer", "brand": "text", "price": "number", "bought": "integer"}
    dataset = read_dataset(out)
    block = open_shard(dataset, out / dataset.shards("train")[0].file).read_group(0)
    assert preview["rows"]["bought"] == block.label[:10, 0].tolist()
    assert preview["rows"]["price"] == pytest.approx(block.dense[:10, 0].tolist())
    for page, title in zip(PAGES, ("## terarec prepare criteo", "## Dry run"), strict=True):
        section = page.split(title)[1].split("\n## ")[0]
        assert {name for name in preview if f"`{name}`" not in section} == set()


@pytest.mark.parametrize("ending", WRITERS)
def test_the_rest_is_estimated_from_a_bounded_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(dry_run, "SAMPLE_ROWS", 150)
    source_format, write = WRITERS[ending]
    workflow(source_format, None).to_json(tmp_path / "w.json")
    for number in (0, 1, 2):
        write(tmp_path / f"{number}.{ending}", rows_of(number))
    files = sorted(tmp_path.glob(f"[0-9].{ending}"))
    preview = figures("prepare", tmp_path / "w.json", *files, "--out", tmp_path / "data", "--dry-run")
    assert (preview["sample_rows"], preview["is_complete"], preview["files"]) == (150, False, 3)
    if ending == "parquet":
        assert preview["estimated_rows"] == 600
    elif ending in ("csv", "json"):
        assert preview["estimated_rows"] == pytest.approx(600, rel=0.1)
    limited = ["--out", tmp_path / "data", "--dry-run", "--limit", 120]
    preview = figures("prepare", tmp_path / "w.json", *files, *limited)
    assert (preview["estimated_rows"], preview["is_complete"]) == (120, True)


@pytest.mark.parametrize("storage", ["raw", "norm", "hugectr_parquet"])
def test_other_formats_hold_the_same_samples(log: Path, tmp_path: Path, storage: str) -> None:
    arguments = ["prepare", tmp_path / "w.json", log, "--out", tmp_path / "data", "--dry-run"]
    assert figures(*arguments, "--format", storage)["rows"] == figures(*arguments)["rows"]


def test_lists_and_other_forms_of_prepare(tmp_path: Path) -> None:
    figures("generate", "rees46", "--rows", 400, "--out", tmp_path / "raw")
    preview = figures("prepare", "rees46", tmp_path / "raw", "--out", tmp_path / "data", "--dry-run")
    lists = {column["name"] for column in preview["columns"] if column["type"].startswith("list of ")}
    assert lists
    assert all(isinstance(values[0], list) for name, values in preview["rows"].items() if name in lists)
    log = tmp_path / "log.csv"
    write_csv(log, rows_of(0))
    options = ["--label", "bought", "--categorical", "brand", "--metadata", "time", "--dry-run"]
    preview = figures("prepare", "csv", log, "--out", tmp_path / "data", *options)
    assert [column["type"] for column in preview["columns"]] == ["float32", "int32", "text"]
    assert not (tmp_path / "data").exists()


def test_what_people_read(log: Path, tmp_path: Path) -> None:
    ended = terarec("prepare", tmp_path / "w.json", log, "--out", tmp_path / "data", "--dry-run")
    assert ended.code == 0
    for words in ("Dry run: nothing is written", "those of all rows", "Columns of the sources", "First samples", "200"):
        assert words in ended.out


def test_errors_are_those_of_the_preparation(log: Path, tmp_path: Path) -> None:
    with log.open("a") as file:
        file.write("1,b,no number,1\n")
    typed = ["prepare", tmp_path / "w.json", log, "--out", tmp_path / "data", "--dry-run"]
    rejected(*typed, error=FormatError, where=f"{log}: line 402, column 'price'")
    assert not (tmp_path / "data.partial").exists()
    kept = ["--bad-input", "skip", "--dry-run"]
    preview = figures("prepare", tmp_path / "w.json", log, "--out", tmp_path / "data", *kept)
    assert preview["bad_input"]["counts"] == {"number": 1}
