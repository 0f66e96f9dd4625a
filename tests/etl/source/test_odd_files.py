# SPDX-License-Identifier: Apache-2.0
"""C3, C4, D12, D13: unusual files are read right, or rejected in one line under every policy."""

import bz2
import lzma
import os
import zipfile
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from terarec.apps.sample import read_sample
from terarec.errors import ConfigError, FormatError
from terarec.etl.source.source import open_source
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.preparation import BAD_INPUT_POLICIES
from tests.errors import at
from tests.etl.source.samples import rows_of

TEXT = b"n,x\n" + b"".join(b"%d,%d.5\n" % (row, row) for row in range(2000))


def spec(file_format="delimited", *, header=True, n="integer", x="number"):
    columns = (SourceColumn(name="n", type=n), SourceColumn(name="x", type=x))
    return SourceSpec(format=file_format, columns=columns, delimiter=",", header=header, quote=True)


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("kind", ["xz", "zip", "bz2"])
def test_compressed_files_are_known_by_their_content(tmp_path, kind):
    """D13."""
    path = tmp_path / "log"
    if kind == "zip":
        zipped(path, {"folder/": b"", "folder/log.csv": TEXT})
    else:
        path.write_bytes((lzma if kind == "xz" else bz2).compress(TEXT))
    source = open_source(spec(), [path], threads=2)
    rows, columns = rows_of(source)
    assert source.count_rows() == [2000]
    assert rows == columns["n"] == list(range(2000))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError, check=at(path, f"not a whole {kind} file")):
        rows_of(open_source(spec(), [path]))


def test_a_zip_file_holds_one_file(tmp_path):
    """D13."""
    path = zipped(tmp_path / "log.zip", {"a": TEXT, "b": TEXT})
    with pytest.raises(FormatError, check=at(path, "holds 2 files")):
        rows_of(open_source(spec(), [path]))


def test_pipes_and_devices_are_rejected(tmp_path):
    """D13: the file would be empty when it is read again."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "-", "/dev/null"):
        with pytest.raises(ConfigError, check=at("sources" if path == "-" else path, "read several times")):
            open_source(spec(), [path])


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
@pytest.mark.parametrize(("file_format", "header"), [("delimited", True), ("delimited", False), ("json_lines", False)])
def test_carriage_returns_alone_are_rejected(tmp_path, policy, file_format, header):
    """C4: no policy may pass over a file that is one line."""
    path = tmp_path / "log"
    path.write_bytes(
        b'{"n": 1, "x": 2}\r' * 3 if file_format == "json_lines" else b"n,x\r1,2\r3,4\r"[0 if header else 4 :]
    )
    with pytest.raises(FormatError, check=at(path, "carriage returns alone")):
        rows_of(open_source(spec(file_format, header=header), [path], policy))


def test_large_integers_of_parquet_are_rounded_as_numbers(tmp_path):
    """C3: text is rounded to the nearest float64, too."""
    values = [2**53 + 1, -(2**63), 2**63 - 1, None]
    pq.write_table(pa.table({"n": [1] * 4, "x": pa.array(values, pa.int64())}), tmp_path / "log")
    _, columns = rows_of(open_source(spec("parquet"), [tmp_path / "log"]))
    assert columns["x"] == [None if value is None else float(value) for value in values]
    pq.write_table(pa.table({"n": [1], "x": pa.array([2**64 - 1], pa.uint64())}), tmp_path / "log")
    assert rows_of(open_source(spec("parquet"), [tmp_path / "log"]))[1]["x"] == [float(2**64 - 1)]


@pytest.mark.parametrize("policy", ["skip", "missing"])
def test_floats_that_are_integers_are_ids(tmp_path, policy):
    """D12: pandas writes 12.0 where other ids of the column are missing, and floats into Parquet."""
    csv = tmp_path / "log.csv"
    csv.write_text("n,x\n12.0,1\n-3.00,1\n,1\n1.5,1\n9223372036854775808.0,1\n+3.5,1\n3.,1\n")
    expected = [12, -3, None] + [None] * 4 * (policy == "missing")
    source = open_source(spec(), [csv], policy)
    assert rows_of(source)[1]["n"] == expected
    assert source.bad_input.counts == {"integer": 3, "integer_range": 1}
    values = [12.0, -3.0, None, 1.5, 2.0**60, float("inf"), -0.5]
    pq.write_table(pa.table({"n": pa.array(values, pa.float64()), "x": [1.0] * 7}), tmp_path / "log.parquet")
    source = open_source(spec("parquet"), [tmp_path / "log.parquet"], policy)
    assert rows_of(source)[1]["n"] == expected
    assert source.bad_input.counts == {"integer": 4}


@pytest.mark.parametrize(("kind", "bits"), [(pa.float16(), 11), (pa.float32(), 24), (pa.float64(), 53)])
@pytest.mark.parametrize("is_list", [False, True])
def test_floats_beyond_their_precision_are_no_ids(tmp_path, kind, bits, is_list):
    """Finding N2: seven ids above 2^24 became one as float32."""
    values = pa.array([2**bits - 1, -(2**bits) + 1, 2**bits, None], pa.float64()).cast(kind)
    lists = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), values)
    pq.write_table(pa.table({"n": lists if is_list else values}), tmp_path / "log.parquet")
    columns = (SourceColumn(name="n", type="integer", separator="|" if is_list else None),)
    source = open_source(SourceSpec(format="parquet", columns=columns), [tmp_path / "log.parquet"], "missing")
    good = [2**bits - 1, 1 - 2**bits]
    assert rows_of(source)[1]["n"] == ([[value] for value in good] + [[], [None]] if is_list else [*good, None, None])
    assert source.bad_input.counts == {"integer": 1}
    assert f"below 2^{bits}" in source.bad_input.first[0].expected


@pytest.mark.parametrize(
    "values",
    [pa.array([True, False]), pa.array([b"a", b"b"]), pa.array([1, 2], pa.time32("ms"))],
    ids=["bool", "binary", "time"],
)
@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
def test_columns_of_other_types_are_rejected(tmp_path, values, policy):
    """D12: with the column, its type and what is expected."""
    pq.write_table(pa.table({"n": [1, 2], "x": values}), tmp_path / "log")
    for kind in ("number", "integer", "text", "hex32"):
        with pytest.raises(
            FormatError, check=at(f"{tmp_path}/log, column 'x'", f"type is {values.type}, expected {kind}")
        ):
            rows_of(open_source(spec("parquet", x=kind), [tmp_path / "log"], policy))


MISSING = [
    *(pa.nulls(2, kind) for kind in (pa.null(), pa.bool_(), pa.float32(), pa.string(), pa.timestamp("ns"), pa.int8())),
    pa.array([float("nan"), None]),
]


@pytest.mark.parametrize("values", MISSING, ids=[str(values.type) for values in MISSING])
@pytest.mark.parametrize("kind", ["text", "integer", "number", "hex32", "time"])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_column_that_is_missing_in_all_rows_has_any_type(tmp_path, values, kind, file_format):
    """Finding N6: pandas writes a day without values as nulls, or as NaN."""
    good = {"text": ["a"], "hex32": ["a"], "time": pa.array([1], pa.timestamp("s"))}.get(kind, pa.array([1]))
    write = pq.write_table if file_format == "parquet" else partial(feather.write_feather, compression="uncompressed")
    for name, column in (("0", values), ("1", good), ("2", values)):
        write(pa.table({"n": [1] * len(column), "x": column}), str(tmp_path / name))
    source = open_source(spec(file_format, x=kind), [tmp_path / name for name in "012"])
    expected = {"text": "a", "hex32": 10}.get(kind, 1)
    assert rows_of(source)[1]["x"] == [None, None, expected, None, None]


def test_a_dictionary_of_nulls_is_missing(tmp_path):
    """Finding N6."""
    values = pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int32()), pa.nulls(1))
    feather.write_feather(pa.table({"n": [1, 2], "x": values}), tmp_path / "log")
    for kind in ("text", "integer", "number", "hex32", "time"):
        assert rows_of(open_source(spec("arrow", x=kind), [tmp_path / "log"]))[1]["x"] == [None, None]


@pytest.mark.parametrize(
    ("values", "lists"),
    [
        (pa.nulls(2), [[], []]),
        (pa.array([float("nan"), None]), [[], []]),
        (pa.array([[None, None], None], pa.list_(pa.null())), [[None, None], []]),
        (pa.array([[float("nan")], []]), [[None], []]),
        (pa.nulls(2, pa.list_(pa.bool_())), [[], []]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["text", "integer", "number"])
def test_lists_that_are_missing_in_all_rows_have_any_type(tmp_path, values, lists, kind):
    """Finding N6."""
    pq.write_table(pa.table({"x": values}), tmp_path / "log")
    columns = (SourceColumn(name="x", type=kind, separator="|"),)
    source = open_source(SourceSpec(format="parquet", columns=columns), [tmp_path / "log"])
    assert rows_of(source)[1]["x"] == lists


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
def test_integers_beyond_64_bits_are_reported(tmp_path, policy):
    """D12: the message says which integers are taken."""
    pq.write_table(pa.table({"n": pa.array([1, 2**63], pa.uint64()), "x": [1.0, 1.0]}), tmp_path / "log")
    source = open_source(spec("parquet"), [tmp_path / "log"], policy)
    if policy == "raise":
        with pytest.raises(FormatError, check=at(f"{tmp_path}/log: row 2, column 'n'")):
            rows_of(source)
    else:
        rows_of(source)
        assert source.bad_input.counts == {"integer_range": 1}


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
@pytest.mark.parametrize(
    "line", ['{"n": 1, "z": ' + "[" * 10**5 + "]" * 10**5 + "}", '{"n": ' + "[" * 1000, '{"n": "\\ud800"}']
)
def test_deeply_nested_and_truncated_text_is_not_an_object(tmp_path, policy, line):
    """S3, C2: JSON that is nested to any depth, and half a surrogate pair."""
    path = tmp_path / "log"
    path.write_text(f'{{"n": 1, "x": 1}}\n{line}\n')
    source = open_source(spec("json_lines"), [path], policy)
    if policy == "raise":
        with pytest.raises(FormatError, check=at(f"{path}: line 2")):
            rows_of(source)
    else:
        rows_of(source)
        assert source.bad_input.counts == {"json": 1}


def as_text(values):
    """Any bytes as the type of text, as writers that do not check them leave it."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("content", [b"abcd", b"ab\xff\xff"])
@pytest.mark.parametrize("is_list", [False, True])
def test_places_outside_a_damaged_file_are_not_read(tmp_path, content, is_list):
    """Bytes outside the file became values, or ended the process."""
    places = pa.py_buffer(np.array([0, 2**30, 4], np.int32))
    array = pa.Array.from_buffers(pa.string(), 2, [None, places, pa.py_buffer(content)])
    if is_list:
        array = pa.Array.from_buffers(pa.list_(pa.int8()), 2, [None, places], children=[pa.array([1] * 4, pa.int8())])
    feather.write_feather(pa.table({"x": array}), str(tmp_path / "log"), compression="uncompressed")
    column = SourceColumn(name="x", type="integer" if is_list else "text", separator="|" if is_list else None)
    with pytest.raises(FormatError, check=at(tmp_path / "log", "offset")):
        rows_of(open_source(SourceSpec(format="arrow", columns=(column,)), [tmp_path / "log"], "missing"))


# Of a Parquet file Arrow reads no dictionary with such a text.
WAYS = [(kind, form) for kind in ("text", "hex32", "separated", "lists") for form in ("parquet", "arrow")]


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
@pytest.mark.parametrize(("kind", "file_format"), [*WAYS, ("dictionary", "arrow")])
def test_text_that_is_not_utf_8_is_bad_input(tmp_path, policy, kind, file_format):
    """It went into vocabularies and shards that nothing could read."""
    texts = as_text([b"1", b"2\xff ", None, b"3"])
    values, good = texts, [1, None, None, 3] if kind == "hex32" else ["1", None, None, "3"]
    if kind == "lists":
        values, good = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), texts), [["1"], [], ["3"]]
    elif kind == "separated":
        good = [["1"], [], [], ["3"]]
    elif kind == "dictionary":
        values = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2], pa.int8()), texts.drop_null())
    write = pq.write_table if file_format == "parquet" else partial(feather.write_feather, compression="uncompressed")
    write(pa.table({"x": values}), str(tmp_path / "log"))
    separator = "|" if kind in ("lists", "separated") else None
    columns = (SourceColumn(name="x", type="hex32" if kind == "hex32" else "text", separator=separator),)
    source = open_source(
        SourceSpec(format=file_format, columns=columns, trim=file_format == "arrow"), [tmp_path / "log"], policy
    )
    if policy == "raise":
        with pytest.raises(FormatError, check=at(f"{tmp_path}/log: row 2, column 'x'", "xff")):
            rows_of(source)
        return
    if policy == "skip":
        del good[1]
    assert rows_of(source)[1]["x"] == good
    assert source.bad_input.counts == {"hex" if kind == "hex32" else "utf8": 1}


def test_the_sample_of_a_draft_has_columns_of_nulls(tmp_path):
    """Finding N6."""
    table = pa.table(
        {"y": [0, 1], "none": pa.nulls(2), "lists": pa.nulls(2, pa.list_(pa.null())), "nan": [float("nan")] * 2}
    )
    pq.write_table(table, tmp_path / "log")
    sample = read_sample([tmp_path / "log"])
    assert {column.name: column.present for column in sample.columns} == {"y": 2, "none": 0, "lists": 0, "nan": 0}
    assert not sample.unread


def test_dates_with_a_time_of_day_are_read(tmp_path):
    """Arrow calls such a column invalid, though not damaged."""
    times = pa.array([1_577_880_000_000, None], pa.int64()).view(pa.date64())
    feather.write_feather(pa.table({"t": times}), str(tmp_path / "a.arrow"), compression="uncompressed")
    source = open_source(
        SourceSpec(format="arrow", columns=(SourceColumn(name="t", type="time"),)), [tmp_path / "a.arrow"], "raise"
    )
    _, columns = rows_of(source)
    assert columns["t"][0] == 1_577_880_000
