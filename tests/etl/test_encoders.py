"""Raw records in every form that callers hold them in become the same model inputs."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl import Encoders, Vocabulary, raw_columns
from terarec.formats import write_dataset
from terarec.spec import (
    BucketizeEncoder,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    LogShiftEncoder,
    StandardizeEncoder,
    VocabularyEncoder,
)

VOCABULARIES = {
    "site": Vocabulary("hex32", np.array([0xA, 0xFFFFFFFF], dtype=np.uint32), [3, 2]),
    "city": Vocabulary("string", ["Oslo", "\u0141\u00f3d\u017a"], [2, 1]),
    "item": Vocabulary("int64", [7, -1, 2**40], [3, 2, 1]),
    "tags": Vocabulary("string", ["red", "blue"], [2, 1]),
    "seen": Vocabulary("int64", [5, 6], [2, 1]),
}
VALUE_TYPES = {name: vocabulary.value_type for name, vocabulary in VOCABULARIES.items()}


def vocabulary_column(name, hotness=1):
    encoder = VocabularyEncoder(file=f"vocabularies/{name}.parquet", value_type=VALUE_TYPES[name])
    return CategoricalColumn(name=name, rows=VOCABULARIES[name].rows, hotness=hotness, encoder=encoder)


SPEC = DatasetSpec(
    name="all",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(
        DenseColumn(name="hits", encoder=LogShiftEncoder(shift=3.0)),
        DenseColumn(name="age", encoder=StandardizeEncoder(mean=40.0, deviation=8.0)),
        DenseColumn(name="plain"),
    ),
    categorical=(
        vocabulary_column("site"),
        vocabulary_column("city"),
        vocabulary_column("item"),
        CategoricalColumn(name="age_group", rows=4, encoder=BucketizeEncoder(boundaries=(18.0, 65.0)), source="age"),
        CategoricalColumn(name="row", rows=100),
        vocabulary_column("tags", hotness=3),
        vocabulary_column("seen", hotness=2),
    ),
)
RECORDS = {
    "hits": [-2, None, 97, -100],
    "age": [40, 18.0, 17.5, None],
    "plain": [0.5, -1, 2**24, 0],
    "site": ["a", "FFFFFFFF", "", "bad"],
    "city": ["\u0141\u00f3d\u017a", "Oslo", None, "Rome"],
    "item": [2**40, None, 8, -1],
    "row": [0, 99, 5, 6],
    "tags": [["blue", "red", "none"], None, [], ["red", ""]],
    "seen": [[6], [5, 6], [None, 9], []],
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    for name, vocabulary in VOCABULARIES.items():
        vocabulary.save(directory / "vocabularies" / f"{name}.parquet")
    write_dataset(SPEC, directory)
    return Encoders.load(directory)


def assert_expected(encoded):
    log = [math.log(value) for value in (1, 3, 100, 1)]
    dense = np.array([log, [0.0, -2.75, -2.8125, 0.0], [0.5, -1, 2**24, 0]]).T.astype(np.float32)
    np.testing.assert_array_equal(encoded.dense, dense)
    assert encoded.dense.dtype == np.float32
    assert encoded.dense.flags.c_contiguous
    *scalars, tags, seen = encoded.keys
    assert [column.tolist() for column in scalars] == [
        [2, 3, 0, 1],
        [3, 2, 0, 1],
        [4, 0, 1, 3],
        [2, 2, 1, 0],
        [0, 99, 5, 6],
    ]
    assert [array.tolist() for array in tags] == [[3, 2, 1, 2, 0], [0, 3, 3, 3, 5]]
    assert [array.tolist() for array in seen] == [[3, 2, 3, 0, 1], [0, 1, 3, 5, 5]]
    assert all(column.dtype == np.int64 for column in scalars)


def test_lists(encoders):
    assert_expected(encoders.encode(RECORDS))
    assert_expected(
        encoders.encode({**{name: tuple(values) for name, values in RECORDS.items()}, "click": [1, 0, 1, 1]})
    )


@pytest.fixture(params=["small", "large"])
def arrow_rows(request, monkeypatch):
    """Few rows take another way than many: run a test of few rows on both."""
    if request.param == "large":
        monkeypatch.setattr(raw_columns, "SMALL_ROWS", 0)


@pytest.mark.usefixtures("arrow_rows")
def test_arrow_arrays(encoders):
    columns = {name: pa.array(values) for name, values in RECORDS.items()}
    assert_expected(encoders.encode(columns))
    columns["city"] = columns["city"].dictionary_encode()
    columns["site"] = pa.chunked_array([columns["site"][:1], columns["site"][1:]])
    columns["tags"] = columns["tags"].cast(pa.large_list(pa.large_string()))
    assert_expected(encoders.encode(columns))
    padded = {name: pa.concat_arrays([pa.array(values)[2:], pa.array(values)]) for name, values in RECORDS.items()}
    assert_expected(encoders.encode({name: array[2:] for name, array in padded.items()}))


def test_numpy_arrays(encoders):
    columns = {name: np.array(values, dtype=object) for name, values in RECORDS.items() if name not in ("tags", "seen")}
    columns["plain"] = np.array(RECORDS["plain"], dtype=np.float32)
    columns["row"] = np.array(RECORDS["row"], dtype=np.uint8)
    columns["age"] = np.array([40, 18.0, 17.5, np.nan])
    columns["site"] = np.array(RECORDS["site"])
    assert_expected(encoders.encode({**columns, "tags": RECORDS["tags"], "seen": RECORDS["seen"]}))


def test_no_records(encoders):
    encoded = encoders.encode({name: [] for name in RECORDS})
    assert encoded.dense.shape == (0, 3)
    assert [len(column) for column in encoded.keys[:5]] == [0] * 5
    assert encoded.keys[5][1].tolist() == [0]


@pytest.mark.usefixtures("arrow_rows")
def test_all_missing_arrow_columns(encoders):
    columns = {name: pa.nulls(1) for name in RECORDS} | {"plain": [1.0], "row": [1]}
    assert [column.tolist() for column in encoders.encode(columns).keys[:4]] == [[0]] * 4


@given(
    st.lists(st.one_of(st.none(), st.integers(-(2**53), 2**53), st.floats(-1e38, 1e38)), max_size=20),
    st.sampled_from([1, 20]),
)
def test_numbers_are_the_same_in_every_form(values, repeats):
    values = values * repeats  # more than SMALL_ROWS of them, or fewer
    spec = dataclasses.replace(SPEC, dense=SPEC.dense[:2], categorical=SPEC.categorical[3:4])
    encoders = Encoders(spec, {})
    floats = [math.nan if value is None else float(value) for value in values]
    forms = [
        values,
        np.array(floats),
        pa.array([None if math.isnan(value) else value for value in floats], pa.float64()),
    ]
    encoded = [encoders.encode({"hits": form, "age": form}) for form in forms]
    for other in encoded[1:]:
        np.testing.assert_array_equal(encoded[0].dense, other.dense)
        np.testing.assert_array_equal(encoded[0].keys[0], other.keys[0])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("hits", [1, 2, 3, "4"], "column 'hits', row 3: got '4', expected a finite number"),
        ("hits", [1, True, 3, 4], "column 'hits', row 1: got True, expected a finite number"),
        ("age", [1, 2, 3, math.inf], "column 'age', row 3: got inf, expected a finite number"),
        ("age", np.array([1, 2, -np.inf, 4]), "column 'age', row 2: got .*-?inf.*, expected a finite number"),
        ("age", pa.array(list("abcd")), "column 'age': got values of type string, expected a finite number"),
        ("age", [1, 2, 3, 1e300], "column 'age', row 3: got 1e.300, expected a number that float32 holds"),
        ("plain", [1e39, 2, 3, 4], "column 'plain', row 0: got 1e.39, expected a number that float32 holds"),
        ("plain", [1, None, 3, 4], "column 'plain', row 1: got None, expected a finite number"),
        ("site", ["a", "g", "c", "d"], "column 'site', row 1: got 'g', expected up to 8 hexadecimal digits as text"),
        ("site", pa.array(["a", "b", "123456789", "d"]), "column 'site', row 2: got '123456789', expected up to 8"),
        ("site", [10, 11, 12, 13], "column 'site', row 0: got 10, expected up to 8 hexadecimal digits as text"),
        ("site", np.arange(4), "column 'site': got values of type int64, expected up to 8 hexadecimal digits"),
        ("city", ["a", "b", b"c", "d"], "column 'city', row 2: got b'c', expected text"),
        ("city", ["x" * 99, 1, "", ""], "column 'city', row 1: got 1, expected text"),
        ("item", [1, 2, 3, 2.5], "column 'item', row 3: got 2.5, expected a 64-bit integer"),
        ("item", [1, 2**63, 3, 4], "column 'item', row 1: got 9223372036854775808, expected a 64-bit integer"),
        ("item", np.array([1, 2, 2**63, 4], dtype=np.uint64), "column 'item', row 2: got .*9223372036854775808"),
        ("item", pa.array([1.0, 2, 3, 4]), "column 'item': got values of type double, expected a 64-bit integer"),
        ("item", np.array([0.5] * 4), "column 'item': got values of type float64, expected a 64-bit integer"),
        ("row", [1, 2, 3, 100], "column 'row', row 3: got 100, expected an id, 0 <= id < 100"),
        ("row", [1, 2, 0.5, 4], "column 'row', row 2: got 0.5, expected an id"),
        ("tags", [["red"], "red", [], []], "column 'tags', row 1: got 'red', expected a list of at most 3 values"),
        ("tags", [["red"], [], ["a"] * 4, []], "column 'tags', row 2: got .*, expected a list of at most 3 values"),
        ("tags", pa.array(list("abcd")), "column 'tags': got values of type string, expected lists of at most 3"),
        ("seen", [[], [5], [6, "x"], []], "column 'seen', row 2: got 'x', expected a 64-bit integer"),
        ("city", "Oslo", "column 'city': got str, expected a list, a NumPy array or an Arrow array"),
        ("city", ["a", "b"], "column 'city': holds 2 values, expected 4 as in column 'hits'"),
        ("town", ["a"] * 4, "column 'town': not in the data set, expected hits, age, plain, site"),
    ],
)
def test_a_wrong_column_or_value_is_told_in_one_line(encoders, column, values, message, monkeypatch):
    monkeypatch.setattr(raw_columns, "SMALL_ROWS", 0)
    with pytest.raises(ConfigError, match=message) as caught:
        encoders.encode({**RECORDS, column: values})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("age", pa.array(list("abcd")), "column 'age', row 0: got 'a', expected a finite number"),
        (
            "site",
            pa.array([10, 11, 12, 13]),
            "column 'site', row 0: got 10, expected up to 8 hexadecimal digits as text",
        ),
        ("item", pa.array([1, 2, 3, 2.5]), "column 'item', row 0: got 1.0, expected a 64-bit integer"),
        ("tags", pa.array(list("abcd")), "column 'tags', row 0: got 'a', expected a list of at most 3 values"),
        ("city", pa.array([True, False, True, True]), "column 'city', row 0: got True, expected text"),
    ],
)
def test_a_small_arrow_array_is_told_by_its_first_wrong_value(encoders, column, values, message):
    with pytest.raises(ConfigError, match=message):
        encoders.encode({**RECORDS, column: values})


def test_a_missing_column_is_told(encoders):
    with pytest.raises(ConfigError, match="column 'item': missing, expected hits, age"):
        encoders.encode({name: values for name, values in RECORDS.items() if name != "item"})


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    directory = tmp_path / "dataset"
    spec = dataclasses.replace(SPEC, categorical=SPEC.categorical[1:2])
    write_dataset(spec, directory)
    with pytest.raises(DataNotFoundError, match=r"city.parquet: no such vocabulary"):
        Encoders.load(directory)
    Vocabulary("string", ["Oslo"], [1]).save(directory / "vocabularies" / "city.parquet")
    with pytest.raises(FormatError, match="column 'city': its vocabulary has 3 ids, expected 4"):
        Encoders.load(directory)
