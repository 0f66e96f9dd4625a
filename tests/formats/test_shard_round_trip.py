# SPDX-License-Identifier: Apache-2.0
"""What every shard format promises: rows written are the rows read, however they are cut."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.block import merge, slice_rows
from terarec.formats.parquet import ParquetShardWriter
from terarec.formats.shard import create_shard, open_shard, shard_path
from terarec.ragged import Ragged
from tests.errors import at
from tests.formats.samples import METADATA, assert_same_rows, make_block, make_spec, specs
from tests.params import examples

STORAGES = ("parquet", "raw")


def write_in_pieces(writer, block, cuts):
    with writer:
        for start, stop in zip([0, *cuts], [*cuts, block.num_rows], strict=True):
            writer.write_block(slice_rows(block, start, stop))
        return writer.close()


def read_all(shard):
    return merge([shard.read_group(index) for index in range(len(shard.group_rows))])


@pytest.mark.parametrize("storage", STORAGES)
@given(data=st.data())
@settings(max_examples=examples(30))
def test_rows_come_back_as_written(tmp_path_factory, storage, data):
    spec = data.draw(specs(storage))
    num_rows = data.draw(st.integers(1, 40))
    block = make_block(spec, num_rows, seed=data.draw(st.integers(0, 99)))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=3)))
    path = shard_path(tmp_path_factory.mktemp("round"), spec, "train", 0)
    if storage == "parquet":
        writer = ParquetShardWriter(path, spec, rows_per_group=data.draw(st.integers(1, 50)))
    else:
        writer = create_shard(spec, path)
    entry = write_in_pieces(writer, block, cuts)
    assert (entry.file, entry.rows) == (f"train/{path.name}", num_rows)
    shard = open_shard(spec, path, num_rows)
    assert shard.num_rows == sum(shard.group_rows) == num_rows
    assert_same_rows(read_all(shard), block)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_shard_without_rows(tmp_path, storage):
    spec = make_spec(storage)
    path = shard_path(tmp_path, spec, "train", 0)
    with create_shard(spec, path) as writer:
        assert writer.close().rows == 0
    assert open_shard(spec, path, 0).group_rows == ()


@pytest.mark.parametrize("storage", STORAGES)
def test_more_rows_than_a_group(tmp_path, storage):
    spec = make_spec(storage, hotness=(1,))
    block = make_block(spec, 70_000)
    path = shard_path(tmp_path, spec, "train", 3)
    write_in_pieces(create_shard(spec, path), block, [])
    shard = open_shard(spec, path)
    assert shard.group_rows == (65_536, 70_000 - 65_536)
    assert_same_rows(shard.read_group(1), slice_rows(block, 65_536, 70_000))


@pytest.mark.parametrize("storage", STORAGES)
def test_callers_may_reuse_their_arrays(tmp_path, storage):
    spec = make_spec(storage)
    block = make_block(spec, 9)
    path = shard_path(tmp_path, spec, "train", 0)
    label, dense = block.label.copy(), block.dense.copy()
    with create_shard(spec, path) as writer:
        writer.write(label, dense, block.keys)
        label[:], dense[:] = -1, -1
        writer.close()
    assert_same_rows(read_all(open_shard(spec, path)), block)


@pytest.mark.parametrize("storage", STORAGES)
def test_an_abandoned_writer_leaves_nothing(tmp_path, storage):
    spec = make_spec(storage)
    path = shard_path(tmp_path, spec, "train", 0)
    block = make_block(spec, 9)

    def fail_in_the_middle():
        with create_shard(spec, path) as writer:
            writer.write(block.label, block.dense, block.keys)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_in_the_middle()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("storage", STORAGES)
def test_an_interrupted_rewrite_keeps_the_old_shard(tmp_path, storage):
    spec = make_spec(storage)
    path = shard_path(tmp_path, spec, "train", 0)
    block = make_block(spec, 9)
    write_in_pieces(create_shard(spec, path), block, [])
    with create_shard(spec, path) as writer:
        writer.write(block.label[:2], block.dense[:2], slice_rows(block, 0, 2).keys)
    assert_same_rows(read_all(open_shard(spec, path, 9)), block)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_missing_shard(tmp_path, storage):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        open_shard(make_spec(storage), tmp_path / "absent", 3)


def bad_arguments(block):
    """(what is wrong, arguments, place and problem)."""
    label, dense, (scalar, (values, offsets)) = block.label, block.dense, block.keys
    listed = Ragged(values, offsets)
    yield "label columns", (label[:, :0], dense, (scalar, listed)), ("", "label [9, 0]")
    yield "label is flat", (label[:, 0], dense, (scalar, listed)), ("", "label [9]")
    yield "dense rows", (label, dense[:5], (scalar, listed)), ("", "dense [5, 2]")
    yield "a column too few", (label, dense, (scalar,)), ("", "keys of 1 columns")
    yield "too few keys", (label, dense, (scalar[:4], listed)), (", column 'C0'", "got 4 keys for 9 rows")
    yield "float keys", (label, dense, (scalar * 1.5, listed)), (", column 'C0'", "got float64")
    yield "list for scalar", (label, dense, (listed, listed)), (", column 'C0'", "got Ragged where hotness is 1")
    yield (
        "scalar for list",
        (label, dense, (scalar, scalar)),
        (", column 'C1'", "got ndarray where hotness is 3"),
    )
    yield (
        "a plain tuple",
        (label, dense, (scalar, (values, offsets))),
        (", column 'C1'", "got tuple where hotness is 3"),
    )
    yield (
        "offsets",
        (label, dense, (scalar, Ragged(values, offsets[:-1]))),
        (", column 'C1'", "got offsets [9]"),
    )
    yield "negative key", (label, dense, (scalar - 60, listed)), (", column 'C0'", "expected 0 <= key < 50")
    yield (
        "large key",
        (label, dense, (scalar, Ragged(values + 51, offsets))),
        (", column 'C1'", "expected 0 <= key < 51"),
    )
    crowded = np.array([0, *range(1, 9), len(values)])
    yield (
        "too many keys",
        (label, dense, (scalar, Ragged(values, crowded))),
        (", column 'C1'", "row 8 holds "),
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("weight", [-1e-9, float("nan"), float("inf"), -float("inf")])
def test_weights_are_finite_and_not_negative(tmp_path, storage, weight):
    spec = make_spec(storage, weight="w")
    block = make_block(spec, 9)
    path = shard_path(tmp_path, spec, "train", 0)
    bad = dataclasses.replace(block, weight=np.where(np.arange(9) == 4, np.float32(weight), block.weight))
    where = ", column 'w'"
    with create_shard(spec, path) as writer:
        with pytest.raises(FormatError, check=at(f"{path}{where}")):
            writer.write_block(bad)
        with pytest.raises(FormatError, check=at(f"{path}, column 'w'")):
            writer.write(block.label, block.dense, block.keys, np.full(9, 1e39))
        writer.write_block(block)
        writer.close()
    assert_same_rows(read_all(open_shard(spec, path)), block)
    if storage == "parquet":
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index("w"), "w", pa.array(bad.weight)), path)
    else:
        content = bytearray(path.read_bytes())
        record = len(content) // 9
        content[record * 5 - 4 : record * 5] = np.float32(weight).tobytes()
        path.write_bytes(content)
    with pytest.raises(FormatError, check=at(f"{path}: row group 0, column 'w'")):
        open_shard(spec, path).read_group(0)


def wrong_sample_columns(block):
    """(what is given as weight and metadata, place and problem)."""
    weight, metadata = block.weight, block.metadata
    yield (None, metadata), (", column 'w'", "got no weights")
    yield (weight[:4], metadata), (", column 'w'", "got weights float32[4]")
    yield (weight.astype(object), metadata), (", column 'w'", "got weights object[9]")
    yield (weight, metadata[:2]), ("", "got 2 metadata columns")
    yield (weight, (metadata[0][:3], *metadata[1:])), (", column 'row'", "got 3 values of int64")
    yield (weight, (metadata[1], *metadata[1:])), (", column 'row'", "got 9 values of double")


@pytest.mark.parametrize("case", range(6))
def test_weights_and_metadata_that_are_not_those_of_the_data_set(tmp_path, case):
    spec = make_spec(weight="w", metadata=METADATA)
    block = make_block(spec, 9)
    (weight, metadata), (place, problem) = list(wrong_sample_columns(block))[case]
    path = shard_path(tmp_path, spec, "train", 0)
    with (
        create_shard(spec, path) as writer,
        pytest.raises(FormatError, check=at(f"{path}{place}", problem)),
    ):
        writer.write(block.label, block.dense, block.keys, weight, metadata)
    with (
        create_shard(make_spec(), shard_path(tmp_path, spec, "train", 0)) as writer,
        pytest.raises(FormatError, check=at(path, "got weights, expected none")),
    ):
        writer.write(block.label, block.dense, block.keys, block.weight)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", range(13))
def test_what_a_writer_rejects(tmp_path, storage, case):
    spec = make_spec(storage)
    block = make_block(spec, 9, seed=1)
    _, arguments, (place, problem) = list(bad_arguments(block))[case]
    path = shard_path(tmp_path, spec, "train", 0)
    with create_shard(spec, path) as writer:
        with pytest.raises(FormatError, check=at(f"{path}{place}", problem)):
            writer.write(*arguments)
        writer.write(block.label, block.dense, block.keys)
        assert writer.close().rows == 9
    assert_same_rows(read_all(open_shard(spec, path)), block)
