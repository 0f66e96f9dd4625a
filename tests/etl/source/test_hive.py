# SPDX-License-Identifier: Apache-2.0
"""Columns in the names of directories, as Hive and Spark write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from terarec.errors import ConfigError, FormatError
from terarec.etl.source.hive import directory_values
from terarec.etl.source.source import open_source
from terarec.spec import SourceColumn, SourceSpec
from tests.errors import at
from tests.etl.source.samples import rows_of

DAYS = {"day": "time", "country": "text", "hour": "integer"}
TABLE = pa.table(
    {
        "x": [1, 2, 3, 4],
        "country": ["DE", None, "a/b c", "DE"],
        "hour": pa.array([7, 8, None, 10], pa.int64()),
        "day": ["2024-01-01", "2024-01-02", "2024-01-02", "2024-01-10"],
    }
)


def spec(file_format: str = "parquet", *, header: bool = True, **types: str) -> SourceSpec:
    forms = {"time": "%Y-%m-%d"}
    columns = (
        SourceColumn(name="x", type="integer"),
        *(SourceColumn(name=name, type=kind, format=forms.get(kind)) for name, kind in (types or DAYS).items()),  # type: ignore[arg-type]
    )
    return SourceSpec(format=file_format, columns=columns, delimiter=",", header=header)  # type: ignore[arg-type]


def write(directory: Path) -> None:
    dataset.write_dataset(
        TABLE, directory, format="parquet", partitioning=["day", "country", "hour"], partitioning_flavor="hive"
    )


def by_x(found: dict[str, list[object]]) -> list[tuple[object, ...]]:
    return sorted(zip(*(found[name] for name in ("x", "day", "country", "hour")), strict=True))  # type: ignore[type-var]


EXPECTED = [
    (1, 1_704_067_200, "DE", 7),
    (2, 1_704_153_600, None, 8),
    (3, 1_704_153_600, "a/b c", None),
    (4, 1_704_844_800, "DE", 10),
]


def test_directories_of_arrow_are_columns(tmp_path: Path) -> None:
    """Finding N9: percent-encoded and missing values, too."""
    write(tmp_path)
    assert by_x(rows_of(open_source(spec(), [tmp_path]))[1]) == EXPECTED
    assert by_x(rows_of(open_source(spec(), [tmp_path / "day=*"]))[1]) == EXPECTED


@pytest.mark.parametrize("file_format", ["delimited", "headerless", "json_lines"])
def test_directories_of_text(tmp_path: Path, file_format: str) -> None:
    """Finding N9."""
    for x, (day, country) in enumerate([("2024-01-01", "DE"), ("2024-01-10", "__HIVE_DEFAULT_PARTITION__")]):
        folder = tmp_path / f"day={day}" / f"country={country}" / "hour=7"
        folder.mkdir(parents=True)
        text = (
            json.dumps({"x": x}) if file_format == "json_lines" else f"x\n{x}" if file_format == "delimited" else f"{x}"
        )
        (folder / "part.txt").write_text(text + "\n")
    kind = "json_lines" if file_format == "json_lines" else "delimited"
    found = rows_of(open_source(spec(kind, header=file_format == "delimited"), [tmp_path]))[1]
    assert by_x(found) == [(0, 1_704_067_200, "DE", 7), (1, 1_704_844_800, None, 7)]


def test_directories_behind_a_url() -> None:
    """Finding N9."""
    with fsspec.open("memory://hive/country=DE/part.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1, 2]}), file)
    found = rows_of(open_source(spec(country="text"), ["memory://hive"]))[1]
    assert found == {"x": [1, 2], "country": ["DE", "DE"]}


def test_a_column_of_the_files_is_read_from_them(tmp_path: Path) -> None:
    """Finding N9: directories may repeat a column; a line of JSON without the field has the directory's value."""
    folder = tmp_path / "country=DE"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1], "country": ["FR"]}), folder / "a.parquet")
    assert rows_of(open_source(spec(country="text"), [folder]))[1]["country"] == ["FR"]
    (folder / "a.parquet").unlink()
    (folder / "a.json").write_text('{"x": 1, "country": "FR"}\n{"x": 2}\n')
    assert rows_of(open_source(spec("json_lines", country="text"), [folder]))[1]["country"] == ["FR", "DE"]


@pytest.mark.parametrize("file_format", ["parquet", "delimited"])
def test_a_later_file_may_not_have_the_column_of_a_directory(tmp_path: Path, file_format: str) -> None:
    """Finding N9: its values were left out without a word."""
    files = []
    for country, names in (("DE", ["x"]), ("FR", ["x", "country"])):
        files.append(tmp_path / f"country={country}" / "part")
        files[-1].parent.mkdir()
        if file_format == "parquet":
            pq.write_table(pa.table({"x": [1], "country": ["IT"]}).select(names), files[-1])
        else:
            files[-1].write_text("x\n1\n" if len(names) == 1 else "x,country\n1,IT\n")
    with pytest.raises(FormatError, check=at(str(files[1]), "one place in all files")):
        open_source(spec(file_format, country="text"), files)


def test_a_bad_field_does_not_become_the_value_of_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "country=DE" / "hour=7"
    folder.mkdir(parents=True)
    lines = [
        '{"x": 1, "country": 5}',
        '{"x": 2}',
        '{"x": 3, "country": null, "hour": "x"}',
        '{"x": 4, "country": "FR"}',
    ]
    (folder / "a.json").write_text("\n".join(lines) + "\n")
    source = open_source(spec("json_lines", country="text", hour="integer"), [tmp_path], "missing")
    found = rows_of(source)[1]
    assert (found["country"], found["hour"]) == ([None, "DE", "DE", "FR"], [7, 7, None, 7])
    assert source.bad_input.counts == {"integer": 1, "text": 1}


def test_wrong_directories(tmp_path: Path) -> None:
    for name in ("hour=7", "hour=x"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / name / "a")
    with pytest.raises(FormatError, check=at(tmp_path / "hour=x" / "a", "got 'x', expected integer")):
        open_source(spec(hour="integer"), [tmp_path])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a")
    with pytest.raises(ConfigError, check=at(tmp_path / "a", "has no column 'hour'")):
        open_source(spec(hour="integer"), [tmp_path / "hour=7", tmp_path / "a"])


def test_names_of_directories() -> None:
    assert directory_values("/data/a=1/b=x%3Dy/c", "ab") == {"a": "1", "b": "x=y"}
    assert directory_values("data/a=1.parquet", "a") == {}
    assert directory_values("/x/a=1/y/a=2/f.csv", "a") == {"a": "2"}
    assert directory_values("/x/a=1/q=%ff/b=/a=2/f.csv", ()) == {}
    with pytest.raises(FormatError, check=at("q=%ff/f.csv")):
        directory_values("q=%ff/f.csv", "q")


@pytest.mark.parametrize(
    ("encoding", "header"),
    [("latin-1", "größe,x"), ("utf-8", "\ufeffcountry,x"), ("utf-8", '"country","x"'), ("utf-8", '"the\nsize",x')],
)
def test_the_header_is_read_as_by_the_reader(tmp_path: Path, encoding: Any, header: str) -> None:
    """Its encoding, a mark before it, and line ends in quotes decided whether a column is in the file."""
    folder = tmp_path / "country=DE"
    folder.mkdir()
    (folder / "a.csv").write_bytes(f"{header}\nFR,1\n".encode(encoding))
    source = replace(spec("delimited", country="text"), encoding=encoding, quote='"' in header)
    found = rows_of(open_source(source, [tmp_path]))[1]
    assert found == {"x": [1], "country": ["FR" if "country" in header else "DE"]}
