# SPDX-License-Identifier: Apache-2.0
"""Pieces of files give the rows, lines and faults of the local engine; no Spark is needed to see that."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.source.files import find_files
from terarec.etl.source.source import Source, open_source, reader_of
from terarec.etl.spark.read import Counted, FilePart, Range, count_range, cut_parquet, cut_text, read_piece
from terarec.spec import SourceColumn, SourceSpec
from tests.errors import at
from tests.etl.source.samples import rows_of

COLUMNS = (
    SourceColumn(name="word", type="text"),
    SourceColumn(name="count", type="integer"),
    SourceColumn(name="sizes", type="integer", separator=" "),
)
PIECE_BYTES = 3000


def cut(spec: SourceSpec, paths: Sequence[Path]) -> list[FilePart]:
    """The pieces of files, counted one after the other."""
    files, reader = find_files(paths), reader_of(spec)
    if isinstance(reader, ParquetReader):
        return cut_parquet(files, reader, PIECE_BYTES)

    def count(ranges: Sequence[Range]) -> list[Counted]:
        return [count_range(reader, spec, files[found.file], found, PIECE_BYTES) for found in ranges]

    return cut_text(files, spec, PIECE_BYTES, count)


def assert_same(spec: SourceSpec, paths: Sequence[Path], policy: Any = "missing", pieces: int = 1) -> None:
    """Check the rows and faults of all pieces, each read for itself."""
    files, reader, found = find_files(paths), reader_of(spec), cut(spec, paths)
    assert len(found) >= pieces
    local = open_source(spec, paths, policy, threads=1)
    rows, columns = rows_of(local)
    expected = local.bad_input
    got_rows: list[int] = []
    got_columns: dict[str, list[Any]] = {name: [] for name in columns}
    counts: dict[str, int] = {}
    first: list[str] = []
    for piece in found:
        source = Source(files, spec, reader, policy, 1)
        blocks = list(read_piece(reader, spec, files, piece))
        assert sum(block.num_rows for block in blocks) == piece.num_rows
        source.raw_blocks = lambda blocks=blocks: iter(blocks)  # type: ignore[method-assign, misc]
        piece_rows, piece_columns = rows_of(source)
        got_rows += piece_rows
        for name, values in piece_columns.items():
            got_columns[name] += values
        report = source.bad_input
        counts = {kind: counts.get(kind, 0) + report.counts.get(kind, 0) for kind in {**counts, **report.counts}}
        first += map(str, report.first)
    assert got_rows == rows
    assert got_columns == columns
    assert counts == expected.counts
    assert first[:10] == list(map(str, expected.first))


def lines(count: int, delimiter: str = ",", *, quote: bool = False) -> list[str]:
    """Lines with good and bad fields, some of them empty."""
    choose = random.Random(count)
    words = ["a", "caf\u00e9", "?", "x" * 50, *(['"b\nc"', '"d""e"'] if quote else ["f"])]
    made = []
    for _ in range(count):
        fields = [choose.choice(words), choose.choice(["1", "-20", "", "x"]), choose.choice(["1 2", "", "1 x"])]
        made.append(delimiter.join(fields[: choose.choice([3, 3, 3, 3, 2])]))
        made += [""] * (choose.random() < 0.1)
    return made


@pytest.mark.parametrize("policy", ["missing", "skip"])
@pytest.mark.parametrize("form", ["plain", "header", "quoted", "line ends in quotes", "gzip", "latin-1", "utf-8-sig"])
def test_pieces_of_delimited_text_are_its_rows(tmp_path: Path, form: str, policy: Any) -> None:
    has_header, has_quotes = form in ("header", "quoted", "line ends in quotes"), form == "line ends in quotes"
    encoding = form if form == "latin-1" else "utf-8"
    settings: dict[str, Any] = {"header": has_header, "quote": form in ("quoted", "line ends in quotes")}
    spec = SourceSpec(format="delimited", columns=COLUMNS, delimiter=",", encoding=encoding, missing=("?",), **settings)
    paths = []
    for number, rows in enumerate([700, 1, 900]):
        header = [["word,count,sizes"], ["sizes,word,count"]][number % 2] if has_header else []
        text = "\r\n".join([*header, *lines(rows, quote=has_quotes)])
        content = text.encode(form if form in ("latin-1", "utf-8-sig") else "utf-8")
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(gzip.compress(content) if form == "gzip" else content)
    is_cut = form not in ("gzip", "latin-1", "line ends in quotes")  # the last of them at blocks of megabytes
    assert_same(spec, paths, policy, pieces=8 if is_cut else 3)


def test_pieces_of_quoted_text_end_where_records_do(tmp_path: Path) -> None:
    spec = SourceSpec(format="delimited", columns=COLUMNS, delimiter=",", quote=True, missing=("?",))
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines(200_000, quote=True)))
    assert_same(spec, [path], pieces=2)


def test_pieces_of_other_formats_are_their_rows(tmp_path: Path) -> None:
    choose = random.Random(1)
    rows = [
        {"word": choose.choice(["a", "b", None]), "count": choose.choice([1, None]), "sizes": [1, 2][: row % 3]}
        for row in range(900)
    ]
    texts = [json.dumps(row) for row in rows]
    texts[300:300] = ["[1]", '{"count": 1', "", '{"count": "x"}']
    (tmp_path / "json").write_text("\n".join(texts))
    assert_same(SourceSpec(format="json_lines", columns=COLUMNS), [tmp_path / "json"], pieces=8)
    table = pa.Table.from_pylist(rows)
    for number in range(2):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=100)
        with pa.OSFile(str(tmp_path / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    for form in ("parquet", "arrow"):
        paths = [tmp_path / f"{number}.{form}" for number in range(2)]
        assert_same(SourceSpec(format=form, columns=COLUMNS), paths, pieces=2)  # type: ignore[arg-type]


def test_files_that_do_not_fit_are_rejected_while_they_are_counted(tmp_path: Path) -> None:
    spec = SourceSpec(format="delimited", columns=COLUMNS, delimiter=",", header=True)
    (tmp_path / "good").write_text("word,count,sizes\na,1,\n")
    for name, text, error in (("empty", "word,count,sizes\n", FormatError), ("other", "words,n\na,1\n", ConfigError)):
        (tmp_path / name).write_text(text)
        with pytest.raises(error, check=at(tmp_path / name)):
            cut(spec, [tmp_path / "good", tmp_path / name])
    pq.write_table(pa.table({"word": [1]}), tmp_path / "table")
    spec = SourceSpec(format="parquet", columns=COLUMNS[:1])
    # A column without a value may have any type, so the type counts where the values are read.
    files, reader, (piece,) = find_files([tmp_path / "table"]), reader_of(spec), cut(spec, [tmp_path / "table"])
    source = Source(files, spec, reader, "raise", 1)
    source.raw_blocks = lambda: read_piece(reader, spec, files, piece)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(FormatError, check=at(f"{tmp_path}/table, column 'word'", "type is int64")):
        rows_of(source)
