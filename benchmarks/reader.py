# SPDX-License-Identifier: Apache-2.0
"""Compare the samples per second from disk to `Batch` with a bare scan of the same files, on Criteo-shaped rows.

The limit is the time in which one thread reads and decompresses the row groups without using them: PyArrow's
``read_row_group`` for Parquet, plain reads into memory for raw shards. Files are in the page cache.

``--case ranks`` measures instead how much one of several ranks reads of the same batches: the rows that it decodes, its
CPU time compared with a reader of whole batches, in turns, and the samples of the fullest rank in a batch.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from record import Row, append_rows, measure_in_turns

from terarec.data import RankShare, Reader
from terarec.data.reader import DatasetSource
from terarec.formats import write_dataset
from terarec.formats.block import ColumnBlock
from terarec.formats.shard import create_shard, shard_path
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn

BATCH = 8192
SHARDS = 2
# Distinct values of the Criteo Kaggle columns; large ones are reduced to what half a million samples can contain.
CARDINALITIES = (
    *(1459, 583, 300_000, 200_000, 305, 24, 12_513, 633, 3, 92_719, 5681, 266_265, 3193),
    *(27, 14_986, 209_368, 10, 5652, 2173, 4, 258_596, 18, 15, 182_062, 105, 141_594),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_048_576)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=("speed", "ranks"), default="speed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = []
        if options.case == "ranks":
            write(Path(directory), "parquet", options.rows)
            append_rows("reader", [row for size in (2, 3, 4, 8) for row in shared(Path(directory), size, options)])
            return
        for storage in ("parquet", "raw"):
            spec = write(Path(directory) / storage, storage, options.rows)
            rows += compare(Path(directory) / storage, spec, options.repeats)
    append_rows("reader", rows)


def compare(directory: Path, spec: DatasetSpec, repeats: int) -> list[Row]:
    """Time the bare scan and the reader in turns."""
    paths = [directory / shard.file for shard in spec.shards("train")]
    scan = scan_parquet if spec.storage == "parquet" else scan_raw
    cases = {"in order": False, "shuffled": True}
    functions = {
        case: lambda shuffle=shuffle: drain(Reader(directory, batch_size=BATCH, shuffle=shuffle))
        for case, shuffle in cases.items()
    }
    timings = measure_in_turns({"bare scan": lambda: [scan(path) for path in paths], **functions}, repeats)
    num_rows = spec.num_rows("train")
    return [
        Row(
            case=f"{spec.storage}, {case}, 13 dense 26 keys, {num_rows} samples, batch {BATCH}",
            metric="reader",
            value=num_rows / timings[case].median,
            unit="samples/s",
            limit=num_rows / timings["bare scan"].median,
        )
        for case in cases
    ]


class CountedSource(DatasetSource):
    """A data set that counts the rows that it decodes."""

    decoded = 0

    def read(self, group: int) -> ColumnBlock:
        block = super().read(group)
        self.decoded += block.num_rows
        return block


def shared(directory: Path, size: int, options: argparse.Namespace) -> list[Row]:
    """Read as each of `size` ranks, and as one process."""
    case = f"parquet, shuffled, a rank of {size}, 13 dense 26 keys, {options.rows} samples, batch {BATCH}"
    decoded, samples = [], []
    for rank in range(size):
        source = CountedSource(directory, "train")
        reader = Reader(source, batch_size=BATCH, shuffle=True)
        reader.take_share(RankShare(rank=rank, size=size))
        samples.append([batch.batch_size for batch in reader])
        decoded.append(source.decoded)
    fullest = [max(of_batch) * size / sum(of_batch) for of_batch in zip(*samples, strict=True)]
    seconds: dict[int, list[float]] = {1: [], size: []}
    for _ in range(options.repeats):
        for ranks, times in seconds.items():
            reader = Reader(directory, batch_size=BATCH, shuffle=True)
            if ranks > 1:
                reader.take_share(RankShare(rank=0, size=ranks))
            began = time.process_time()
            drain(reader)
            times.append(time.process_time() - began)
    whole, part = (statistics.median(times) for times in seconds.values())
    found = {
        "decoded rows of the rank with most, of all rows": (max(decoded) / options.rows, 1 / size),
        "CPU time of a rank's reader, of whole batches": (part / whole, 1 / size),
        "samples of the fullest rank in a batch, of the mean": (statistics.mean(fullest), 1.0),
    }
    return [
        Row(case=case, metric=metric, value=value, unit="x", limit=limit) for metric, (value, limit) in found.items()
    ]


def write(directory: Path, storage: str, num_rows: int) -> DatasetSpec:
    """Write and return a data set of power-law keys; every shard has the same rows."""
    spec = DatasetSpec(
        name="criteo-shaped",
        storage=storage,
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{index}") for index in range(1, 14)),
        categorical=tuple(
            CategoricalColumn(name=f"C{index + 1}", rows=rows) for index, rows in enumerate(CARDINALITIES)
        ),
    )
    rng = np.random.default_rng(0)
    count = num_rows // SHARDS
    label = (rng.random((count, 1)) < 0.25).astype(np.float32)
    dense = np.log1p(rng.integers(0, 500, (count, 13))).astype(np.float32)
    keys = [np.minimum(rng.zipf(1.2, count) - 1, rows - 1) for rows in CARDINALITIES]
    shards = []
    for index in range(SHARDS):
        with create_shard(spec, shard_path(directory, spec, "train", index)) as writer:
            writer.write(label, dense, keys)
            shards.append(writer.close())
    spec = dataclasses.replace(spec, splits={"train": tuple(shards)})
    write_dataset(spec, directory)
    return spec


def scan_parquet(path: Path) -> None:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, use_threads=False)


def scan_raw(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(bytearray(65_536 * 160)):
            pass


def drain(reader: Reader) -> None:
    for _ in reader:
        pass


if __name__ == "__main__":
    main()
