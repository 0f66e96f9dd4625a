# SPDX-License-Identifier: Apache-2.0
"""Rows in a file whose format the end of its name tells."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError
from terarec.formats.table_file import table_file
from tests.errors import at

PLAIN = pa.table({"row": pa.array([0, 1]), "score": pa.array([0.25, 0.1], pa.float32()), "city": ["Ulm", 'a "b", c']})
LISTS = pa.table({"row": [0, 1], "tags": pa.array([["a", "b"], []], pa.large_list(pa.string()))})


def written(path: Path, table: pa.Table) -> Path:
    with table_file(path, table.schema) as file:
        file.write_table(table.slice(0, 1))
        file.write_table(table.slice(1))
    return path


def test_every_format_holds_the_rows(tmp_path: Path) -> None:
    assert pq.read_table(written(tmp_path / "x.parquet", PLAIN)).equals(PLAIN)
    lines = written(tmp_path / "x.jsonl", PLAIN).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 0, "score": 0.25, "city": "Ulm"},
        {"row": 1, "score": 0.1, "city": 'a "b", c'},
    ]
    text = written(tmp_path / "x.csv", PLAIN).read_text()
    assert text == '"row","score","city"\n0,0.25,"Ulm"\n1,0.1,"a ""b"", c"\n'


def test_lists_are_written_where_the_format_has_them(tmp_path: Path) -> None:
    assert pq.read_table(written(tmp_path / "x.parquet", LISTS)).equals(LISTS)
    assert json.loads(written(tmp_path / "x.jsonl", LISTS).read_text().splitlines()[0])["tags"] == ["a", "b"]
    with pytest.raises(ConfigError, check=at("out", "column 'tags'")):
        written(tmp_path / "x.csv", LISTS)
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("name", ["x.txt", "x", "x.csv.gz"])
def test_e8_another_end_of_the_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, check=at("out", ".parquet, .csv, .jsonl")):
        written(tmp_path / name, PLAIN)
    assert not list(tmp_path.iterdir())
