"""Bad input is counted, told, skipped and made missing as by the local engine."""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl.source import open_source
from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.spec import BAD_INPUT_POLICIES, SourceColumn, SourceSpec
from tests.etl.source.samples import rows_of

COLUMNS = (
    SourceColumn(name="word", type="text"),
    SourceColumn(name="count", type="integer"),
    SourceColumn(name="price", type="number"),
    SourceColumn(name="code", type="hex32"),
    SourceColumn(name="time", type="time", format="%Y-%m-%d %H:%M:%S"),
    SourceColumn(name="day", type="time", format="%d%m%Y"),
    SourceColumn(name="sizes", type="integer", separator=" "),
    SourceColumn(name="tags", type="text", separator="|"),
)
CELLS: dict[str, list[bytes]] = {
    "word": [b"a", b"b", b"", b" c d ", b"?", b"\xff", b"caf\xc3\xa9", b"\xe2\x82"],
    "count": [b"1", b"-20", b"", b"?", b"x", b"1.5", b"+1", b"9223372036854775808", b"-", b"12.0", b"7."],
    "price": [b"1", b".5", b"1e3", b"", b"NaN", b"inf", b"-Infinity", b"1e999", b"1e", b"0x1", b"1_0", b"1e-999"],
    "code": [b"ff", b"0", b"", b"g", b"123456789", b"-1", b" f"],
    "time": [
        *(b"2024-02-29 23:59:59", b"2024-1-2 3:4:5", b"2024-01-02  03:04:05", b"2023-02-29 00:00:00", b"", b"now"),
        *(b"0000-01-01 00:00:00", b"2024-01-01 00:00:60", b"2024-01-01 24:00:00", b"\xff"),
    ],
    "day": [b"01022024", b"1122024", b"1322024", b"312024", b"32012024", b""],
    "sizes": [b"1 2", b"", b"1  2", b"1 x", b"3 ?", b"x y"],
    "tags": [b"a|b", b"", b"a||b", b" a | b ", b"a|\xff", b"?|a"],
}
LISTS = {"sizes": " ", "tags": "|"}


def write_lines(path: Path, delimiter: bytes, *, quote: bool) -> None:
    """Good and bad cells at random, under a header that has them in another order, with one column more."""
    choose = random.Random(1)
    names = ["day", "word", "unused", "time", "count", "tags", "price", "code", "sizes"]
    cells = {**CELLS, "unused": [b"u", b""]}

    def cell(name: str) -> bytes:
        text = cells[name][0] if choose.random() < 0.7 else choose.choice(cells[name])
        forms = [b'"%s"', b' "%s" ', b'x"%s"', b'"%s ""q"""', b'"x%s%%s"' % delimiter]
        return choose.choice(forms) % text if quote and choose.random() < 0.1 else text

    lines = [delimiter.join(name.encode() for name in names)]
    for _ in range(300):
        line = [cell(name) for name in names]
        if choose.random() < 0.1:
            line = choose.choice([line[:-1], line[:1], [*line, b""], [*line, b"1", b"2"]])
        lines.append(delimiter.join(line))
    lines[150:150] = [b"", b"a" + delimiter + b"x" * MAX_LINE_BYTES]
    path.write_bytes(b"\r\n".join(lines))


def write_objects(path: Path) -> None:
    """Good and bad objects at random."""
    choose = random.Random(2)
    good = {"word": "a", "count": 1, "price": 0.5, "code": "ff", "time": "2024-01-02 03:04:05", "day": "01022024"}
    bad = {
        "word": [5, "?", "", True, ["a"], {"a": 1}],
        "count": [1.5, True, 2**63, 2**63 - 1, "x", "1", "?", None, 3.0, 2.0**53, 1e3, -7.0],
        "price": [True, "x", "0.5", None, 7, 10**400],
        "code": ["g", "123456789", 12, None],
        "time": ["2023-02-29 00:00:00", "", 0],
        "sizes": [[1, None], [1, 1.5], "1 2", [], None, ["1"], 5, [True], {"a": 1}],
        "tags": [["a", "?"], "a|b", "[a]", [None], ["a", 5], 7],
    }
    lines = []
    for _ in range(120):
        chosen = [name for name in bad if choose.random() < 0.15]
        lines.append(json.dumps({**good, **{name: choose.choice(bad[name]) for name in chosen}}).encode())
    lines[50:50] = [b"[1]", b'{"count": 1', b'{"count": NaN}', b'{"word": "\xff"}', b'{"price": 1e999}', b"x"]
    lines[70:70] = [b'{"word": "\\ud800"}', b'{"word": "\\ud83d\\ude00"}', b'{"word": "\\\\ud800"}', b'{"count": 1e3}']
    lines[90:90] = [b'{"word": "%s"}' % (b"x" * MAX_LINE_BYTES)]
    path.write_bytes(b"\n".join(lines))


def write_table(path: Path) -> None:
    """Good and bad values at random."""
    choose = random.Random(3)

    def some(*values: Any) -> list[Any]:
        return [values[0] if choose.random() < 0.6 else choose.choice(values) for _ in range(90)]

    table = pa.table(
        {
            "word": some("a", None, ""),
            "count": some(2**63 - 1, None, -5),
            "price": some(1.0, float("inf"), float("nan"), None),
            "code": some("ff", "g", None, "123456789"),
            "time": some("2024-01-02 03:04:05", "now", None),
            "day": some("01022024", "x"),
            "sizes": some("1 2", "1 x", None, ""),
            "tags": pa.array(some(["a"], [None, "?"], None), pa.list_(pa.string())),
        }
    )
    pq.write_table(table, path, row_group_size=20)


def source_of(name: str, path: Path) -> SourceSpec:
    """A file of bad input in this form, and how it is read."""
    if name in ("plain", "quoted"):
        delimiter = "::" if name == "quoted" else ","
        write_lines(path, delimiter.encode(), quote=name == "quoted")
        settings = {"delimiter": delimiter, "header": True, "quote": name == "quoted", "trim": name == "quoted"}
        return SourceSpec(format="delimited", columns=COLUMNS, missing=("", "?"), **settings)  # type: ignore[arg-type]
    (write_objects if name == "json_lines" else write_table)(path)
    return SourceSpec(format=name, columns=COLUMNS, missing=("", "?"))  # type: ignore[arg-type]


QUICK = [("quoted", "skip"), ("json_lines", "missing"), ("parquet", "skip")]
CASES = [(name, policy) for name in ("plain", "quoted", "json_lines", "parquet") for policy in ("missing", "skip")]


@pytest.mark.parametrize(
    ("name", "policy"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_bad_input_is_the_same(spark: Any, tmp_path: Path, name: str, policy: Any) -> None:
    spec = source_of(name, tmp_path / "raw")
    spark = spark.newSession()
    spark.conf.set("spark.sql.files.maxPartitionBytes", 1 << 18)
    assert len(check_same(spark, spec, [tmp_path / "raw"], policy)) >= 3


def check_same(spark: Any, spec: SourceSpec, paths: list[Path], policy: Any) -> Any:
    """Read files by both engines; returns how often each kind of fault occurred."""
    from terarec.etl.spark.bad_input import bad_input
    from terarec.etl.spark.expressions import ROW
    from terarec.etl.spark.reading import read_rows

    local = open_source(spec, paths, policy, threads=1)
    rows, columns = rows_of(local)
    typed = read_rows(spark, spec, list(map(str, paths)), policy)
    found = typed.frame.toArrow().sort_by(ROW)
    assert found.column(ROW).to_pylist() == rows
    for column in columns:
        assert found.column(column).to_pylist() == columns[column], column
    report = local.bad_input
    told = bad_input(policy, [typed.faults])
    assert told["counts"] == report.counts
    assert told["first"] == list(map(str, report.first))
    missing = {column: (values.count(None), len(values)) for column, values in columns.items()}
    of_lists = {column: missing[column] for column in LISTS if column in missing}
    assert {**typed.missing(), **of_lists} == missing
    return report.counts


def test_the_first_fault_is_raised(spark: Any, tmp_path: Path) -> None:
    from terarec.etl.spark.bad_input import bad_input
    from terarec.etl.spark.reading import read_rows

    path = tmp_path / "raw"
    spec = source_of("quoted", path)
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:40]))
    typed = read_rows(spark, spec, [str(path)], "raise")
    typed.frame.collect()
    with pytest.raises(FormatError) as ours:
        bad_input("raise", [typed.faults])
    with pytest.raises(FormatError) as theirs:
        rows_of(open_source(spec, [path], "raise", threads=1))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
def test_text_between_quotes_never_becomes_a_row(spark: Any, tmp_path: Path, policy: Any) -> None:
    """A10: Spark cuts files into lines, so a quote that hides a line end ends the run under every policy."""
    from terarec.etl.spark.bad_input import bad_input
    from terarec.etl.spark.reading import read_rows

    path = tmp_path / "raw.csv"
    columns = (SourceColumn(name="label", type="integer"), SourceColumn(name="x", type="integer"))
    spec = SourceSpec(format="delimited", columns=columns, delimiter=",", header=True, quote=True)
    for row in ('0,1,"a\n1,5,fake\nb"', '0,1,"a"b\n1,5,fake\nb"', 'x,1,"a\n1,5,fake\nb"', '0,1,2,"a\n1,5,fake\nb"'):
        path.write_text(f"label,x,note\n0,1,\n{row}\n0,2,c\n")
        typed = read_rows(spark, spec, [str(path)], policy)
        typed.frame.collect()
        with pytest.raises(FormatError, match=r"raw.csv: line 3"):
            bad_input(policy, [typed.faults])
    path.write_text('label,x,"no\nte"\n0,1,c\n')
    with pytest.raises(FormatError, match=r"raw.csv: line 1: .*closing quote"):
        read_rows(spark, spec, [str(path)], policy)


@pytest.mark.parametrize("name", ["delimited", "json_lines", "parquet"])
def test_times_and_floats_are_judged_alike(spark: Any, tmp_path: Path, name: str) -> None:
    """A15, D12: milliseconds are no seconds, floats may be integers; text is cleaned (A11)."""
    columns = (
        SourceColumn(name="at", type="time"),
        SourceColumn(name="id", type="integer"),
        SourceColumn(name="word", type="text"),
    )
    spec = SourceSpec(
        format=name,  # type: ignore[arg-type]
        columns=columns,
        delimiter=",",
        quote=True,
        trim=True,
        missing=("", "?"),
    )
    times, ids = [5, 1_700_000_000_000, None, -(10**12)], [1.0, 2.5, None, 2.0**53 + 2]
    words = [" a ", " ? ", "\t", "b"]
    path = tmp_path / "raw"
    if name == "parquet":
        pq.write_table(pa.table({"at": times, "id": ids, "word": words}), path)
    elif name == "json_lines":
        rows = zip(times, ids, words, strict=True)
        path.write_text("".join(json.dumps({"at": at, "id": i, "word": word}) + "\n" for at, i, word in rows))
    else:
        path.write_text('5,1.0," a "\n1700000000000,2.5," ? "\n,,"\t"\n-1000000000000,x,b\n')
    for policy in ("skip", "missing"):
        check_same(spark, spec, [path], policy)


def test_files_that_spark_does_not_read_are_refused(spark: Any, tmp_path: Path) -> None:
    """C4, D13: carriage returns alone, xz and zip."""
    from terarec.etl.spark.reading import read_rows

    spec = SourceSpec(format="delimited", columns=COLUMNS[:1])
    (tmp_path / "mac").write_bytes(b"a\rb\r")
    with pytest.raises(FormatError, match="carriage returns"):
        read_rows(spark, spec, [str(tmp_path / "mac")], "skip")
    (tmp_path / "packed").write_bytes(lzma.compress(b"a\n"))
    with pytest.raises(FormatError, match="is a xz file"):
        read_rows(spark, spec, [str(tmp_path / "packed")], "skip")


def test_files_without_rows_and_of_other_columns_are_refused(spark: Any, tmp_path: Path) -> None:
    from terarec.etl.spark.reading import read_rows

    spec = dataclasses.replace(source_of("plain", tmp_path / "raw"), columns=COLUMNS[:1])
    (tmp_path / "empty").write_text("word\n")
    with pytest.raises(FormatError, match=r"empty: the file is empty, expected at least one row"):
        read_rows(spark, spec, [str(tmp_path / "empty")], "raise")
    (tmp_path / "other").write_text("words,more\na,b\n")
    with pytest.raises(
        ConfigError, match=r"other: has no column 'word' \(did you mean 'words'\?\), expected words, more"
    ):
        read_rows(spark, spec, [str(tmp_path / "raw"), str(tmp_path / "other")], "raise")


@pytest.mark.parametrize(
    ("values", "error", "problem"),
    [
        ({"words": ["a"]}, ConfigError, "second: has no column 'word' .did you mean 'words'"),
        ({"word": [1]}, FormatError, "second: column 'word' is int64, expected text"),
        ({"word": [["a"]]}, FormatError, "second: column 'word'"),
    ],
)
def test_parquet_files_of_other_columns_are_refused(
    spark: Any, tmp_path: Path, values: Any, error: type[Exception], problem: str
) -> None:
    from terarec.etl.spark.reading import read_rows

    spec = SourceSpec(format="parquet", columns=COLUMNS[:1])
    pq.write_table(pa.table({"word": ["a"]}), tmp_path / "first")
    pq.write_table(pa.table(values), tmp_path / "second")
    with pytest.raises(error, match=problem):
        read_rows(spark, spec, [str(tmp_path / "first"), str(tmp_path / "second")], "raise")


def test_each_file_may_have_its_columns_in_another_order(spark: Any, tmp_path: Path) -> None:
    spec = SourceSpec(format="delimited", columns=COLUMNS[:3], delimiter=",", header=True)
    files = {
        "a": "word,count,price\na,1,x\n",
        "b": "more,price,word,count\n,2,b,y,\n,0.5,b\n",
        "c": "price,word,count\n1,c,3\n",
    }
    paths = [tmp_path / name for name in files]
    for path in paths:
        path.write_text(files[path.name])
    check_same(spark, spec, paths, "missing")
