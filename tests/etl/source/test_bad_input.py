# SPDX-License-Identifier: Apache-2.0
"""Bad input ends the reading, loses its row or its field, and is reported with its file and line."""

import dataclasses
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import FormatError
from terarec.etl.source import source as source_module
from terarec.etl.source.blocks import MAX_LINE_BYTES
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.source import open_source
from terarec.spec import SourceColumn, SourceSpec
from tests.etl.source.samples import rows_of, write_lines
from tests.params import examples

SPEC = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="n", type="integer"),
        SourceColumn(name="x", type="number"),
        SourceColumn(name="t", type="time", format="%Y%m%d"),
        SourceColumn(name="w", type="text"),
    ),
    delimiter=",",
)
GOOD = "1,0.5,19700102,a"
BAD_LINES = {
    "line 3, column 'n': got '1.5', expected an integer": "1.5,0.5,19700102,a",
    "line 3, column 'n': got '9223372036854775808', expected a signed integer of 64 bits": (
        "9223372036854775808,1,19700102,a"
    ),
    "line 3, column 'x': got 'x', expected a number": "1,x,19700102,a",
    "line 3, column 'x': got '-inf', expected a finite number": "1,-inf,19700102,a",
    "line 3, column 't': got '19700230', expected a time like '%Y%m%d'": "1,1,19700230,a",
    "line 3, column 'w': got '\\\\xff', expected UTF-8 text": b"1,1,19700102,\xff\n",
    "line 3: found 3 fields, expected 4 separated by the delimiter": "1,1,19700102",
    "line 3: found 5 fields, expected 4 separated by the delimiter": "1,1,19700102,a,",
}


def read(path, policy, spec=SPEC):
    source = open_source(spec, [path], policy, threads=1)
    rows, columns = rows_of(source)
    again = rows_of(source)
    assert again == (rows, columns)
    return rows, columns, source.bad_input


@pytest.mark.parametrize("message", BAD_LINES)
def test_a_bad_line_is_raised_skipped_or_missing(tmp_path, message):
    path = write_lines(tmp_path / "log", [GOOD, "", BAD_LINES[message], GOOD])
    with pytest.raises(FormatError) as caught:
        read(path, "raise")
    assert str(caught.value) == f"{path}: {message}"
    rows, columns, report = read(path, "skip")
    assert (rows, columns["n"], columns["t"]) == ([0, 2], [1, 1], [86400, 86400])
    assert sum(report.counts.values()) == 1
    assert [str(fault) for fault in report.first] == [f"{path}: {message}"]
    rows, columns, report = read(path, "missing")
    assert rows == [0, 1, 2]
    assert sum(report.counts.values()) == 1
    lost = [name for name in columns if columns[name][1] is None]
    expected = [message.split("'")[1]] if "column" in message else ["w"] if "found 3" in message else []
    assert lost == expected


def test_a_line_that_is_too_long_is_one_fault(tmp_path):
    long = "1,1,19700102," + "x" * (3 * MAX_LINE_BYTES)
    path = write_lines(tmp_path / "log", [GOOD, long, GOOD, long])
    rows, columns, report = read(path, "skip")
    assert rows == [0, 2]
    assert report.counts == {"oversized_line": 2}
    assert [fault.number for fault in report.first] == [2, 4]
    rows, columns, report = read(path, "missing")
    assert columns["n"] == [1, None, 1, None]


def test_a_dropped_line_counts_for_one_fault(tmp_path):
    path = write_lines(tmp_path / "log", ["x,y,z,a", GOOD, "1,1,z,a", "1,1"])
    rows, _, report = read(path, "skip")
    assert rows == [1]
    assert report.counts == {"integer": 1, "short_line": 1, "time": 1}
    _, _, report = read(path, "missing")
    assert report.counts == {"integer": 1, "number": 1, "short_line": 1, "time": 2}
    assert [fault.number for fault in report.first] == [1, 1, 1, 3, 4]


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([GOOD, *BAD_LINES.values(), "", "x,y,z,a"]), min_size=1, max_size=30), st.integers(1, 90)
)
def test_faults_do_not_depend_on_blocks_and_threads(tmp_path_factory, lines, block_bytes):
    path = write_lines(tmp_path_factory.mktemp("logs") / "log", [GOOD, *lines])
    with pytest.MonkeyPatch.context() as patch:
        for policy in ("skip", "missing"):
            expected = read(path, policy)
            patch.setattr(source_module, "_READERS", {"delimited": lambda spec: DelimitedReader(spec, block_bytes)})
            source = open_source(SPEC, [path], policy, threads=2)
            assert (*rows_of(source), source.bad_input) == expected
            patch.undo()


JSON_SPEC = SourceSpec(
    format="json_lines",
    columns=(
        SourceColumn(name="n", type="integer"),
        SourceColumn(name="x", type="number"),
        SourceColumn(name="h", type="hex32"),
        SourceColumn(name="w", type="text"),
        SourceColumn(name="l", type="integer", separator=" "),
    ),
)
GOOD_OBJECT = {"n": 1, "x": 0.5, "h": "ff", "w": "a", "l": [1, None]}
BAD_OBJECTS = {
    "line 2, column 'n': got '1.5', expected an integer": {"n": 1.5},
    "line 2, column 'n': got 'true', expected an integer": {"n": True},
    "line 2, column 'n': got '9223372036854775808', expected a signed integer of 64 bits": {"n": 2**63},
    "line 2, column 'x': got '\"1\"', expected a number": {"x": "1"},
    "line 2, column 'h': got 'xyz', expected up to 8 hexadecimal digits, or an integer from 0 to 4294967295": {
        "h": "xyz"
    },
    "line 2, column 'w': got '5', expected text in quotes": {"w": 5},
    "line 2, column 'l': got '[1, 1.5]', expected an integer": {"l": [1, 1.5]},
    "line 2: got '[1]', expected a JSON object in one line": "[1]",
    "line 2: got '{\"n\": 1', expected a JSON object in one line": '{"n": 1',
    "line 2, column 'n': got 'NaN', expected an integer": '{"n": NaN}',
    "line 2: got '{\"n\": 1, \"n\": 1}', expected a JSON object in one line": '{"n": 1, "n": 1}',
    "line 2: got '{\"x\": Inf}', expected a JSON object in one line": '{"x": Inf}',
    "line 2: got 'null', expected a JSON object in one line": "null",
    "line 2: got '{}{}', expected a JSON object in one line": "{}{}",
    "line 2: got '{\"w\": \"\\\\xff\"}', expected a JSON object in one line": b'{"w": "\xff"}\n',
    "line 2, column 'x': got 'Infinity', expected a finite number": '{"x": 1e999}',
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_OBJECTS)
def test_a_bad_object_is_raised_skipped_or_missing(tmp_path, message):
    bad = BAD_OBJECTS[message]
    good = json.dumps(GOOD_OBJECT)
    path = write_lines(
        tmp_path / "log", [good, json.dumps({**GOOD_OBJECT, **bad}) if isinstance(bad, dict) else bad, good]
    )
    with pytest.raises(FormatError) as caught:
        read(path, "raise", JSON_SPEC)
    assert str(caught.value) == f"{path}: {message}"
    rows, columns, report = read(path, "skip", JSON_SPEC)
    assert rows == [0, 2]
    assert columns == {"n": [1, 1], "x": [0.5, 0.5], "h": [255, 255], "w": ["a", "a"], "l": [[1, None]] * 2}
    assert [str(fault) for fault in report.first] == [f"{path}: {message}"]
    rows, columns, report = read(path, "missing", JSON_SPEC)
    assert rows == [0, 1, 2]
    assert sum(report.counts.values()) == 1
    if isinstance(bad, dict) and "l" not in bad:
        assert [name for name in columns if columns[name][1] is None] == list(bad)


def test_no_policy_leaves_out_a_whole_file_of_another_format(tmp_path):
    objects = write_lines(tmp_path / "objects", [json.dumps(GOOD_OBJECT)] * 20)
    table = write_lines(tmp_path / "table", ["1;0.5;ff;a"] * 20)
    of_json = "is JSON lines, expected delimited text"
    for policy, paths, spec, problem in (
        ("skip", [objects, table], JSON_SPEC, "none of its first 20 rows can be read (line 1: got '1;0.5;ff;a'"),
        ("missing", [table], JSON_SPEC, "none of its first 20 rows can be read (line 1: got '1;0.5;ff;a'"),
        ("skip", [table], SPEC, "none of its first 20 rows can be read (line 1: found 1 field, expected 4 separated"),
        ("skip", [objects], SPEC, of_json),
        ("missing", [objects], SPEC, of_json),
        ("missing", [objects], dataclasses.replace(SPEC, header=True), of_json),
    ):
        with pytest.raises(FormatError, match=re.escape(f"{paths[-1]}: {problem}")):
            rows_of(open_source(spec, paths, policy, threads=1))
    # Of fewer rows all may be damaged.
    few = write_lines(tmp_path / "few", ["1;0.5;ff;a"] * 19)
    good = write_lines(tmp_path / "good", [GOOD])
    assert rows_of(open_source(SPEC, [few, good], "skip", threads=1))[0] == [19]
    # A log that lacks the last columns has its others.
    short = write_lines(tmp_path / "short", ["1,0.5,19700102"] * 20)
    assert len(rows_of(open_source(SPEC, [short], "missing", threads=1))[0]) == 20


@pytest.mark.parametrize(
    "line",
    [
        '{"n": 1, "x": NaN}',
        '{"n": 1, "x": -Infinity}',
        '{"n": 1, "x": -NaN}',
        '{"n": 1, "x": Inf}',
        '{"n": 1, "e": [NaN, Infinity]}',
        '{"n": 1, "e": -Inf}',
        '{"n": 1, "e": 1, "e": {"a": 1, "a": 2}}',
        '{"n": 1, "x": 1, "x": 1}',
        '{"n": 1, "e": ' + "9" * 5000 + "}",
        '{"n": 1, "x": ' + "9" * 5000 + "}",
        '{"n": -0, "x": -0, "l": [-0]}',
        '{"n": 1}{"n": 2}\n',
        '{"n": 1,\n"x": 2}{"n": 3}',
        "null",
        " ",
        "\ufeff{}",
    ],
    ids=lambda line: line[:30],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_json_line_is_read_alike_beside_any_other(tmp_path, line, place):
    """Arrow reads a block, Python the lines of a block in which Arrow finds a fault or reads too little."""
    found = []
    for other in ('{"n": 2}', '{"n": 2.0}'):
        lines = [line, other] if place == 0 else [other, line]
        rows, columns, report = read(write_lines(tmp_path / "log", lines), "missing", JSON_SPEC)
        # The sign of a zero, too.
        found.append((rows, repr(columns), report))
    assert found[0] == found[1]


def test_bad_fields_of_parquet_are_reported_by_row(tmp_path):
    spec = SourceSpec(
        format="parquet",
        columns=(
            SourceColumn(name="x", type="number"),
            SourceColumn(name="h", type="hex32"),
            SourceColumn(name="l", type="number", separator=","),
            SourceColumn(name="t", type="time", format="%H:%M"),
        ),
    )
    table = pa.table(
        {
            "x": [1.0, float("inf"), float("nan"), 2.0, 3.0],
            "h": ["0", "f", "g", "0\n1", None],
            "l": ["1,2", "", "nan,", "1,x,2", "3"],
            "t": ["00:01", "1:00", None, "24:00", ""],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source = open_source(spec, [tmp_path / "a.parquet"], "missing")
    rows, columns = rows_of(source)
    assert rows == [0, 1, 2, 3, 4]
    assert columns == {
        "x": [1.0, None, None, 2.0, 3.0],
        "h": [0, 15, None, None, None],
        "l": [[1.0, 2.0], [], [None, None], [], [3.0]],
        "t": [-2208988740, -2208985200, None, None, None],
    }
    assert source.bad_input.counts == {"hex": 2, "infinite": 1, "number": 1, "time": 1}
    assert (
        str(source.bad_input.first[0])
        == f"{tmp_path}/a.parquet: row 2, column 'x': got 'inf', expected a finite number"
    )
    skipped = open_source(spec, [tmp_path / "a.parquet"], "skip")
    assert rows_of(skipped)[0] == [0, 4]
    assert sum(skipped.bad_input.counts.values()) == 3


@pytest.mark.parametrize("kind", ["delimited", "json_lines"])
def test_integers_written_with_a_point_are_those_that_a_float_tells_apart(tmp_path, kind):
    """Finding N2: from 2^53 on pandas may have rounded it."""
    texts = ["9007199254740991.0", "9007199254740992.0", "-9007199254740992.00", "9007199254740993", "-12.0"]
    spec = SourceSpec(format=kind, columns=(SourceColumn(name="n", type="integer"),))
    path = write_lines(tmp_path / "log", texts if kind == "delimited" else [f'{{"n": {text}}}' for text in texts])
    _, columns, report = read(path, "missing", spec)
    assert columns["n"] == [2**53 - 1, None, None, 2**53 + 1, -12]
    assert report.counts == {"integer": 2}
