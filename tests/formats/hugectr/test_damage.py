# SPDX-License-Identifier: Apache-2.0
"""S3: HugeCTR's files with bits flipped or cut short are found, harmless or rejected.

Most of these formats have no checksum: a flipped bit of a value is another value, and no one can tell. Sizes and
counts are compared with the file before memory is taken for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import FormatError
from terarec.formats.dataset import read_parquet_metadata, write_parquet_metadata
from terarec.formats.hugectr import read_file_list, write_file_list
from terarec.formats.hugectr.collection import DumpedTable, open_collection, write_collection
from terarec.formats.hugectr.norm import NormFile, NormWriter
from terarec.formats.hugectr.parquet import ParquetRecordFile
from terarec.formats.hugectr.raw import FixedRecordFile, FixedRecordWriter, raw_types
from terarec.formats.hugectr.split_writer import read_keyset, write_keyset
from terarec.formats.hugectr.weights import (
    BatchNormStatistics,
    SparseFileLayout,
    SparseRows,
    StateLayout,
    open_sparse_folder,
    open_sparse_states,
    read_floats,
    read_sparse_file,
    read_statistics,
    write_floats,
    write_sparse_file,
    write_sparse_folder,
    write_sparse_states,
    write_statistics,
)
from tests.formats.damage import check_damage
from tests.formats.hugectr.samples import bags, make_layout, make_rows

NORM = make_layout(slots=((1, True), (3, False)))
RAW = make_layout(slots=((1, True),) * 2)
ROWS = SparseRows(np.arange(20), np.ones((20, 3), np.float32), np.arange(20, dtype=np.uint64))
SPARSE_FILE = SparseFileLayout(width=3, key_bytes=8, has_slots=True)


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a folder gets one, its reader, and whether it has a checksum."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    is_checked: bool = False


def plain(block) -> object:
    return block.label.tobytes(), block.dense.tobytes(), [bags(column) for column in block.keys]


def write_norm(checksum: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with NormWriter(folder / "x", NORM, checksum=checksum) as writer:
            writer.write(*make_rows(NORM, 30))
            writer.close()

    return write


def read_norm(checksum: bool) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        block, wrong = NormFile(folder / "x", NORM, checksum=checksum).read()
        if wrong:
            raise FormatError("found: records whose checksum is wrong are left out, and counted")
        return plain(block)

    return read


def write_raw(folder: Path) -> None:
    with FixedRecordWriter(folder / "x", RAW, raw_types(RAW, float_label_dense=True)) as writer:
        writer.write(*make_rows(RAW, 30))
        writer.close()


def read_raw(folder: Path) -> object:
    file = FixedRecordFile(folder / "x", RAW, raw_types(RAW, float_label_dense=True))
    return plain(file.read(0, file.num_records))


def sparse(chunks) -> object:
    return [
        (part.keys.tobytes(), part.vectors.tobytes(), None if part.slots is None else part.slots.tobytes())
        for part in chunks
    ]


def write_states(folder: Path) -> None:
    def chunks(state: int, device: int):
        yield np.full((20, 3), state + device, np.float32)

    write_sparse_states(folder / "x", StateLayout(num_states=2, devices=2, rows=20, width=3), chunks)


def read_states(folder: Path) -> object:
    states = open_sparse_states(folder / "x", num_states=2, devices=2, width=3)
    return [states.read(state, device, 0, states.layout.rows).tobytes() for state in range(2) for device in range(2)]


def write_collection_folder(folder: Path) -> None:
    table = DumpedTable(table_id=1, count=20, width=3)
    write_collection(folder / "c", [table], lambda _: iter([ROWS._replace(slots=None)]), key_bytes=8)


def read_collection_folder(folder: Path) -> object:
    dump = open_collection(folder / "c")
    return [(table, sparse(dump.chunks(table))) for table in dump.tables]


def write_parquet(folder: Path) -> None:
    columns = {
        "y": pa.array(np.arange(200) % 2, pa.float32()),
        "a": pa.array(np.arange(200), pa.float32()),
        "k": pa.array(np.arange(200), pa.int64()),
    }
    pq.write_table(pa.table(columns), folder / "x.parquet", write_page_checksum=True, write_statistics=False)
    write_parquet_metadata(folder / "_metadata.json", [("x.parquet", 200)], ["y"], ["a"], ["k"])


def read_parquet(folder: Path) -> object:
    layout = make_layout(dense=1, slots=((1, True),), key_bytes=8)
    metadata = read_parquet_metadata(folder / "_metadata.json")
    return plain(ParquetRecordFile(str(folder / "x.parquet"), layout, metadata).read(0))


KINDS = {
    "norm": Kind(write_norm(True), read_norm(True), is_checked=True),
    "norm without checksums": Kind(write_norm(False), read_norm(False)),
    "raw": Kind(write_raw, read_raw),
    "parquet": Kind(write_parquet, read_parquet, is_checked=True),
    "file list": Kind(
        lambda folder: write_file_list(folder / "x", ["a.data", "/b/c.data"]),
        lambda folder: read_file_list(folder / "x"),
    ),
    "keyset": Kind(
        lambda folder: write_keyset(folder / "x", np.arange(50), 8),
        lambda folder: read_keyset(folder / "x", 8).tobytes(),
    ),
    "dense model": Kind(
        lambda folder: write_floats(folder / "x", [np.arange(50, dtype=np.float32)]),
        lambda folder: read_floats(folder / "x", [("w", (50,))])[0].tobytes(),
    ),
    "batch norm": Kind(
        lambda folder: write_statistics(folder / "x", [BatchNormStatistics(*np.ones((2, 9), np.float32))]),
        lambda folder: [(mean.tobytes(), var.tobytes()) for mean, var in read_statistics(folder / "x")],
    ),
    "sparse folder": Kind(
        lambda folder: write_sparse_folder(folder / "s", [ROWS]),
        lambda folder: sparse(open_sparse_folder(folder / "s", 3).chunks()),
    ),
    "sparse file": Kind(
        lambda folder: write_sparse_file(folder / "x", SPARSE_FILE, [ROWS]),
        lambda folder: sparse(read_sparse_file(folder / "x", SPARSE_FILE)),
    ),
    "sparse states": Kind(write_states, read_states),
    "collection": Kind(write_collection_folder, read_collection_folder),
}


def check(folder: Path, kind: Kind, *, seed: int, count: int) -> None:
    kind.write(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        is_checked = kind.is_checked and path.suffix != ".json"
        rejected = check_damage(
            path,
            lambda: kind.read(folder),
            seed=seed,
            count=count,
            may_differ=lambda _: not is_checked,  # noqa: B023
        )
        assert rejected >= count // 4 or not is_checked  # what is cut short, at least


@pytest.mark.parametrize("name", KINDS)
def test_s3_a_damaged_file_is_found_harmless_or_rejected(tmp_path: Path, name: str) -> None:
    check(tmp_path, KINDS[name], seed=1, count=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", [2, 3])
def test_s3_many_damaged_files_are_found_harmless_or_rejected(tmp_path: Path, name: str, seed: int) -> None:
    check(tmp_path, KINDS[name], seed=seed, count=400)
