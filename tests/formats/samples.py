# SPDX-License-Identifier: Apache-2.0
"""Small data sets for tests: columns, rows made from a seed, and files on disk."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from terarec.formats import write_dataset
from terarec.formats.block import ColumnBlock, Keys, slice_rows
from terarec.formats.parquet import ParquetShardWriter
from terarec.formats.shard import create_shard, shard_path
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, MetadataColumn

METADATA = tuple(
    MetadataColumn(name=name, type=kind) for name, kind in (("row", "int64"), ("price", "float64"), ("note", "string"))
)
"""What `make_block` makes metadata for."""


def make_spec(
    storage="parquet", *, labels=1, dense=2, hotness=(1, 3), rows=50, weight=None, metadata=()
) -> DatasetSpec:
    return DatasetSpec(
        name="tiny",
        storage=storage,
        labels=tuple(LabelColumn(name=f"y{i}") for i in range(labels)),
        dense=tuple(DenseColumn(name=f"I{i}") for i in range(dense)),
        categorical=tuple(CategoricalColumn(name=f"C{i}", rows=rows + i, hotness=hot) for i, hot in enumerate(hotness)),
        weight=weight,
        metadata=metadata,
    )


def make_block(spec: DatasetSpec, num_rows: int, seed: int = 0) -> ColumnBlock:
    """Rows whose first label counts them, which distinguishes them, as do weights and `METADATA`."""
    rng = np.random.default_rng(seed)
    label = rng.random((num_rows, len(spec.labels)), dtype=np.float32)
    label[:, 0] = np.arange(num_rows)
    keys: list[Keys] = []
    for column in spec.categorical:
        if column.hotness == 1:
            keys.append(rng.integers(0, column.rows, num_rows))
            continue
        low = column.hotness if spec.storage == "raw" else 0
        offsets = np.concatenate([[0], np.cumsum(rng.integers(low, column.hotness + 1, num_rows))]).astype(np.int64)
        keys.append(Ragged(rng.integers(0, column.rows, offsets[-1]), offsets))
    dense = rng.standard_normal((num_rows, len(spec.dense))).astype(np.float32)
    weight = None if spec.weight is None else (np.arange(num_rows) / 4).astype(np.float32)
    numbers = range(num_rows)
    values = {
        "row": pa.array([None if row % 5 == 3 else row - 2**62 for row in numbers], pa.int64()),
        "price": pa.array([None if row % 7 == 1 else row / 3 for row in numbers], pa.float64()),
        "note": pa.array([None if row % 3 == 2 else f"ä{row}" * (row % 4) for row in numbers], pa.large_string()),
    }
    metadata = tuple(values[column.name] for column in spec.metadata)
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys), weight=weight, metadata=metadata)


def write_split(directory: Path, spec: DatasetSpec, block: ColumnBlock, cuts=(), rows_per_group=None) -> DatasetSpec:
    """Write `block` as split "train", in shards cut at the rows `cuts`; returns the spec with the split."""
    shards = []
    bounds = [0, *cuts, block.num_rows]
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        path = shard_path(directory, spec, "train", index)
        small = spec.storage == "parquet" and rows_per_group is not None
        writer = ParquetShardWriter(path, spec, rows_per_group=rows_per_group) if small else create_shard(spec, path)
        with writer:
            writer.write_block(slice_rows(block, start, stop))
            shards.append(writer.close())
    spec = dataclasses.replace(spec, splits={"train": tuple(shards)})
    write_dataset(spec, directory)
    return spec


def assert_same_rows(found: ColumnBlock, expected: ColumnBlock) -> None:
    np.testing.assert_array_equal(found.label, expected.label)
    np.testing.assert_array_equal(found.dense, expected.dense)
    assert found.label.dtype == found.dense.dtype == np.float32
    assert len(found.keys) == len(expected.keys)
    for ours, theirs in zip(found.keys, expected.keys, strict=True):
        assert isinstance(ours, tuple) == isinstance(theirs, tuple)
        if isinstance(ours, tuple):
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_array_equal(ours[1], theirs[1])
        else:
            np.testing.assert_array_equal(ours, theirs)
    assert (found.weight is None) == (expected.weight is None)
    if found.weight is not None:
        np.testing.assert_array_equal(found.weight, expected.weight)
        assert found.weight.dtype == np.float32
    assert len(found.metadata) == len(expected.metadata)
    for ours, theirs in zip(found.metadata, expected.metadata, strict=True):
        assert ours.equals(theirs)


@st.composite
def specs(draw, storage):
    dense = draw(st.integers(0, 3))
    hotness = draw(st.lists(st.integers(1, 4), min_size=0 if dense else 1, max_size=4))
    return make_spec(
        storage,
        labels=draw(st.integers(1, 2)),
        dense=dense,
        hotness=tuple(hotness),
        rows=draw(st.integers(1, 2**31 - 9)),
        weight=draw(st.sampled_from([None, "w"])),
        metadata=tuple(draw(st.permutations(METADATA)))[: draw(st.integers(0, 3 if storage == "parquet" else 0))],
    )
