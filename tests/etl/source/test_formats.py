# SPDX-License-Identifier: Apache-2.0
"""Every format gives the same rows; what does not fit the spec is rejected with its place."""

import bz2
import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.source import arrow_files
from terarec.etl.source import source as source_module
from terarec.etl.source import text as text_module
from terarec.etl.source.blocks import MAX_LINE_BYTES
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.json_lines import JsonLinesReader
from terarec.etl.source.source import open_source
from terarec.spec import SourceColumn, SourceSpec
from tests.errors import at
from tests.etl.source.samples import EXPECTED, MIXED, ROWS, arrow_table, delimited_line, mixed, rows_of, write_lines

NAMES = [column.name for column in MIXED]


def check(spec, *paths):
    source = open_source(spec, paths, threads=2)
    for _ in range(2):
        rows, columns = rows_of(source)
        assert rows == list(range(len(rows)))
        assert columns == {name: values * (len(rows) // 3) for name, values in EXPECTED.items()}
    for raw in source.raw_blocks():
        first = raw.first_row + raw.num_rows
        assert rows_of(source, raw) == (
            rows[first:],
            {name: all_of[first:] for name, all_of in columns.items() if rows[first:]},
        )
    assert sum(source.count_rows()) == len(rows)
    assert source.bad_input.counts == {}
    assert source.text_bytes > 0
    return source


PACKERS = [
    gzip.compress,
    bz2.compress,
    lambda text: pa.compress(text, "zstd", asbytes=True),
    lambda text: pa.compress(text, "lz4", asbytes=True),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("pack", [bytes, *PACKERS])
def test_delimited_text(tmp_path, end, pack):
    text = "".join(delimited_line(row) + end for row in ROWS).encode()
    (tmp_path / "a").write_bytes(pack(text))
    (tmp_path / "b").write_bytes(pack(b"\xef\xbb\xbf" + text.rstrip()))
    check(mixed("delimited"), tmp_path / "a", tmp_path / "b")


def test_compressed_files_of_several_members(tmp_path):
    lines = [delimited_line(row).encode() + b"\n" for row in ROWS]
    for number, pack in enumerate(PACKERS):
        (tmp_path / str(number)).write_bytes(b"".join(map(pack, lines)))
    check(mixed("delimited"), *(tmp_path / str(number) for number in range(len(PACKERS))))


@pytest.mark.parametrize("delimiter", [",", "::"])
def test_a_header_names_the_columns_in_any_order(tmp_path, delimiter):
    header = ["extra", *reversed(NAMES), "more"]
    lines = [delimiter.join(f'"{name}"' for name in header)]
    for row in ROWS:
        fields = dict(zip(NAMES, delimited_line(row).split("\t"), strict=True))
        lines.append(delimiter.join(f'"{fields.get(name, "no number")}"' for name in header))
    write_lines(tmp_path / "a.csv", lines)
    write_lines(tmp_path / "b.csv", [delimiter.join(NAMES), *(delimited_line(row, delimiter) for row in ROWS)])
    check(mixed("delimited", delimiter=delimiter, header=True, quote=True), tmp_path / "a.csv", tmp_path / "b.csv")


@pytest.mark.parametrize("quote", [True, False])
def test_text_in_latin_1_between_delimiters_of_several_characters(tmp_path, quote):
    columns = (SourceColumn(name="caf\u00e9", type="text"), SourceColumn(name="n", type="integer"))
    source = {"format": "delimited", "columns": columns, "delimiter": "::", "header": True, "encoding": "latin-1"}
    (tmp_path / "a").write_bytes(b"caf\xe9::n\nd\xe9j\xe0:vu::1\r\n\xff:::2\n::3")
    rows = {"caf\u00e9": ["d\u00e9j\u00e0:vu", "\u00ff", None], "n": [1, None, 3]}
    read = open_source(SourceSpec(**source, quote=quote), [tmp_path / "a"], "missing")
    assert rows_of(read)[1] == rows
    assert [str(fault) for fault in read.bad_input.first] == [
        f"{tmp_path / 'a'}: line 3, column 'n': got ':2', expected an integer"
    ]


def test_trimmed_fields_and_words_for_missing_values(tmp_path):
    lines = [" , ".join(field or "?" for field in delimited_line(row).split("\t")) for row in ROWS]
    write_lines(tmp_path / "a", lines)
    check(mixed("delimited", delimiter=",", trim=True, missing=("?",)), tmp_path / "a")


@pytest.mark.parametrize("lists", [True, False])
def test_json_lines(tmp_path, lists):
    rows = []
    for row in ROWS:
        written = {"other": {"nested": [1]}, **{name: value for name, value in row.items() if value is not None}}
        if not lists:
            written["tags"] = "|".join(item or "" for item in row["tags"])
            written["sizes"] = " ".join(map(str, row["sizes"]))
        rows.append(json.dumps(written, ensure_ascii=False))
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    check(mixed("json_lines"), tmp_path / "a.jsonl", tmp_path / "b.gz")


def test_parquet_files_row_group_by_row_group(tmp_path):
    pq.write_table(arrow_table(), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(arrow_table(), tmp_path / "b.parquet")
    source = check(mixed("parquet"), tmp_path)
    assert [raw.num_rows for raw in source.raw_blocks()] == [2, 1, 3]
    assert source.count_rows() == [3, 3]


def test_large_row_groups_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_files, "BATCH_ROWS", 4)
    pq.write_table(arrow_table(ROWS * 3), tmp_path / "a.parquet")
    source = check(mixed("parquet"), tmp_path / "a.parquet")
    assert [raw.num_rows for raw in source.raw_blocks()] == [4, 4, 1]


def test_arrow_files_and_streams(tmp_path):
    feather.write_feather(arrow_table(), tmp_path / "a.arrow", chunksize=2)
    with pa.ipc.new_stream(str(tmp_path / "b.arrows"), arrow_table().schema) as stream:
        stream.write_table(arrow_table())
    check(mixed("arrow"), tmp_path / "a.arrow", tmp_path / "b.arrows")


def test_moments_and_large_integers_of_arrow(tmp_path):
    spec = SourceSpec(
        format="parquet",
        columns=(
            SourceColumn(name="t", type="time"),
            SourceColumn(name="d", type="time"),
            SourceColumn(name="h", type="hex32"),
            SourceColumn(name="n", type="integer"),
        ),
    )
    table = pa.table(
        {
            "t": pa.array([-1, 1_500, None], type=pa.timestamp("ms", tz="UTC")),
            "d": pa.array([1, 0, None], type=pa.date32()),
            "h": pa.array([2**32 - 1, -1, None], type=pa.int64()),
            "n": pa.array([2**63 - 1, 2**63, None], type=pa.uint64()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(spec, [tmp_path / "a.parquet"], "missing")
    _, columns = rows_of(source)
    assert columns == {
        "t": [-1, 1, None], "d": [86400, 0, None], "h": [2**32 - 1, None, None], "n": [2**63 - 1, None, None]
    }  # fmt: skip
    assert source.bad_input.counts == {"hex": 1, "integer_range": 1}
    with pytest.raises(FormatError, check=at(f"{tmp_path}/a.parquet: row 2, column 'h'")):
        rows_of(open_source(spec, [tmp_path / "a.parquet"]))


@pytest.mark.parametrize("block_bytes", [1, 7, 40, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_blocks_and_threads(tmp_path, monkeypatch, block_bytes, threads):
    text = write_lines(tmp_path / "a", [delimited_line(row) for row in ROWS * 5])
    lines = write_lines(tmp_path / "b", [json.dumps(row) for row in ROWS * 5])
    readers = {
        "delimited": lambda spec: DelimitedReader(spec, block_bytes),
        "json_lines": lambda spec: JsonLinesReader(spec, block_bytes),
    }
    monkeypatch.setattr(source_module, "_READERS", readers)
    monkeypatch.setattr(text_module, "_PIECE_BYTES", max(block_bytes, 3))
    monkeypatch.setattr(text_module, "_PART_BYTES", 100)
    for spec, path in ((mixed("delimited"), text), (mixed("json_lines"), lines)):
        packed = tmp_path / "packed"
        packed.write_bytes(gzip.compress(path.read_bytes().rstrip()))
        source = open_source(spec, [path, packed], threads=threads)
        assert source.count_rows() == [15, 15]
        rows, columns = rows_of(source)
        assert rows == list(range(30))
        assert columns == {name: values * 10 for name, values in EXPECTED.items()}


def test_directories_globs_and_urls(tmp_path):
    for name in (
        "b.tsv",
        "a.tsv",
        "sub/c.tsv",
        "_SUCCESS",
        ".hidden.tsv",
        "_tmp/d.tsv",
        "generated.json",
        "e.tsv.partial",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, ["1"])
    spec = SourceSpec(format="delimited", columns=(SourceColumn(name="n", type="integer"),))

    def found(*paths):
        return [
            file.path.removeprefix("file://").removeprefix(f"{tmp_path}/") for file in open_source(spec, paths).files
        ]

    assert found(tmp_path) == ["a.tsv", "b.tsv", "sub/c.tsv"]
    assert found(f"{tmp_path}/?.tsv", tmp_path / "sub") == ["a.tsv", "b.tsv", "sub/c.tsv"]
    pytest.importorskip("fsspec")
    assert found(f"file://{tmp_path}") == ["a.tsv", "b.tsv", "sub/c.tsv"]
    assert found(f"file://{tmp_path}/?.tsv") == ["a.tsv", "b.tsv"]
    with pytest.raises(DataNotFoundError, check=at(f"file://{tmp_path}/x.tsv")):
        found(f"file://{tmp_path}/x.tsv")


@pytest.mark.parametrize("form", ["delimited", "json_lines"])
def test_files_named_parquet_are_read_as_such(tmp_path, form):
    path = tmp_path / "a.parquet"
    pq.write_table(arrow_table(), path)
    check(mixed(form), path)


def test_files_behind_a_url_read_as_local_ones(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    text = "".join(delimited_line(row) + "\n" for row in ROWS).encode()
    memory.pipe("/in/a.tsv", text)
    memory.pipe("/in/b.tsv.zst", pa.compress(text, "zstd", asbytes=True))
    pq.write_table(arrow_table(), tmp_path / "a.parquet")
    memory.pipe("/table/a.parquet", (tmp_path / "a.parquet").read_bytes())
    first = check(mixed("delimited"), "memory://in").fingerprint()
    check(mixed("parquet"), "memory://table/a.parquet")
    memory.pipe("/in/a.tsv", text + text)
    assert check(mixed("delimited"), "memory://in").fingerprint() != first
    memory.rm("/in", recursive=True)
    memory.rm("/table", recursive=True)


def test_fingerprints_change_with_the_files(tmp_path):
    spec = SourceSpec(format="delimited", columns=(SourceColumn(name="n", type="integer"),))
    paths = [write_lines(tmp_path / name, ["1"]) for name in "ab"]
    first = open_source(spec, paths).fingerprint()
    assert open_source(spec, paths).fingerprint() == first
    assert open_source(spec, paths[::-1]).fingerprint() != first
    write_lines(paths[1], ["1", "2"])
    assert open_source(spec, paths).fingerprint() != first


REFUSED = {
    "x": (None, DataNotFoundError, "/x"),
    "*.x": (None, DataNotFoundError, "/*.x"),
    "empty": ([], FormatError, "/empty"),
    "ends": (["", ""], FormatError, "/ends"),
    "header": (["n"], FormatError, "/header"),
    "other": (["m,nn", "1,2"], ConfigError, "/other"),
    "blank": (["", "n", "1"], FormatError, "/blank: line 1"),
    "long": ([b"m" * (MAX_LINE_BYTES + 1) + b"\n"], FormatError, "/long: line 1"),
    "many": ([",".join(["m"] * 1000), "1"], ConfigError, "/many"),
    "twice": (["n,n", "1,2"], FormatError, "/twice"),
    "latin": ([b"\xe9\n", "1"], FormatError, "/latin: line 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_are_rejected(tmp_path, case):
    lines, error, where = REFUSED[case]
    if lines is not None:
        write_lines(tmp_path / case, lines)
    columns = (SourceColumn(name="n", type="integer"),)
    spec = SourceSpec(format="delimited", columns=columns, delimiter=",", header=case != "ends")
    with pytest.raises(error, check=at(f"{tmp_path}{where}")):
        rows_of(open_source(spec, [tmp_path / case]))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_what_may_not_be_read_is_rejected(tmp_path):
    spec = mixed("delimited")
    (tmp_path / "d" / "inner").mkdir(parents=True)
    for path in (write_lines(tmp_path / "d" / "a", ["1"]), tmp_path / "d" / "inner"):
        path.chmod(0)
        with pytest.raises(FormatError, check=at(path, "Permission denied")):
            rows_of(open_source(spec, [tmp_path / "d"]))
        path.chmod(0o700)


def test_wrong_arguments_are_rejected(tmp_path):
    spec = mixed("delimited")
    with pytest.raises(ConfigError, check=at("sources")):
        open_source(spec, [])
    with pytest.raises(ConfigError, check=at("policy")):
        open_source(spec, [write_lines(tmp_path / "a", ["1"])], "ignore")
    (tmp_path / "d").mkdir()
    with pytest.raises(FormatError, check=at(f"{tmp_path}/d")):
        open_source(spec, [tmp_path / "d"])


@pytest.mark.parametrize("pack", PACKERS)
def test_a_truncated_file_is_rejected(tmp_path, pack):
    text = "".join(f"{number * 7919}\n" for number in range(5000)).encode()
    packed = pack(text)
    (tmp_path / "a").write_bytes(packed[: len(packed) // 2])
    spec = SourceSpec(format="delimited", columns=(SourceColumn(name="n", type="integer"),))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/a")):
        rows_of(open_source(spec, [tmp_path / "a"]))


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_damaged_and_changing_arrow_files_are_rejected(tmp_path, file_format):
    def write(table, name):
        if file_format == "parquet":
            pq.write_table(table, tmp_path / name)
        else:
            feather.write_feather(table, tmp_path / name)
        return tmp_path / name

    codes = SourceSpec(format=file_format, columns=(SourceColumn(name="n", type="hex32"),))
    spec = SourceSpec(format=file_format, columns=(SourceColumn(name="n", type="number"),))
    good = write(pa.table({"n": [1, 2]}), "good")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/other, column 'n'")):
        rows_of(open_source(codes, [good, write(pa.table({"n": ["a"]}), "other")]))
    assert rows_of(open_source(spec, [good, write(pa.table({"n": [1.5, None]}), "floats")]))[1]["n"] == [
        1,
        2,
        1.5,
        None,
    ]
    with pytest.raises(FormatError, check=at(f"{tmp_path}/text, column 'n'")):
        rows_of(open_source(spec, [write(pa.table({"n": ["a"]}), "text")]))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/lists, column 'n'")):
        rows_of(open_source(spec, [write(pa.table({"n": [[1]]}), "lists")]))
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/named")):
        rows_of(open_source(spec, [write(pa.table({"m": [1]}), "named")]))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/none")):
        rows_of(open_source(spec, [write(pa.table({"n": np.array([], np.int64)}), "none")]))
    cut = tmp_path / "cut"
    cut.write_bytes(good.read_bytes()[:-9])
    with pytest.raises(FormatError, check=at(cut)):
        rows_of(open_source(spec, [cut]))


@pytest.mark.parametrize("source_format", ["delimited", "json_lines", "parquet"])
def test_the_lowest_integer_is_missing(tmp_path, source_format):
    """Finding N8: it stands for a missing value on every path."""
    columns = (SourceColumn(name="n", type="integer"), SourceColumn(name="x", type="number"))
    table = pa.table({"n": [-(2**63), 1 - 2**63], "x": [-(2.0**63), 1.0]})
    path = tmp_path / "rows"
    if source_format == "parquet":
        pq.write_table(table, path)
    elif source_format == "delimited":
        path.write_text("".join(f"{row['n']}\t{row['x']}\n" for row in table.to_pylist()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    source = open_source(SourceSpec(format=source_format, columns=columns), [path])
    assert rows_of(source)[1] == {"n": [None, 1 - 2**63], "x": [-(2.0**63), 1.0]}
