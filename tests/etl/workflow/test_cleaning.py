# SPDX-License-Identifier: Apache-2.0
"""A11: a raw value is cleaned alike in files of every format and in records, as the saved workflow says."""

import csv
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, FormatError
from terarec.etl import fit
from terarec.etl.ops import Categorify, FillMissing, HashBucket, ListSlice, Normalize
from terarec.etl.source.source import open_source
from terarec.etl.workflow import Workflow, raw_values
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.params import examples

COLUMNS = (
    SourceColumn(name="y", type="integer"),
    SourceColumn(name="word", type="text"),
    SourceColumn(name="code", type="hex32"),
    SourceColumn(name="user", type="integer"),
    SourceColumn(name="price", type="number"),
    SourceColumn(name="day", type="time", format="%Y-%m-%d"),
    SourceColumn(name="tags", type="text", separator="|"),
)
SPACES = st.sampled_from(["", "", " ", "\t", " \n", "\x0b"])
PADDED = st.builds("{}{}{}".format, SPACES, st.sampled_from(["a", "b", "a b", "?", "NA", "", "é", "\xa0a"]), SPACES)
MARKS = st.sampled_from([None, "", "?", " ? ", "NA"])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "word": st.none() | PADDED,
            "code": st.builds("{}{}".format, SPACES, st.sampled_from(["a", "FF", "?", ""])) | MARKS,
            "user": st.integers(-(2**63), 2**63 - 1) | st.sampled_from([7, 7.0, 2.0**53 - 1]) | MARKS,
            "price": st.floats(-1e9, 1e9) | st.sampled_from([1, 2**60 + 1]) | MARKS,
            "day": st.builds("{}{}".format, SPACES, st.sampled_from(["2024-01-02", "?", ""])) | MARKS,
            "tags": st.lists(st.builds("{}{}".format, SPACES, st.sampled_from(["x", "y", "?", ""])), max_size=3).map(
                "|".join
            ),
        }
    ),
    min_size=1,
    max_size=8,
)


def source(file_format="delimited", **options):
    chosen = {"trim": True, "missing": ("", "?", "NA"), "header": True, "quote": True, "delimiter": ",", **options}
    return SourceSpec(format=file_format, columns=COLUMNS, **chosen)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "base.csv"
    path.write_text(
        "y,word,code,user,price,day,tags\n0,a,a,7,1.5,2024-01-02,x|y\n1,b,ff,8,2,2024-01-03,x\n1,a b,a,9,4,2024-01-02,y"
    )
    workflow = Workflow(
        [
            Categorify(columns=("word", "code", "user", "tags")),
            HashBucket(columns=("day",), outputs=("day_id",), buckets=97),
            ListSlice(columns=("tags",), start=0, stop=4),
            Normalize(columns=("price",)),
            FillMissing(columns=("price",), value=-3.0),
        ],
        source=source(),
        labels=[LabelSpec(name="y")],
        dense=["price"],
        categorical=["word", "code", "user", "tags", "day_id"],
    )
    return fit(workflow, [path])


def as_csv(path, rows, quoting):
    text = io.StringIO()
    writer = csv.writer(text, quoting=quoting, lineterminator="\r\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([["0", *(row[column.name] for column in COLUMNS[1:])] for row in rows])
    path.write_bytes(text.getvalue().encode())


def as_json(path, rows):
    path.write_text("".join(json.dumps({"y": 0, **row}) + "\n" for row in rows))


def as_parquet(path, rows):
    texts = {name: [row[name] for row in rows] for name in ("word", "code", "day", "tags")}
    table = {name: pa.array(values, pa.string()) for name, values in texts.items()}
    for name, kind in (("user", pa.int64()), ("price", pa.float64())):
        given = [row[name] if not isinstance(row[name], str) else None for row in rows]
        table[name] = pa.array([None if value is None else kind.to_pandas_dtype()(value) for value in given], kind)
    pq.write_table(pa.table({"y": [0] * len(rows), **table}), path)


def prepared(workflow, path):
    """Dense values and keys of a file, as preparation makes them."""
    blocks = list(open_source(workflow.spec.source, [path], threads=1).blocks())
    rows = [workflow.encode_rows(workflow.apply(block)) for block in blocks]
    assert len(rows) == 1
    return rows[0].dense, rows[0].keys


def assert_same(found, expected):
    np.testing.assert_array_equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
            assert mine.tolist() == theirs.tolist()


@settings(max_examples=examples(120))
@given(ROWS)
def test_files_and_records_are_read_alike(tmp_path_factory, fitted, rows):
    """CSV with and without quotes, JSON lines, Parquet, and records by both of their ways."""
    directory = tmp_path_factory.mktemp("rows")
    forms = {name: Workflow.of(dataclasses.replace(fitted.spec, source=source(name)), fitted.states)
             for name in ("json_lines", "parquet")}  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    encoded = fitted.encode(columns)
    expected = encoded.dense, encoded.keys
    for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL):
        as_csv(directory / "rows.csv", rows, quoting)
        assert_same(prepared(fitted, directory / "rows.csv"), expected)
    as_json(directory / "rows.json", rows)
    assert_same(prepared(forms["json_lines"], directory / "rows.json"), expected)
    as_parquet(directory / "rows.parquet", rows)
    assert_same(prepared(forms["parquet"], directory / "rows.parquet"), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_values, "SMALL_ROWS", 0)
        long = fitted.encode({name: tuple(values) for name, values in columns.items()})
    assert_same((long.dense, long.keys), expected)


def test_cleaning_of_fields_leaves_records_as_they_are(tmp_path: Path, fitted) -> None:
    fitted.save(tmp_path)
    assert Workflow.load(tmp_path).spec.source.cleaning == "values"
    saved = json.loads((tmp_path / "workflow.json").read_text())
    saved["workflow"]["source"]["cleaning"] = "fields"
    (tmp_path / "workflow.json").write_text(json.dumps(saved))
    of_fields = Workflow.load(tmp_path)
    assert of_fields.spec.source.cleaning == "fields"
    row = {"word": [" a"], "code": ["a"], "user": [7], "price": [1.0], "day": ["2024-01-02"], "tags": ["x"]}
    assert of_fields.encode(row).keys[0].tolist() == [1]  # unseen
    assert (
        Workflow.of(fitted.spec, fitted.states).encode(row).keys[0].tolist()
        == fitted.encode({**row, "word": ["a"]}).keys[0].tolist()
    )


HOSTILE = {
    "word": ["\ud800", "a\udfff", True, 5],
    "code": ["g", "123456789", True, 12],
    "user": [True, 2**63, -(2**63) - 1, 1.5, float(2**53), "x", "7"],
    "price": [True, 10**400, float("inf"), "x", "1"],
    "day": ["2024-02-30", True, "\ud800"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in HOSTILE.items() for value in values])
@pytest.mark.parametrize("policy", ["raise", "skip", "missing"])
def test_hostile_values_are_rejected_alike(tmp_path: Path, fitted, name, value, policy) -> None:
    """C2, D12: JSON lines and records reject the same values in one line, under every policy without a crash."""
    row = {"word": "a", "code": "a", "user": 7, "price": 1.0, "day": "2024-01-02", "tags": "x"}
    with pytest.raises(ConfigError) as caught:
        fitted.encode({key: [value if key == name else good] for key, good in row.items()})
    assert "\n" not in str(caught.value)
    path = tmp_path / "log.json"
    good = json.dumps({"y": 0, **row})
    bad = json.dumps({"y": 0, **row, name: value}).replace("Infinity", "1e999")
    path.write_text(f"{good}\n{bad}\n{good}\n")
    opened = open_source(source("json_lines"), [path], policy, threads=1)
    if policy == "raise":
        with pytest.raises(FormatError) as rejected:
            list(opened.blocks())
        assert rejected.value.where in (f"{path}: line 2", f"{path}: line 2, column '{name}'")
        str(rejected.value).encode()
        return
    rows = sum(block.num_rows for block in opened.blocks())
    assert rows == (2 if policy == "skip" else 3)
    assert sum(opened.bad_input.counts.values()) == 1
    str(opened.bad_input.first[0]).encode()
