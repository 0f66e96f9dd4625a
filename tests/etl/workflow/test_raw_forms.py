# SPDX-License-Identifier: Apache-2.0
"""Raw records in every form that callers hold them in become the same model inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.ops import Bucketize, Categorify, Clip, FillMissing, GivenIds, ListSlice, LogOp
from terarec.etl.ops.categorical import Vocabularies
from terarec.etl.values import ValueIds
from terarec.etl.workflow import Workflow, raw_values
from terarec.etl.workflow.serving import EncodedRecords
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, WorkflowSpec
from tests.errors import at

NAMES = ("site", "city", "item", "tags", "seen")
CITY = "\u0141\u00f3d\u017a"
VOCABULARIES = {
    "site": ValueIds("hex32", pa.array([0xA, 0xFFFFFFFF], pa.uint32())),
    "city": ValueIds("text", pa.array(["Oslo", CITY], pa.large_string())),
    "item": ValueIds("integer", pa.array([7, -1, 2**40], pa.int64())),
    "tags": ValueIds("text", pa.array(["red", "blue"], pa.large_string())),
    "seen": ValueIds("integer", pa.array([5, 6], pa.int64())),
}
SPEC = WorkflowSpec(
    name="all",
    source=SourceSpec(
        format="delimited",
        columns=(
            SourceColumn(name="click", type="integer"),
            *(SourceColumn(name=name, type="number") for name in ("hits", "age", "plain")),
            SourceColumn(name="site", type="hex32"),
            SourceColumn(name="city", type="text"),
            SourceColumn(name="item", type="integer"),
            SourceColumn(name="row", type="integer"),
            SourceColumn(name="tags", type="text", separator="|"),
            SourceColumn(name="seen", type="integer", separator="|"),
        ),
    ),
    steps=(
        Categorify(columns=NAMES),
        GivenIds(columns=("row",), rows=(100,)),
        ListSlice(columns=("tags", "seen"), stop=3),
        Bucketize(columns=("age",), outputs=("age_group",), boundaries=(18.0, 65.0)),
        FillMissing(columns=("hits",), value=0.0),
        FillMissing(columns=("age",), value=40.0),
        Clip(columns=("hits",), low=-2.0),
        LogOp(columns=("hits",), shift=3.0),
    ),
    labels=(LabelSpec(name="click"),),
    dense=("hits", "age", "plain"),
    categorical=("site", "city", "item", "age_group", "row", "tags", "seen"),
)
WORKFLOW = Workflow.of(SPEC, {0: Vocabularies(VOCABULARIES, {name: pa.array([], pa.int64()) for name in NAMES})})
RECORDS: dict[str, list[Any]] = {
    "hits": [-2, None, 97, -100],
    "age": [40, 18.0, 17.5, None],
    "plain": [0.5, -1, 2**24, 0],
    "site": ["a", "FFFFFFFF", "", "bad"],
    "city": [CITY, "Oslo", None, "Rome"],
    "item": [2**40, None, 8, -1],
    "row": [0, 99, 5, 6],
    "tags": [["blue", "red", "none"], None, [], ["red", ""]],
    "seen": [[6], [5, 6], [None, 9], []],
}


FAR_TIMES = pa.array([0, 10**13, None, 1], pa.timestamp("s"))
"""Times of which one is of a year that Python has not."""


def assert_expected(encoded: EncodedRecords) -> None:
    log = [math.log(value) for value in (1, 3, 100, 1)]
    dense = np.array([log, [40, 18.0, 17.5, 40], [0.5, -1, 2**24, 0]]).T.astype(np.float32)
    np.testing.assert_array_equal(encoded.dense, dense)
    assert encoded.dense.dtype == np.float32
    assert encoded.dense.flags.c_contiguous
    keys: Any = encoded.keys
    assert [column.tolist() for column in keys[:5]] == [
        [2, 3, 0, 1],
        [3, 2, 0, 1],
        [4, 0, 1, 3],
        [2, 2, 1, 0],
        [0, 99, 5, 6],
    ]
    assert [array.tolist() for array in keys[5]] == [[3, 2, 1, 2, 0], [0, 3, 3, 3, 5]]
    assert [array.tolist() for array in keys[6]] == [[3, 2, 3, 0, 1], [0, 1, 3, 5, 5]]
    assert all(column.dtype == np.int64 for column in keys[:5])


def test_lists() -> None:
    assert_expected(WORKFLOW.encode(RECORDS))
    tuples = {name: tuple(values) for name, values in RECORDS.items()}
    assert_expected(WORKFLOW.encode({**tuples, "click": [1, 0, 1, 1]}))


@pytest.fixture(params=["small", "large"])
def arrow_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows take another way than many: run a test of few rows on both."""
    if request.param == "large":
        monkeypatch.setattr(raw_values, "SMALL_ROWS", 0)


@pytest.mark.usefixtures("arrow_rows")
def test_arrow_arrays() -> None:
    columns = {name: pa.array(values) for name, values in RECORDS.items()}
    assert_expected(WORKFLOW.encode(columns))
    columns["city"] = columns["city"].dictionary_encode()
    columns["site"] = pa.chunked_array([columns["site"][:1], columns["site"][1:]])
    columns["tags"] = columns["tags"].cast(pa.large_list(pa.large_string()))
    assert_expected(WORKFLOW.encode(columns))
    padded = {name: pa.concat_arrays([pa.array(values)[2:], pa.array(values)]) for name, values in RECORDS.items()}
    assert_expected(WORKFLOW.encode({name: array[2:] for name, array in padded.items()}))
    assert_expected(WORKFLOW.encode({**columns, "tags": pa.array(["blue|red|none", None, "", "red|"])}))
    columns["plain"] = pa.array(RECORDS["plain"]).cast(pa.decimal128(20, 2))
    columns["city"] = pa.DictionaryArray.from_arrays(
        [1, 0, None, 2], pa.array(["Oslo", CITY, "Rome"], pa.string_view())
    )
    columns["item"] = pc.run_end_encode(columns["item"])
    columns["seen"] = pa.array(RECORDS["seen"], pa.list_view(pa.float32()))
    assert_expected(
        WORKFLOW.encode({**columns, "tags": pa.array(["blue|red|none", None, "", "red|"], pa.string_view())})
    )


def test_numpy_arrays() -> None:
    columns = {name: np.array(values, dtype=object) for name, values in RECORDS.items() if name not in ("tags", "seen")}
    columns["plain"] = np.array(RECORDS["plain"], dtype=np.float32)
    columns["row"] = np.array(RECORDS["row"], dtype=np.uint8)
    columns["age"] = np.array([40, 18.0, 17.5, np.nan])
    columns["site"] = np.array(RECORDS["site"])
    assert_expected(WORKFLOW.encode({**columns, "tags": RECORDS["tags"], "seen": RECORDS["seen"]}))


@pytest.mark.usefixtures("arrow_rows")
def test_all_missing_arrow_columns() -> None:
    columns = {name: pa.nulls(1) for name in RECORDS} | {"plain": [1.0], "row": [1]}
    keys: Any = WORKFLOW.encode(columns).keys
    assert [column.tolist() for column in keys[:4]] == [[0]] * 4


@given(
    st.lists(st.one_of(st.none(), st.integers(-(2**53), 2**53), st.floats(-1e38, 1e38)), max_size=20),
    st.sampled_from([1, 20]),
)
def test_numbers_are_the_same_in_every_form_and_one_by_one(values: list[Any], repeats: int) -> None:
    values = values * repeats  # more than SMALL_ROWS of them, or fewer
    floats = [math.nan if value is None else float(value) for value in values]
    forms = [
        values,
        np.array(floats),
        pa.array([None if math.isnan(value) else value for value in floats], pa.float64()),
    ]
    rest = {name: [column[0]] * len(values) for name, column in RECORDS.items()}
    encoded = [WORKFLOW.encode({**rest, "hits": form, "age": form}) for form in forms]
    singles = [{name: [column[0]] for name, column in rest.items()} | {"hits": [x], "age": [x]} for x in values[:20]]
    alone = [WORKFLOW.encode(single) for single in singles]
    for other in encoded[1:]:
        np.testing.assert_array_equal(encoded[0].dense, other.dense)
        np.testing.assert_array_equal(encoded[0].keys[3], other.keys[3])
    for row, single in enumerate(alone):
        np.testing.assert_array_equal(single.dense[0], encoded[0].dense[row])
        assert single.keys[3] == encoded[0].keys[3][row]


@pytest.mark.parametrize(
    ("column", "values", "place"),
    [
        ("hits", [1, 2, 3, "4"], ("column 'hits', row 3",)),
        ("age", np.array([1, 2, -np.inf, 4]), ("column 'age', row 2",)),
        ("age", pa.array(list("abcd")), ("column 'age'",)),
        ("age", [1, 2, 3, 1e300], ("column 'age', row 3",)),
        ("plain", [1, None, 3, 4], ("column 'plain', row 1",)),
        ("site", pa.array(["a", "b", "123456789", "d"]), ("column 'site', row 2",)),
        ("site", [10, 11, 12, 13], ("column 'site', row 0", "got 10")),
        ("site", np.arange(4), ("column 'site', row 0", "got np.int64(0)")),
        ("city", ["a", "b", b"c", "d"], ("column 'city', row 2",)),
        ("city", ["x" * 99, 1, "", ""], ("column 'city', row 1",)),
        ("city", [b"x" * 99, "", "", ""], ("column 'city', row 0",)),
        ("item", np.array([1, 2, 2**63, 4], dtype=np.uint64), ("column 'item', row 2",)),
        ("item", pa.array([1.0, 2.5, 3, 4]), ("column 'item', row 1",)),
        ("item", np.array([0.5] * 4), ("column 'item', row 0",)),
        ("row", [1, 2, 3, 100], ("column 'row', row 3",)),
        ("tags", [["red"], 7, [], []], ("column 'tags', row 1",)),
        ("tags", pa.array([1, 2, 3, 4]), ("column 'tags'",)),
        ("seen", [[], [5], [6, "x"], []], ("column 'seen', row 2",)),
        ("city", "Oslo", ("column 'city'",)),
        *((name, FAR_TIMES, (f"column {name!r}", "timestamp[s]")) for name in ("age", "site", "city", "item")),
    ],
)
def test_a_wrong_column_or_value_is_reported_in_one_line(
    column: str, values: Any, place: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_values, "SMALL_ROWS", 0)
    with pytest.raises(ConfigError, check=at(*place)) as caught:
        WORKFLOW.encode({**RECORDS, column: values})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("column", "values", "where"),
    [
        ("age", pa.array(list("abcd")), "column 'age', row 0"),
        ("site", pa.array([10, 11, 12, 13]), "column 'site', row 0"),
        ("item", pa.array([1, 2, 3, 2.5]), "column 'item', row 3"),
        ("tags", pa.array([1, 2, 3, 4]), "column 'tags', row 0"),
        ("city", pa.array([True, False, True, True]), "column 'city', row 0"),
        *((name, FAR_TIMES, f"column {name!r}") for name in ("age", "site", "city", "item")),
    ],
)
def test_a_small_arrow_array_is_reported_by_its_first_wrong_value(column: str, values: Any, where: str) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        WORKFLOW.encode({**RECORDS, column: values})


@pytest.mark.usefixtures("arrow_rows")
@pytest.mark.parametrize("column", ["city", "site", "tags"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_arrow_text_that_is_not_utf_8_is_rejected(column: str, kind: pa.DataType) -> None:
    """Few values ended in an error of Python, and many had ids."""
    content = pa.large_binary() if kind == pa.large_string() else pa.binary()
    texts: pa.Array = pa.array([b"a", None, b"a", b"a\xff"], content).view(kind)
    encoded: pa.Array = texts.dictionary_encode()
    if column == "tags":
        texts, encoded = (pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), of) for of in (texts, encoded))
    for form in (texts, encoded, pa.chunked_array([texts[:2], texts[2:]])):
        with pytest.raises(ConfigError, check=at(f"column '{column}'", "UTF-8")):
            WORKFLOW.encode({**RECORDS, column: form})


ROUNDED = np.array([2**24 - 1, 2**24], np.float32)


@pytest.mark.usefixtures("arrow_rows")
@pytest.mark.parametrize(
    "values",
    [ROUNDED, list(ROUNDED), pa.array(ROUNDED), pa.chunked_array([ROUNDED]), np.array([0, 2**11], np.float16)],
    ids=["array", "list", "arrow", "chunked", "float16"],
)
def test_floats_beyond_their_precision_are_no_ids(values: Any) -> None:
    """Finding N2: sessions took the neighbours of an id for it."""
    records: dict[str, Any] = {name: [None, None] for name in RECORDS} | {"plain": [1.0, 1.0], "row": [1, 1]}
    with pytest.raises(ConfigError, check=at("column 'item', row 1")):
        WORKFLOW.encode({**records, "item": values})
    assert WORKFLOW.encode({**records, "plain": values}).dense[:, 2].tolist() == [float(value) for value in values]
    one = {name: column[:1] for name, column in records.items()}
    keys: Any = WORKFLOW.encode({**one, "item": values[:1]}).keys
    assert keys[2].tolist() == [1]


@pytest.mark.usefixtures("arrow_rows")
@pytest.mark.parametrize(
    "lists",
    [
        ROUNDED.reshape(2, 1),
        list(ROUNDED.reshape(2, 1)),
        pa.array([[value] for value in ROUNDED], pa.list_(pa.float32())),
    ],
    ids=["array", "list", "arrow"],
)
def test_floats_beyond_their_precision_are_no_ids_of_lists(lists: Any) -> None:
    """Finding N2."""
    records: dict[str, Any] = {name: [None, None] for name in RECORDS} | {"plain": [1.0, 1.0], "row": [1, 1]}
    with pytest.raises(ConfigError, check=at("column 'seen', row 1")):
        WORKFLOW.encode({**records, "seen": lists})


@pytest.mark.usefixtures("arrow_rows")
@pytest.mark.parametrize(
    "values",
    [
        [math.nan, None],
        np.array([math.nan] * 2),
        np.array([math.nan, None], dtype=object),
        pa.nulls(2),
        pa.nulls(2, pa.bool_()),
        pa.array([math.nan, None]),
    ],
    ids=["list", "array", "objects", "nulls", "bool", "floats"],
)
@pytest.mark.parametrize("name", [*NAMES, "age"])
def test_values_that_are_all_missing_have_any_type(name: str, values: Any) -> None:
    """Finding N6: NaN, and nulls of any type, are missing values of texts, ids, numbers and lists."""
    records: dict[str, Any] = {column: [None, None] for column in RECORDS} | {"plain": [1.0, 1.0], "row": [1, 1]}
    expected: Any = WORKFLOW.encode({**records, name: [None, None]})
    found: Any = WORKFLOW.encode({**records, name: values})
    np.testing.assert_array_equal(found.dense, expected.dense)
    for column, wanted in zip(found.keys, expected.keys, strict=True):
        assert [part.tolist() for part in column] == [part.tolist() for part in wanted]
