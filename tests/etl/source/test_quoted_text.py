# SPDX-License-Identifier: Apache-2.0
"""Text between quotes never becomes a row, under any policy; quoted line ends are read (RFC 4180)."""

import csv
import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from terarec.errors import FormatError
from terarec.etl.source import source as source_module
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.source import open_source
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.preparation import BAD_INPUT_POLICIES
from tests.errors import at
from tests.etl.source.samples import rows_of
from tests.params import examples

HOSTILE = [
    '"',
    '""',
    "\n",
    "\r\n",
    "\r",
    ",",
    " ",
    "\n0,5,fake\n",
    "\n0,5,fake",
    '",',
    'a",5\n',
    "\ufeff",
    "é",
    "a",
    "\t",
]
TEXTS = st.lists(st.sampled_from(HOSTILE), max_size=6).map("".join)
TABLES = st.lists(st.tuples(st.integers(0, 1), st.integers(-9, 9), TEXTS, TEXTS), min_size=1, max_size=12)


def spec(*, used, delimiter=","):
    columns = [SourceColumn(name="label", type="integer"), SourceColumn(name="x", type="integer")]
    columns += [SourceColumn(name="note", type="text")] if used else []
    return SourceSpec(format="delimited", columns=tuple(columns), delimiter=delimiter, header=True, quote=True)


def write(path, table, delimiter, quoting, terminator):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=terminator)
    writer.writerows([("label", "no\nte", "x", "note"), *((a, c, b, d) for a, b, c, d in table)])
    path.write_bytes(text.getvalue().encode())
    return path


@settings(max_examples=examples(150))
@given(
    TABLES,
    st.sampled_from([",", "\t", ";"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(BAD_INPUT_POLICIES),
    st.booleans(),
    st.integers(1, 60),
)
@example([(0, 1, "a\n1,5,fake\nb", "a\n1,5,fake\nb")], ",", csv.QUOTE_MINIMAL, "\n", "skip", False, 1)
def test_tables_of_the_csv_module_are_read_exactly(
    tmp_path_factory, table, delimiter, quoting, terminator, policy, used, block_bytes
):
    """A10: hostile text in columns that are used and in those that are not (D15), in blocks of any size."""
    if quoting == csv.QUOTE_MINIMAL:
        terminator = "\r\n"  # else Python 3.11 leaves a carriage return unquoted
    path = write(tmp_path_factory.mktemp("tables") / "t.csv", table, delimiter, quoting, terminator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "_READERS", {"delimited": lambda spec: DelimitedReader(spec, block_bytes)})
        source = open_source(spec(used=used, delimiter=delimiter), [path], policy, threads=2)
        rows, columns = rows_of(source)
        assert source.count_rows() == [len(table)]
    assert rows == list(range(len(table)))
    assert columns["label"] == [row[0] for row in table]
    assert columns["x"] == [row[1] for row in table]
    assert not used or columns["note"] == [row[3] or None for row in table]
    assert not source.bad_input.counts


@settings(max_examples=examples(150))
@given(TABLES, st.sampled_from(BAD_INPUT_POLICIES), st.integers(0, 10**6), st.sampled_from(['"', 'x"', '"x']))
def test_an_unbalanced_quote_ends_the_reading_or_is_plain_text(tmp_path_factory, table, policy, place, quote):
    """A10: after one more quote the rows are a first part of those that are right, or the file is rejected."""
    text = write(tmp_path_factory.mktemp("tables") / "t.csv", table, ",", csv.QUOTE_ALL, "\n").read_text()
    text = text.replace("\n0,5,fake", '\n"0","","5","fake"')  # what was between quotes may not be one of these rows
    begin = len('"label","no\nte","x","note"\n')
    place = begin + place % (len(text) - begin)
    path = tmp_path_factory.mktemp("tables") / "t.csv"
    path.write_bytes((text[:place] + quote + text[place:]).encode())
    written = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))[1:]
    try:
        _, columns = rows_of(open_source(spec(used=True), [path], policy, threads=1))
    except FormatError:
        return
    if policy == "missing":  # keeps a record with too few fields, or too many
        written = [[*row, "", "", "", ""][:4] for row in written if row]
    good = [(row[0], row[2], row[3]) for row in written if len(row) == 4]
    found = zip(columns.get("label", []), columns.get("x", []), columns.get("note", []), strict=True)
    assert [row for row in found if None not in row[:2]] == [
        (int(a), int(b), c or None) for a, b, c in good if a.lstrip("-").isdigit() and b.lstrip("-").isdigit()
    ]


@pytest.mark.parametrize("policy", BAD_INPUT_POLICIES)
@pytest.mark.parametrize(
    "bad",
    [
        '0,1,"a\n1,5,fake\n',
        '0,1,"a"b"\n1,5,fake\nc"\n',
        'x,1,"a\n1,5,fake\n',
        '0,1,2,3,"a\n1,5,fake\n',
        '0,1,"\n"b\n1,5,x',
    ],
)
def test_wrong_quotes_end_the_reading_under_every_policy(tmp_path, bad, policy):
    """A10: the fault names file, line and column, though another field of the line is wrong, too."""
    path = tmp_path / "t.csv"
    path.write_text(f"label,x,note\n0,2,c\n{bad}")
    with pytest.raises(FormatError) as caught:
        rows_of(open_source(spec(used=False), [path], policy, threads=1))
    if bad[0] != "x" or policy != "raise":
        assert str(caught.value).startswith(f"{path}: line 3")


def test_the_line_numbers_count_quoted_line_ends(tmp_path):
    """A10: a fault behind a quoted line end is reported with its line; an unused column by its name (E1)."""
    path = tmp_path / "t.csv"
    path.write_text('label,x,note\n0,1,"a\n\nb"\n0,y,\n')
    source = open_source(spec(used=False), [path], "skip", threads=1)
    assert rows_of(source) == ([0], {"label": [0], "x": [1]})
    assert [(fault.number, fault.column) for fault in source.bad_input.first] == [(5, "x")]
    path.write_text('label,x,note\n0,1,"a"b\n')
    with pytest.raises(FormatError, check=at(f"{path}: line 2, column 'note'")):
        rows_of(open_source(spec(used=False), [path], "skip", threads=1))


def test_a_quote_that_hides_too_much_ends_the_reading(tmp_path):
    """A10: a line of which the quotes cannot be kept in memory is not cut, which would lose a quote."""
    path = tmp_path / "t.csv"
    path.write_text('label,x,note\n0,1,"' + "a" * (1 << 25) + '\n1,5,fake\n"\n')
    with pytest.raises(FormatError, check=at(f"{path}: byte 13")):
        rows_of(open_source(spec(used=False), [path], "skip", threads=1))
