# SPDX-License-Identifier: Apache-2.0
"""Compare the samples per second from HugeCTR's files to `Batch` with NumPy, PyArrow and torch, on Criteo-shaped rows.

The limit is the time in which one thread reads the bytes without using them; for Parquet, it reads and decompresses
the row groups with PyArrow. The peers give the same label, dense numbers and keys (float32, int64 slot by slot, offsets
added), but no offsets of bags. They are ``numpy.memmap`` under a torch ``DataLoader`` of two worker processes for files
of records of one size, and ``pyarrow.dataset`` for Parquet. The peer of Norm assumes records of one size, and does not
verify checksums. Files are in the page cache.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from reader import CARDINALITIES, scan_parquet
from record import Row, append_rows, measure_in_turns
from torch.utils.data import DataLoader, Dataset

from terarec.apps.synthetic.records import RecordGenerator, generate_records
from terarec.data.records import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordReader
from terarec.data.records.sources import RecordSource
from terarec.spec import RecordLayout, SparseInput

ROWS_PER_FILE = 65_536
LAYOUT = RecordLayout(
    label_dim=1,
    dense_dim=13,
    inputs=(SparseInput(name="data", nnz_per_slot=(1,) * len(CARDINALITIES), is_fixed_length=True),),
    slot_sizes=CARDINALITIES,
)
OFFSETS = np.array(list(accumulate(CARDINALITIES, initial=0))[:-1])
RAW_RECORD = np.dtype([("label", "<i4", (1,)), ("dense", "<i4", (13,)), ("keys", "<i4", (26,))])
NORM_SLOT = np.dtype([("count", "<i4"), ("key", "<u4")])
NORM_RECORD = np.dtype(
    [("size", "<i4"), ("label", "<f4", (1,)), ("dense", "<f4", (13,)), ("keys", NORM_SLOT, (26,)), ("sum", "u1")]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=524_288)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", default="raw,raw_async,norm,parquet")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = [compare(kind, Path(directory) / kind, options) for kind in options.kinds.split(",")]
    append_rows("hugectr_reader", rows, dry=options.dry)


def compare(kind: str, directory: Path, options: argparse.Namespace) -> Row:
    """Time the bare scan, the reader and its peer in turns."""
    generator = RecordGenerator(kind=kind, layout=LAYOUT, alpha=1.2)
    is_listed = kind in ("norm", "parquet")
    num_files, rows = (options.rows // ROWS_PER_FILE, ROWS_PER_FILE) if is_listed else (1, options.rows)
    made = generate_records(generator, directory / "data", num_files=num_files, rows_per_file=rows)
    files = [Path(file) for file in made.files]
    source = open_source(kind, directory / "data", made.rows)
    name, peer = peer_of(kind, files, options.batch)
    timings = measure_in_turns(
        {"scan": lambda: scan(kind, files), "reader": lambda: drain(source, options.batch), "peer": peer},
        options.repeats,
    )
    return Row(
        case=f"{kind}, 13 dense 26 keys, {made.rows} samples, batch {options.batch}, 2 threads",
        metric="record reader",
        value=made.rows / timings["reader"].median,
        unit="samples/s",
        peer=name,
        peer_value=made.rows / timings["peer"].median,
        limit=made.rows / timings["scan"].median,
    )


def open_source(kind: str, path: Path, rows: int) -> RecordSource:
    if kind == "norm":
        return NormSource(path, LAYOUT, checksum=True)
    if kind == "parquet":
        return ParquetSource(path, LAYOUT)
    if kind == "raw":
        return RawSource(path, LAYOUT, num_samples=rows, float_label_dense=False)
    return RawAsyncSource(path, LAYOUT, num_samples=rows, is_dense_float=False)


def drain(source: RecordSource, batch_size: int) -> None:
    reader = RecordReader(source, batch_size=batch_size, repeat=False, drop_last=False, threads=2)
    drain_all(iter(reader))


def scan(kind: str, files: list[Path]) -> None:
    for path in files:
        if kind == "parquet":
            scan_parquet(path)
        else:
            buffer = bytearray(4 << 20)
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def peer_of(kind: str, files: list[Path], batch_size: int) -> tuple[str, Callable[[], object]]:
    if kind == "parquet":
        return "pyarrow.dataset", lambda: drain_all(arrow_batches(files, batch_size))
    loader = DataLoader(Batches(kind, files, batch_size), batch_size=None, num_workers=2, persistent_workers=True)
    return "numpy.memmap and DataLoader", lambda: drain_all(iter(loader))


def drain_all(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


class Batches(Dataset):
    """Read whole batches from mapped files of records of one size."""

    def __init__(self, kind: str, files: list[Path], batch_size: int) -> None:
        dtype, offset = (NORM_RECORD, 69) if kind == "norm" else (RAW_RECORD, 0)
        self._kind = kind
        self._maps = [np.memmap(path, dtype=dtype, mode="r", offset=offset) for path in files]
        self._places = [(i, start) for i, m in enumerate(self._maps) for start in range(0, len(m), batch_size)]
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index >= len(self):
            raise IndexError(index)
        number, start = self._places[index]
        records = self._maps[number][start : start + self._batch_size]
        is_norm = self._kind == "norm"
        keys = (records["keys"]["key"] if is_norm else records["keys"]).T.astype(np.int64, order="C")
        if self._kind == "raw":
            keys += OFFSETS[:, None]
        dense = records["dense"].astype(np.float32)
        return (
            torch.from_numpy(records["label"].astype(np.float32)),
            torch.from_numpy(dense if is_norm else np.log(dense + np.float32(1.0))),
            torch.from_numpy(keys),
        )


def arrow_batches(files: list[Path], batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    names = pq.read_schema(files[0]).names
    for batch in pyarrow.dataset.dataset([str(file) for file in files]).to_batches(batch_size=batch_size):
        columns = [batch.column(name).to_numpy() for name in names]
        keys = np.stack(columns[14:], dtype=np.int64) + OFFSETS[:, None]
        yield (
            torch.from_numpy(np.stack(columns[:1], axis=1)),
            torch.from_numpy(np.stack(columns[1:14], axis=1)),
            torch.from_numpy(keys),
        )


if __name__ == "__main__":
    main()
