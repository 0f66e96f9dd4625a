# SPDX-License-Identifier: Apache-2.0
"""Encoded rows -> data sets and HugeCTR's files, in order and shuffled."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from terarec.data.records import open_split
from terarec.errors import FormatError
from terarec.etl.engine.write import SinkOptions, create_sink
from terarec.etl.sink import SinkState
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock
from terarec.formats.hugectr import read_file_list
from terarec.formats.hugectr.records import read_records
from terarec.formats.hugectr.split_writer import read_keyset
from terarec.io.removal import MARKER
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn
from tests.errors import at
from tests.etl.engine.contents import read_split

SPEC = DatasetSpec(
    name="rows",
    storage="parquet",
    labels=(LabelColumn(name="y"),),
    dense=(DenseColumn(name="d0"), DenseColumn(name="d1")),
    categorical=(
        CategoricalColumn(name="c0", rows=100),
        CategoricalColumn(name="tags", rows=50, hotness=3),
        CategoricalColumn(name="c1", rows=7),
    ),
)


def block_of(ids: NDArray[np.int64]) -> ColumnBlock:
    """Rows that differ in all columns by their ids."""
    lengths = ids % 4
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return ColumnBlock(
        label=(ids % 2).astype(np.float32)[:, None],
        dense=np.stack([ids, -ids], axis=1).astype(np.float32),
        keys=(
            (ids % 100).astype(np.int32),
            Ragged(np.repeat(ids % 50, lengths).astype(np.int32), offsets),
            (ids % 7).astype(np.int32),
        ),
    )


def options(**changes: object) -> SinkOptions:
    """Small files, in order."""
    chosen = {
        "storage": "parquet",
        "rows_per_shard": 40,
        "seed": None,
        "memory_bytes": 1 << 26,
        "estimated_bytes": 1 << 10,
        "expected": {},
    }
    return SinkOptions(**{**chosen, **changes})  # type: ignore[arg-type]


def written(out: Path, chosen: SinkOptions, splits: dict[str, int], block_rows: int = 17) -> None:
    """Write so many rows of each split, ids rising through all of them."""
    spec = SPEC if chosen.storage != "hugectr_raw" else one_hot()
    first = 0
    with create_sink(spec, out, out, out / "work", chosen) as sink:
        for split, count in splits.items():
            for start in range(0, count, block_rows):
                ids = np.arange(first + start, first + min(start + block_rows, count))
                block = block_of(ids)
                sink.write(split, ids, block if spec is SPEC else without_lists(block))
            first += count
        sink.close()


def one_hot() -> DatasetSpec:
    """The columns without lists."""
    return dataclasses.replace(SPEC, categorical=(SPEC.categorical[0], SPEC.categorical[2]))


def without_lists(block: ColumnBlock) -> ColumnBlock:
    """The rows without their lists."""
    return ColumnBlock(label=block.label, dense=block.dense, keys=(block.keys[0], block.keys[2]))


def ids_of(block: ColumnBlock) -> NDArray[np.int64]:
    """The ids that rows were made of, all columns being right."""
    ids = block.dense[:, 0].astype(np.int64)
    expected = block_of(ids)
    np.testing.assert_array_equal(block.label, expected.label)
    for found, right in zip(block.keys, expected.keys, strict=True):
        for one, other in zip(found, right, strict=True) if isinstance(found, tuple) else [(found, right)]:
            np.testing.assert_array_equal(one, other)
    return ids


@pytest.mark.parametrize(
    ("expected", "sizes"), [({"train": 100}, [34, 33, 33]), ({}, [40, 40, 20]), ({"train": 90}, [30, 30, 30, 10])]
)
def test_shards_of_even_size(tmp_path: Path, expected: dict[str, int], sizes: list[int]) -> None:
    written(tmp_path, options(expected=expected), {"train": 100, "valid": 5})
    spec = read_dataset(tmp_path)
    assert [shard.rows for shard in spec.shards("train")] == sizes
    assert [shard.rows for shard in spec.shards("valid")] == [5]
    assert "test" not in spec.splits
    np.testing.assert_array_equal(ids_of(read_split(tmp_path, "train")), np.arange(100))


def test_a_shuffle_depends_on_seed_and_ids_alone(tmp_path: Path) -> None:
    splits = {"train": 1000, "valid": 30}
    written(tmp_path / "a", options(seed=7), splits)
    written(tmp_path / "b", options(seed=7, estimated_bytes=1 << 40, rows_per_shard=999), splits, block_rows=301)
    written(tmp_path / "c", options(seed=8), splits)
    order = ids_of(read_split(tmp_path / "a", "train"))
    np.testing.assert_array_equal(order, np.argsort(xxh64_int64(np.arange(1000), 7).view(np.uint64)))
    np.testing.assert_array_equal(order, ids_of(read_split(tmp_path / "b", "train")))
    assert not np.array_equal(order, ids_of(read_split(tmp_path / "c", "train")))
    np.testing.assert_array_equal(ids_of(read_split(tmp_path / "a", "valid")), np.arange(1000, 1030))


@pytest.mark.parametrize("kind", ["norm", "hugectr_parquet"])
def test_parts_of_hugectr_have_lists_and_keysets(tmp_path: Path, kind: str) -> None:
    written(tmp_path, options(storage=kind, expected={"train": 100}), {"train": 100, "valid": 5})
    records = read_records(tmp_path / "records.json")
    source = open_split(records, "train", tmp_path)
    read = [source.read(group)[0] for group in range(len(source.group_rows))]
    np.testing.assert_array_equal(np.concatenate([block.dense[:, 0] for block in read]), np.arange(100))
    parts = read_file_list(tmp_path / "train" / "_file_list.txt")
    assert len(parts) == 3
    ids = np.arange(34)
    expected = {*(ids % 100), *(100 + ids[ids % 4 > 0] % 50), *(150 + ids % 7)}
    assert read_keyset(Path(parts[0]).with_suffix(".keyset"), 4).tolist() == sorted(expected)
    assert read_file_list(Path(parts[0]).with_suffix(".txt")) == (parts[0],)
    whole = read_keyset(tmp_path / "train" / "_hugectr.keyset", 4).tolist()
    assert whole == sorted({*range(100), *range(100, 150), *range(150, 157)} - missing_tags())
    if kind == "hugectr_parquet":
        metadata = json.loads((tmp_path / "train" / "_metadata.json").read_text())
        assert [entry["num_rows"] for entry in metadata["file_stats"]] == [34, 33, 33]


def missing_tags() -> set[int]:
    """Tags that no row of 100 has: ids of lists that are always empty."""
    ids = np.arange(100)
    return set(range(100, 150)) - set((100 + ids[ids % 4 > 0] % 50).tolist())


def test_raw_records_are_one_file(tmp_path: Path) -> None:
    written(tmp_path, options(storage="hugectr_raw"), {"train": 100})
    source = open_split(read_records(tmp_path / "records.json"), "train", tmp_path)
    assert sum(source.group_rows) == 100
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["_hugectr.keyset", "data.bin"]


def test_an_error_leaves_no_unfinished_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        broken(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != MARKER]


def broken(out: Path) -> None:
    """Stop in the middle of a shard."""
    with create_sink(SPEC, out, out, out / "work", options(seed=1)) as sink:
        sink.write("valid", np.arange(10), block_of(np.arange(10)))
        sink.write("train", np.arange(10), block_of(np.arange(10)))
        raise RuntimeError("stop")


def test_damaged_files_of_a_shuffle_are_rejected(tmp_path: Path) -> None:
    begin = SinkState(spilled_rows=3, spilled_bytes=[8])
    (tmp_path / "work" / "shuffle").mkdir(parents=True)
    (tmp_path / "work" / "shuffle" / "00000.arrows").write_bytes(b"1234567")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/work/shuffle/00000.arrows")):
        create_sink(SPEC, tmp_path, tmp_path, tmp_path / "work", options(seed=1, begin=begin))
