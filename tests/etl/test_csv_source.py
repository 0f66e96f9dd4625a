"""CSV files come as trimmed text; every fault names its file and row."""

import gzip
from pathlib import Path

import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl import csv_source
from terarec.etl.csv_options import CsvLayout
from terarec.etl.csv_source import read_csv


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows_of(path, columns, **layout):
    blocks = list(read_csv(path, CsvLayout(**layout), columns))
    return {name: [value for block in blocks for value in block.columns[name].to_pylist()] for name in columns}


def test_fields_are_trimmed_and_missing_ones_null(tmp_path):
    path = write(tmp_path / "a.csv", 'name , n\r\n x ,1\r\n"a, b", ? \r\n,3\r\n')
    assert rows_of(path, ["name", "n"]) == {"name": ["x", "a, b", None], "n": ["1", None, "3"]}


def test_other_missing_markers_and_delimiters(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\nNA\t?\n\t1\n")
    assert rows_of(path, ["a", "b"], delimiter="\t", missing=("NA",)) == {"a": [None, ""], "b": ["?", "1"]}


def test_names_for_a_file_without_header(tmp_path):
    assert rows_of(write(tmp_path / "a.csv", "1,2\n3,4\n"), ["b"], names=("a", "b")) == {"b": ["2", "4"]}


def test_compressed_files_read_alike(tmp_path):
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"a,b\n1,2\n"))
    assert rows_of(path, ["b", "a"]) == {"b": ["2"], "a": ["1"]}


def test_blocks_count_rows_through(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", 64)
    path = write(tmp_path / "a.csv", "a\n" + "".join(f"{row}\n" for row in range(200)))
    blocks = list(read_csv(path, CsvLayout(), ["a"]))
    assert len(blocks) > 3
    assert [block.first_row for block in blocks[1:]] == [b.first_row + b.num_rows for b in blocks[:-1]]
    assert [int(v) for block in blocks for v in block.columns["a"].to_pylist()] == list(range(200))
    assert blocks[1].rows(1, 3).first_row == blocks[1].first_row + 1


@pytest.mark.parametrize("block_bytes", [48, 1 << 20])
@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_a_row_of_another_width_is_named(tmp_path, monkeypatch, block_bytes, names):
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", block_bytes)
    header = "" if names else "a,b\n"
    path = write(tmp_path / "a.csv", header + "1,2\n" * 36 + "3\n" + "1,2\n" * 40)
    with pytest.raises(FormatError, match=r"a\.csv: row 37: got 1 field, expected 2 separated by ','"):
        rows_of(path, ["a"], names=names)


def test_a_field_of_another_kind_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "a,b\n1,2\n?,nan\n3,x9\n4,1e400\n5,6.5\n")
    (block,) = read_csv(path, CsvLayout(), ["a", "b"])
    assert block.numbers("a").to_pylist() == [1.0, None, 3.0, 4.0, 5.0]
    assert block.integers("a").to_pylist() == [1, None, 3, 4, 5]
    with pytest.raises(FormatError, match=r"a\.csv: row 3, column 'b': got 'x9', expected a finite number"):
        block.numbers("b")
    with pytest.raises(FormatError, match=r"row 4, column 'b': got '1e400', expected a finite number"):
        block.rows(3, 5).numbers("b")
    with pytest.raises(FormatError, match=r"row 5, column 'b': got '6.5', expected an integer of 64 bits"):
        block.rows(4, 5).integers("b")


def test_written_nan_is_missing(tmp_path):
    (block,) = read_csv(write(tmp_path / "a.csv", "a\n1\nnan\n"), CsvLayout(), ["a"])
    assert block.numbers("a").to_pylist() == [1.0, None]


def test_a_column_that_is_not_there_is_named_with_its_neighbour(tmp_path):
    path = write(tmp_path / "a.csv", "age,income\n1,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv: has no column 'incme' \(did you mean 'income'\?\), expected age"):
        rows_of(path, ["incme"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Empty CSV file"),
        (b"a,a\n1,2\n", "names column 'a' 2 times"),
        (b"a,b\n\xff\xfe,x\n", "UTF8"),
        (b"a\n" + b"x" * 200 + b"\n", "cannot be read as CSV"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", 64)
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(FormatError, match=words) as raised:
        rows_of(path, ["a"])
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_cut_gzip_file_is_refused(tmp_path):
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-6])
    with pytest.raises(FormatError, match="cannot be read as CSV"):
        rows_of(path, ["a"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"none\.csv: no such file"):
        rows_of(tmp_path / "none.csv", ["a"])


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\u00e9"])
def test_delimiters_that_cannot_be_are_refused(delimiter):
    with pytest.raises(ConfigError, match=r"CsvLayout\.delimiter"):
        CsvLayout(delimiter=delimiter)


def test_a_header_of_one_column_hints_at_the_delimiter(tmp_path):
    path = write(tmp_path / "t.csv", "y;a\n1;2\n")
    expected = r"t\.csv: has no column 'y'; its header is the single column 'y;a', .* separated by ',' \(--delimiter\)"
    with pytest.raises(ConfigError, match=expected):
        rows_of(path, ["y"])
