"""Vocabularies: ids by frequency, a file that holds the exact mapping, and the way back."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.etl import Vocabulary

VALUES = {
    "string": st.text(min_size=1, max_size=6),
    "hex32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
}


def counted(value_type):
    return st.dictionaries(VALUES[value_type], st.integers(1, 4), max_size=30)


@pytest.mark.parametrize("value_type", VALUES)
@given(data=st.data(), min_count=st.integers(1, 3))
def test_ids_fall_with_the_count_and_rise_with_the_value(value_type, data, min_count):
    counts = data.draw(counted(value_type))
    vocabulary = Vocabulary.from_counts(
        value_type,
        pa.array(
            list(counts), pa.string() if value_type == "string" else pa.uint32() if value_type == "hex32" else None
        ),
        list(counts.values()),
        min_count,
    )
    kept = [value for value, count in counts.items() if count >= min_count]
    kept.sort(key=lambda value: (-counts[value], value.encode() if value_type == "string" else value))
    assert vocabulary.values.to_pylist() == kept
    assert vocabulary.counts.tolist() == [counts[value] for value in kept]
    assert vocabulary.rows == len(kept) + 2
    raw = [f"{value:x}" for value in kept] if value_type == "hex32" else kept
    assert vocabulary.ids.find_list(raw).tolist() == list(range(2, vocabulary.rows))


@pytest.mark.parametrize(
    ("value_type", "values", "raw"),
    [
        ("string", ["b", "a", "\u00e9t\u00e9"], ["b", "a", "\u00e9t\u00e9"]),
        ("hex32", np.array([10, 0], dtype=np.uint32), ["0000000a", "00000000"]),
        ("int64", [-5, 2**40], [-5, 2**40]),
    ],
)
def test_a_saved_vocabulary_comes_back_and_leads_back(tmp_path, value_type, values, raw):
    path = tmp_path / "sub" / "v.parquet"
    Vocabulary(value_type, values, range(len(raw), 0, -1)).save(path)
    loaded = Vocabulary.load(path, value_type)
    assert loaded.inverse([0, 1, *range(2, loaded.rows)]) == [None, None, *raw]
    assert loaded.counts.tolist() == list(range(len(raw), 0, -1))
    assert pq.read_schema(path).names == ["value", "count"]
    with pytest.raises(IndexError, match=f"got id {loaded.rows}"):
        loaded.inverse([loaded.rows])


def test_missing_values_get_no_id_of_their_own():
    vocabulary = Vocabulary.from_counts("string", ["", None, "x"], [5, 4, 3], 1)
    assert vocabulary.values.to_pylist() == ["x"]


def test_an_empty_vocabulary_knows_nothing(tmp_path):
    Vocabulary("string", pa.array([], pa.large_string()), []).save(tmp_path / "v.parquet")
    vocabulary = Vocabulary.load(tmp_path / "v.parquet", "string")
    assert vocabulary.rows == 2
    assert vocabulary.ids.find_list(["a", None]).tolist() == [1, 0]


def test_damaged_vocabularies_are_told_in_one_line(tmp_path):
    path = tmp_path / "v.parquet"
    with pytest.raises(DataNotFoundError, match=r"v\.parquet: no such vocabulary"):
        Vocabulary.load(path, "string")
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(FormatError, match=r"v\.parquet: cannot be read as Parquet"):
        Vocabulary.load(path, "string")
    for table, message in (
        (
            pa.table({"value": [1, 2], "count": [1, 1]}),
            "got columns value: int64, count: int64, expected value: large_st",
        ),
        (pa.table({"value": pa.array(["a", None], pa.large_string()), "count": [1, 1]}), "holds nulls"),
        (pa.table({"value": pa.array(["a", "a"], pa.large_string()), "count": [1, 1]}), "position 1 occurs twice"),
    ):
        pq.write_table(table, path)
        with pytest.raises(FormatError, match=message):
            Vocabulary.load(path, "string")
