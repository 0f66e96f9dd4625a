# SPDX-License-Identifier: Apache-2.0
"""Parquet shards: their schema, and one error per way to be wrong."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import FormatError
from terarec.formats.block import merge
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.shard import open_shard
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, MetadataColumn
from tests.errors import at
from tests.formats.samples import assert_same_rows, make_block, make_spec, write_split


def table_of(spec, block):
    columns = {"y0": pa.array(block.label[:, 0])}
    columns |= {f"I{i}": pa.array(np.ascontiguousarray(block.dense[:, i])) for i in range(len(spec.dense))}
    for column, keys in zip(spec.categorical, block.keys, strict=True):
        listed = isinstance(keys, tuple)
        columns[column.name] = (
            pa.LargeListArray.from_arrays(keys[1], keys[0]).cast(pa.list_(pa.int64())) if listed else keys
        )
    return pa.table(columns)


@pytest.fixture
def written(tmp_path):
    spec = make_spec()
    block = make_block(spec, 20)
    spec = write_split(tmp_path, spec, block, rows_per_group=8)
    return spec, block, tmp_path / spec.splits["train"][0].file


def test_schema_and_row_groups(written):
    spec, _, path = written
    schema = pq.read_schema(path)
    assert schema.names == ["y0", "I0", "I1", "C0", "C1"]
    assert [str(field.type) for field in schema][:4] == ["float", "float", "float", "int32"]
    assert schema.field("C1").type.value_type == pa.int32()
    assert not any(field.nullable for field in schema)
    assert open_shard(spec, path).group_rows == (8, 8, 4)


def test_keys_are_int64_everywhere_once_one_table_is_beyond_int32(tmp_path):
    spec = make_spec(hotness=(1, 1))
    wide = dataclasses.replace(spec.categorical[1], rows=2**31 + 1)
    spec = dataclasses.replace(spec, categorical=(spec.categorical[0], wide))
    path = tmp_path / "train" / "x.parquet"
    with ParquetShardWriter(path, spec) as writer:
        writer.write(np.ones((1, 1)), np.ones((1, 2)), [np.array([3]), np.array([2**31])])
        writer.close()
    assert [pq.read_schema(path).field(name).type for name in ("C0", "C1")] == [pa.int64(), pa.int64()]
    assert ParquetShard(path, spec).read_group(0).keys[1].tolist() == [2**31]


def test_shards_of_other_programs_may_have_more_columns_in_any_order_and_int64_keys(tmp_path):
    spec = make_spec()
    block = make_block(spec, 20)
    table = table_of(spec, block)
    table = table.select(table.column_names[::-1]).append_column("extra", pa.array(["x"] * 20))
    pq.write_table(table, tmp_path / "other.parquet", compression="zstd", row_group_size=20)
    assert_same_rows(ParquetShard(tmp_path / "other.parquet", spec, 20).read_group(0), block)


def test_row_groups_without_rows(tmp_path):
    spec = make_spec()
    table = table_of(spec, make_block(spec, 2))
    with pq.ParquetWriter(tmp_path / "other.parquet", table.schema) as writer:
        for rows in (0, 2, 0):
            writer.write_table(table.slice(0, rows))
    shard = ParquetShard(tmp_path / "other.parquet", spec, 2)
    blocks = [shard.read_group(index) for index in range(len(shard.group_rows))]
    assert_same_rows(merge(blocks), make_block(spec, 2))


def replaced(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


BROKEN = {
    "missing": (lambda t: t.drop_columns(["I1"]), (", column 'I1'", "missing")),
    "twice": (lambda t: t.append_column("I1", t["I1"]), (", column 'I1'", "there 2 times")),
    "double": (lambda t: replaced(t, "I0", t["I0"].cast(pa.float64())), (", column 'I0'",)),
    "float keys": (
        lambda t: replaced(t, "C0", t["C0"].cast(pa.float64())),
        (", column 'C0'", "type is double"),
    ),
    "scalar for list": (lambda t: replaced(t, "C1", t["C0"]), (", column 'C1'",)),
    "list for scalar": (lambda t: replaced(t, "C0", t["C1"]), (", column 'C0'", "type is list<element: int64>")),
    "fewer rows": (lambda t: t.slice(0, 19), ("", "")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_that_is_found_on_opening(tmp_path, case):
    spec = make_spec()
    change, place = BROKEN[case]
    path = tmp_path / "broken.parquet"
    pq.write_table(change(table_of(spec, make_block(spec, 20))), path)
    with pytest.raises(FormatError, check=at(f"{path}{place[0]}", *place[1:])) as caught:
        ParquetShard(path, spec, 20)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def with_value(column, row, value):
    values = column.to_pylist()
    values[row] = value
    return pa.array(values, type=column.type)


DAMAGED_ROWS = {
    "null label": ("y0", None, "1 null"),
    "null key": ("C0", None, "1 null"),
    "null list": ("C1", None, "1 null"),
    "null in list": ("C1", [1, None], "1 null"),
    "negative": ("C0", -1, "key -1 at position 4"),
    "too large": ("C0", 50, "key 50 at position 4"),
    "too large in list": ("C1", [1, 51], "key 51 at position 8"),
    "too many": ("C1", [1, 2, 3, 4], "row 4 holds 4 keys"),
}


@pytest.mark.parametrize("case", DAMAGED_ROWS)
def test_damage_that_is_found_on_reading(tmp_path, case):
    spec = make_spec()
    name, value, problem = DAMAGED_ROWS[case]
    table = table_of(spec, make_block(spec, 20))
    path = tmp_path / "broken.parquet"
    pq.write_table(replaced(table, name, with_value(table[name], 12, value)), path, row_group_size=8)
    shard = ParquetShard(path, spec, 20)
    shard.read_group(0)
    with pytest.raises(FormatError, check=at(f"{path}: row group 1, column '{name}'", problem)):
        shard.read_group(1)


def with_metadata(tmp_path, kind, array):
    """A shard of another program with the metadata column "user" and the weight "w"."""
    spec = make_spec(weight="w", metadata=(MetadataColumn(name="user", type=kind),))
    table = table_of(spec, make_block(make_spec(), 4)).append_column("w", pa.array([1, 0, 2, 0.5], pa.float32()))
    pq.write_table(table.append_column("user", array), tmp_path / "other.parquet")
    return ParquetShard(tmp_path / "other.parquet", spec, 4)


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("string", pa.array(["a", None, "", "\u00e4"])),
        ("string", pa.array(["a", None, "", "\u00e4"], pa.large_string())),
        ("int64", pa.array([2**63 - 1, None, 0, -(2**63)])),
        ("float64", pa.array([0.1, None, float("inf"), -0.0])),
    ],
)
def test_metadata_of_other_programs(tmp_path, kind, array):
    block = with_metadata(tmp_path, kind, array).read_group(0)
    assert block.metadata[0].to_pylist() == array.to_pylist()
    assert block.weight.tolist() == [1, 0, 2, 0.5]


@pytest.mark.parametrize(
    ("kind", "array", "problem"),
    [
        ("string", pa.array([1, 2, 3, 4]), "type is int64"),
        ("int64", pa.array([1, 2, 3, 4], pa.int32()), "type is int32"),
        ("float64", pa.array([1, 2, 3, 4], pa.float32()), "type is float"),
    ],
)
def test_metadata_of_another_type(tmp_path, kind, array, problem):
    with pytest.raises(FormatError, check=at(f"{tmp_path}/other.parquet, column 'user'", problem)):
        with_metadata(tmp_path, kind, array)


def test_metadata_that_is_not_utf_8(tmp_path):
    offsets = pa.array([0, 1, 2, 3, 4], pa.int32()).buffers()[1]
    array = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(b"ab\xffd")])
    shard = with_metadata(tmp_path, "string", array)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/other.parquet: row group 0, column 'user'")):
        shard.read_group(0)


@pytest.mark.parametrize("kept", [0, 3, 100, -9, -1])
def test_a_truncated_file(written, kept):
    spec, _, path = written
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError, check=at(path, "cannot be read as Parquet")):
        ParquetShard(path, spec)


def test_a_flipped_bit_fails_the_page_checksum(written):
    spec, block, path = written
    shard = ParquetShard(path, spec)
    content = bytearray(path.read_bytes())
    start = content.index(block.label[8:10, 0].tobytes())  # the second row group's labels
    content[start] ^= 1
    path.write_bytes(content)
    shard.read_group(0)
    with pytest.raises(FormatError, check=at(f"{path}: row group 1")):
        shard.read_group(1)


def test_a_file_of_something_else(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_text("label,C1\n0,5\n" * 10)
    with pytest.raises(FormatError, check=at(path, "cannot be read as Parquet")):
        ParquetShard(path, make_spec())


def test_row_groups_of_wide_data_are_shorter(tmp_path):
    spec = make_spec(hotness=(), dense=1)
    many = tuple(CategoricalColumn(name=f"C{i}", rows=9, hotness=1000) for i in range(20))
    spec = dataclasses.replace(spec, categorical=many)
    block = make_block(spec, 1500)
    path = tmp_path / "train" / "x.parquet"
    with ParquetShardWriter(path, spec) as writer:
        empty = [Ragged(np.zeros(0, np.int64), np.zeros(1501, np.int64))] * 20
        writer.write(block.label, block.dense, empty)
        writer.close()
    assert ParquetShard(path, spec).group_rows == (1024, 476)
