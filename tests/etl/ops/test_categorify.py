# SPDX-License-Identifier: Apache-2.0
"""Vocabularies against plain Python, on the disk, and beyond memory."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError
from terarec.etl.columns import ColumnType, kind_of
from terarec.etl.ops import Categorify
from tests.errors import at
from tests.etl.column_values import block_of, values_of
from tests.etl.ops.fitting import blocks_of, fit, run_record_functions, saved
from tests.kernels.plain_encoding import xxh64_int64, xxh64_text
from tests.params import examples

VALUES = {
    "text": st.none() | st.sampled_from(["", "a", "b", "B", "bb", "\u00fc", "\U0001f600", "\uffff"]),
    "integer": st.none() | st.integers(-3, 3) | st.sampled_from([2**63 - 1, -(2**63)]),
    "hex32": st.none() | st.integers(0, 5) | st.just(2**32 - 1),
}


def hashed(kind, value):
    if kind == "text":
        encoded = np.frombuffer(value.encode(), dtype=np.uint8)
        return int(xxh64_text(encoded, np.array([0, len(encoded)]), 42)[0])
    return int(xxh64_int64(np.array([value], dtype=np.int64), 42)[0])


def ids_of(kind, train, later, step):
    counts = Counter(value for value in train if value not in (None, ""))
    order = sorted(counts, key=lambda value: (-counts[value], value.encode() if kind == "text" else value))
    kept = [value for value in order if counts[value] >= step.min_count][: step.max_size]
    ids = {value: 1 + step.hash_buckets + place for place, value in enumerate(kept)}
    return [
        0 if value in (None, "") else ids.get(value) or 1 + hashed(kind, value) % step.hash_buckets for value in later
    ]


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=examples(50))
@given(data=st.data())
def test_ids_by_frequency(kind, data):
    values = st.lists(VALUES[kind], max_size=40)
    train, later = data.draw(values), data.draw(values)
    step = Categorify(
        columns=("x",),
        min_count=data.draw(st.integers(1, 3)),
        max_size=data.draw(st.none() | st.integers(1, 4)),
        hash_buckets=data.draw(st.sampled_from([1, 2, 7])),
        outputs=("y",),
    )
    code, block = step, block_of(x=(kind, train))
    state = fit(step, blocks_of(block, 7))
    made = code.transform(block_of(x=(kind, later)), state).columns["y"]
    assert kind_of(made) == "id"
    expected = ids_of(kind, train, later, step)
    assert values_of(made) == expected
    back = code.values_of_ids("x", expected, state)
    known = [id_ > step.hash_buckets for id_ in expected]
    spelled = [f"{v:08x}" if kind == "hex32" and v is not None else v for v in later]
    assert dict(run_record_functions(code, state, block_of(x=(kind, later)))) == {"y": expected}
    assert back == [value if is_known else None for value, is_known in zip(spelled, known, strict=True)]


def test_a_joint_vocabulary_and_lists():
    step = Categorify(columns=("a", "b"), joint=True)
    block = block_of(a=("text", ["x", "y", None]), b=("text", [["z", "x"], [], ["x", None]]))
    code, state = step, fit(step, [block])
    made = code.transform(block, state)
    assert values_of(made.columns["a"]) == [2, 3, 0]
    assert values_of(made.columns["b"]) == [[4, 2], [], [2, 0]]
    assert code.cardinalities({}, state) == {"a": 5, "b": 5}
    assert code.values_of_ids("b", [4, 2], saved(code, state)) == ["z", "x"]


def test_a_joint_vocabulary_is_of_one_kind():
    code = Categorify(columns=("a", "b"), joint=True)
    with pytest.raises(ConfigError, check=at("column 'b'")):
        code.output_types({"a": ColumnType("text"), "b": ColumnType("hex32")})


def test_ids_outside_the_vocabulary_have_no_value():
    step = Categorify(columns=("x",))
    state = fit(step, [block_of(x=("integer", [5, 5, 6]))])
    with pytest.raises(IndexError, match="got id 4, expected 0 <= id < 4"):
        step.values_of_ids("x", [4], state)


def test_the_file_is_the_mapping(tmp_path):
    step = Categorify(columns=("a/b",), hash_buckets=3)
    block = block_of(**{"a/b": ("hex32", [255, 1, 255, None])})
    fit(step, [block]).save(tmp_path, "03-categorify")
    table = pq.read_table(tmp_path / "03-categorify-a%2Fb.parquet")
    assert table.to_pydict() == {"value": [255, 1], "count": [2, 1]}
    assert table.schema.types == [pa.uint32(), pa.int64()]


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ({"value": ["a"], "count": [1]}, ("/s-x.parquet", "got columns value: string, count: int64")),
        ({"value": pa.array([1, None]), "count": [1, 2]}, ("/s-x.parquet, column 'value'",)),
        ({"value": pa.array([1, 1]), "count": [1, 2]}, ("/s-x.parquet", "the value at position 1 occurs twice")),
        ({"value": pa.array([1, 1])}, ("/s-x.parquet", "expected value: ")),
    ],
)
def test_damaged_files_are_rejected(tmp_path, table, place):
    pq.write_table(pa.table(table), tmp_path / "s-x.parquet")
    with pytest.raises(FormatError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
        Categorify(columns=("x",)).load_state(tmp_path, "s")


def test_absent_and_foreign_files_are_rejected(tmp_path):
    code = Categorify(columns=("x",))
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/s-x.parquet")):
        code.load_state(tmp_path, "s")
    (tmp_path / "s-x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/s-x.parquet")):
        code.load_state(tmp_path, "s")


def many(kind, rows=60_000):
    """Values of a long tail, in blocks."""
    numbers = (np.random.default_rng(2).pareto(0.7, rows) * 50).astype(np.int64) % 2**31
    values = [f"value {number}" for number in numbers] if kind == "text" else numbers.tolist()
    return blocks_of(block_of(x=(kind, values), other=(kind, values[::-1])), 10_000)


@pytest.mark.parametrize("kind", VALUES)
def test_counts_beyond_memory_go_to_the_disk_and_give_the_same_ids(kind, caplog):
    step = Categorify(columns=("x", "other"), min_count=2, max_size=2000)
    blocks, memory = many(kind), {"text": 400_000, "integer": 250_000, "hex32": 150_000}[kind]
    expected, found = fit(step, blocks), fit(step, blocks, memory_bytes=memory, threads=2)
    for name in ("x", "other"):
        assert len(expected.ids[name].values) == 2000
        assert found.ids[name].values.equals(expected.ids[name].values)
        assert found.counts[name].equals(expected.counts[name])
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert "is spilled to partitions on disk" in logged[0]


def test_a_vocabulary_beyond_memory_is_rejected_with_its_size_and_what_helps():
    blocks = many("text")
    size = len({value for block in blocks for value in values_of(block.columns["x"])})
    with pytest.raises(StorageError) as caught:
        fit(Categorify(columns=("x",)), blocks, memory_bytes=150_000)
    message = str(caught.value)
    assert message.startswith(f"column 'x': its vocabulary of {size:,} values needs about ")
    assert " KiB are left; a greater min_count (now 1), a max_size (now none), HashBucket or more memory" in message


def test_no_more_buckets_than_the_core_takes():
    """More of them ended the run after the fit."""
    assert Categorify(columns=("x",), hash_buckets=2**31 - 1).hash_buckets == 2**31 - 1
    with pytest.raises(ConfigError, check=at("Categorify.hash_buckets")):
        Categorify(columns=("x",), hash_buckets=2**31)
