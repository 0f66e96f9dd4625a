# SPDX-License-Identifier: Apache-2.0
"""``terarec prepare --limit N`` prepares the first N rows, in any format."""

import bz2
import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from terarec.errors import FormatError
from terarec.etl.ops import Categorify, FillMissing, Normalize
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFiles, SplitByFraction, SplitByTime
from tests.cli.conftest import figures, rejected
from tests.params import in_every_run

Rows = Sequence[dict[str, Any]]


def write_csv(path: Path, rows: Rows) -> None:
    opened = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, rows: Rows) -> None:
    path.write_text("\n\n".join(map(json.dumps, rows)))  # an empty line is no row


WRITERS: dict[str, tuple[str, Callable[[Path, Rows], None]]] = {
    "csv": ("delimited", write_csv),
    "csv.gz": ("delimited", write_csv),
    "csv.bz2": ("delimited", write_csv),
    "json": ("json_lines", write_json),
    "parquet": ("parquet", lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)),
    "arrow": ("arrow", lambda path, rows: feather.write_feather(pa.Table.from_pylist(rows), str(path), chunksize=64)),
}


def rows_of(file: int) -> list[dict[str, Any]]:
    """Rows whose texts hold line ends, quotes and delimiters."""
    return [
        {"time": 1000 * file + row, "brand": f'b{row % 9},"\n{file}', "price": row * 0.5, "bought": row % 2}
        for row in range(200)
    ]


def workflow(source_format: str, split: Split | None) -> Workflow:
    columns = [("time", "integer"), ("brand", "text"), ("price", "number"), ("bought", "integer")]
    delimited = {"delimiter": ",", "header": True, "quote": True} if source_format == "delimited" else {}
    return Workflow(
        [Categorify(columns=("brand",)), Normalize(columns=("price",)), FillMissing(columns=("price",), value=0.0)],
        source=SourceSpec(
            format=source_format,  # type: ignore[arg-type]
            columns=tuple(SourceColumn(name=name, type=kind) for name, kind in columns),  # type: ignore[arg-type]
            **delimited,  # type: ignore[arg-type]
        ),
        split=split,
        labels=[LabelSpec(name="bought")],
        dense=["price"],
        categorical=["brand"],
    )


def content(data: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        split.name: [row for part in sorted(split.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
        for split in data.iterdir()
        if split.name in ("train", "valid", "test")
    }


@pytest.mark.parametrize("ending", in_every_run(WRITERS.keys() - {"csv.bz2"}, WRITERS))
def test_the_first_rows_of_every_format(tmp_path: Path, ending: str) -> None:
    """The data set is that of files which end with the last of the rows, whatever the split."""
    source_format, write = WRITERS[ending]
    rows = [*rows_of(0), *rows_of(1)]
    both = [tmp_path / f"{number}.{ending}" for number in (0, 1)]
    for number, path in enumerate(both):
        write(path, rows_of(number))
    splits: list[tuple[int, Split | None]] = [
        (7, SplitByFraction(valid=0.2)),
        (200, None),
        (201, SplitByTime(column="time", valid=0.1)),
        (1000, SplitByFraction(valid=0.1, test=0.1)),
    ]
    for limit, split in splits if ending == "csv" else splits[1:3]:
        spec = tmp_path / f"{limit}.json"
        workflow(source_format, split).to_json(spec)
        out = tmp_path / f"limited-{limit}"
        report = figures("prepare", spec, *both, "--out", out, "--limit", limit)
        first = tmp_path / f"first-{limit}.{ending}"
        write(first, rows[:limit])
        figures("prepare", spec, first, "--out", tmp_path / f"first-{limit}")
        assert report["rows"] == min(limit, 400)
        assert content(out) == content(tmp_path / f"first-{limit}")
        assert 0 < report["input_bytes"] <= sum(path.stat().st_size for path in both)


def test_rows_behind_the_limit_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write_csv(path, rows_of(0))
    with path.open("a") as file:
        file.write("1,b,no number,1\n")
    workflow("delimited", None).to_json(tmp_path / "w.json")
    assert figures("prepare", tmp_path / "w.json", path, "--out", tmp_path / "data", "--limit", 200)["rows"] == 200
    typed = ["prepare", tmp_path / "w.json", path, "--out", tmp_path / "bad", "--limit", 201]
    rejected(*typed, error=FormatError, where=f"{path}: line 402, column 'price'")


def test_files_keep_their_splits(tmp_path: Path) -> None:
    both = [tmp_path / f"{number}.csv" for number in (0, 1)]
    for number, path in enumerate(both):
        write_csv(path, rows_of(number))
    workflow("delimited", SplitByFiles(valid=1)).to_json(tmp_path / "w.json")
    for limit, splits in ((150, {"train": 150}), (250, {"train": 200, "valid": 50})):
        arguments = ("--out", tmp_path / f"data-{limit}", "--limit", limit, "--empty-splits", "allow")
        assert figures("prepare", tmp_path / "w.json", *both, *arguments)["splits"] == splits
    arguments = ("--out", tmp_path / "no", "--limit", 150)
    rejected("prepare", tmp_path / "w.json", *both, *arguments, where="--split", problem="a limit above 150")


def test_every_form_of_prepare_takes_it(tmp_path: Path) -> None:
    figures("generate", "criteo", "--rows", 300, "--out", tmp_path / "raw")
    criteo = figures("prepare", "criteo", tmp_path / "raw", "--out", tmp_path / "criteo", "--limit", 100)
    assert criteo["splits"] == {"train": 90, "valid": 10}
    write_csv(tmp_path / "log.csv", rows_of(0))
    options = ["--label", "bought", "--categorical", "brand", "--limit", 50]
    assert figures("prepare", "csv", tmp_path / "log.csv", "--out", tmp_path / "csv", *options)["rows"] == 50


def test_a_cluster_has_no_first_rows(tmp_path: Path) -> None:
    arguments = ["avazu", "log.csv", "--out", tmp_path / "data", "--limit", 5, "--engine", "spark"]
    rejected("prepare", *arguments, where="--limit", problem="'spark'")
