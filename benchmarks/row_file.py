# SPDX-License-Identifier: Apache-2.0
"""Compare row files with the disk itself, RocksDB and plain ``np.memmap``: reads, writes, opening, space.

Cold means that the files' pages were dropped from the page cache before, or that O_DIRECT bypasses it. The limit of
cold reads is a loop of as many random reads of a row's bytes that bypass the page cache (random_reads.cpp), in the same
turn. The limit of sequential work is the same bytes read or written in order by plain calls of 4 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from record import Row, append_rows

from terarec.kernels.slots import RowBatch
from terarec.memory.cache import Cache
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import RowFile
from terarec.memory.row_format import RowFileOptions
from terarec.memory.row_store import RowStore
from terarec.memory.table_stores import TableStore, TableStores

HERE = Path(__file__).resolve().parent
ROW_BYTES = 512
BATCH = 65_536
READ = 20_000  # rows of a read
PEER_READ = 2_000  # of a cold read of RocksDB and the map, which read one row at a time
PIECE = 4 * 2**20
DEPTH = 128
FILL_TURNS = 3


@cache
def probe() -> ctypes.CDLL:
    built = Path(tempfile.mkdtemp()) / "random_reads.so"
    subprocess.run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(HERE / "random_reads.cpp"), "-o", str(built)], check=True
    )
    library = ctypes.CDLL(str(built))
    library.random_reads.restype = ctypes.c_double
    library.random_reads.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return library


def rows_for(keys: NDArray[np.int64], version: int) -> NDArray[np.uint8]:
    rows = np.empty((len(keys), ROW_BYTES // 8), dtype=np.int64)
    rows[:] = keys[:, None] * 31 + version + np.arange(ROW_BYTES // 8)
    return rows.view(np.uint8)


def drop_pages(directory: Path) -> None:
    for path in [directory] if directory.is_file() else directory.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_in_order(directory: Path) -> int:
    """Read all segments sequentially in large pieces; return their bytes."""
    total = 0
    for path in sorted(directory.glob("segment-*.rows")):
        with path.open("rb", buffering=0) as file:
            while piece := len(file.read(PIECE)):
                total += piece
    return total


def write_in_order(path: Path, num_bytes: int) -> None:
    piece = os.urandom(PIECE)
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // PIECE):
            file.write(piece)
        os.fsync(file.fileno())


class Table:
    """Rows in a row file, in RocksDB and in a memory map."""

    def __init__(self, root: Path, num_rows: int, *, with_peers: bool) -> None:
        self.root = root
        self.num_rows = num_rows
        self.keys = np.random.default_rng(1).permutation(num_rows).astype(np.int64)
        self.written: dict[str, float] = {}
        if not with_peers:
            self.fill_row_file()
            return
        # In turns: the first writes of a run take up to four times as long as later ones.
        seconds: dict[str, list[float]] = {"row file": [], "plain writes": []}
        for _ in range(FILL_TURNS):
            shutil.rmtree(root / "rows", ignore_errors=True)
            seconds["row file"].append(self.fill_row_file())
            seconds["plain writes"].append(
                seconds_of(lambda: write_in_order(root / "plain", num_rows * ROW_BYTES))
            )  # fmt: skip
        self.written |= {name: statistics.median(each) for name, each in seconds.items()}
        self.fill_rocksdb()
        self.fill_map()

    def fill_row_file(self) -> float:
        store = RowFile.create(self.root / "rows", ROW_BYTES, table="rows")
        seconds = self.fill(store, commits=False)
        self.index_bytes = store.index_bytes / self.num_rows
        store.close()
        return seconds

    def fill_rocksdb(self) -> None:
        store = RocksDBStore(self.root / "rocksdb", ROW_BYTES)
        self.written["RocksDB"] = self.fill(store, commits=True)
        store.close()

    def fill(self, store: RowStore, *, commits: bool) -> float:
        """Write all rows; return the seconds without the generation of the rows."""
        seconds = 0.0
        for first in range(0, self.num_rows, BATCH):
            keys = self.keys[first : first + BATCH]
            rows = rows_for(keys, 0)
            start = time.perf_counter()
            store.write(keys, rows)
            if commits:
                store.commit()
            seconds += time.perf_counter() - start
        return seconds + seconds_of(store.commit)

    def fill_map(self) -> None:
        mapped = np.memmap(self.root / "map", dtype=np.uint8, mode="w+", shape=(self.num_rows, ROW_BYTES))
        seconds = 0.0
        for first in range(0, self.num_rows, BATCH):
            keys = self.keys[first : first + BATCH]
            rows = rows_for(keys, 0)
            seconds += seconds_of(lambda keys=keys, rows=rows: mapped.__setitem__(keys, rows))
        self.written["np.memmap"] = seconds + seconds_of(mapped.flush)


def cold_reads(table: Table, turns: int) -> list[Row]:
    ways = {
        "io_uring": RowFileOptions(io="io_uring"),
        "io_uring, O_DIRECT": RowFileOptions(io="io_uring", direct=True),
        "16 threads": RowFileOptions(io="threads"),
    }
    stores = {name: RowFile.open(table.root / "rows", read_only=True, options=ways[name]) for name in ways}
    rocksdb = RocksDBStore.open(table.root / "rocksdb")
    plain = table.root / "plain"
    rates: dict[str, list[float]] = {}
    generator, out = np.random.default_rng(2), np.empty((READ, ROW_BYTES), dtype=np.uint8)
    for _ in range(turns):
        for name, store in stores.items():
            keys = generator.integers(0, table.num_rows, READ)
            drop_pages(table.root / "rows")
            rates.setdefault(name, []).append(READ / seconds_of(lambda store=store, keys=keys: store.read(keys, out)))
            assert (out == rows_for(keys, 0)).all()
        drop_pages(plain)
        for name, size in (("limit", ROW_BYTES), ("limit of 4 KiB", 4096)):
            seconds = probe().random_reads(str(plain).encode(), plain.stat().st_size, size, READ, DEPTH)
            assert seconds > 0
            rates.setdefault(name, []).append(READ / seconds)
        drop_pages(table.root / "rocksdb")
        keys, few = generator.integers(0, table.num_rows, PEER_READ), out[:PEER_READ]
        seconds = seconds_of(lambda keys=keys, few=few: rocksdb.read(keys, few))
        rates.setdefault("RocksDB", []).append(PEER_READ / seconds)
        mapped = np.memmap(table.root / "map", dtype=np.uint8, mode="r", shape=(table.num_rows, ROW_BYTES))
        mapped._mmap.madvise(1)  # MADV_RANDOM
        drop_pages(table.root / "map")
        seconds = seconds_of(lambda keys=keys, mapped=mapped: mapped[keys])
        rates.setdefault("np.memmap", []).append(PEER_READ / seconds)
        del mapped
    for store in stores.values():
        store.close()
    rocksdb.close()
    median = {name: statistics.median(each) for name, each in rates.items()}
    case = case_of(table)
    rows = [
        Row(case=case, metric=f"cold reads, {name}", value=median[name], unit="rows/s", peer=peer,
            peer_value=median[peer], limit=median["limit"])
        for name in stores for peer in ("RocksDB", "np.memmap")
    ]  # fmt: skip
    limit = Row(case=case, metric="random reads of 4 KiB", value=median["limit of 4 KiB"], unit="rows/s",
                limit=median["limit"])  # fmt: skip
    return [*rows, limit]


def warm_reads(table: Table, turns: int) -> list[Row]:
    """Return the result rows of reads from the page cache."""
    stores: dict[str, RowStore] = {
        "io_uring": RowFile.open(table.root / "rows", read_only=True, options=RowFileOptions(io="io_uring")),
        "threads": RowFile.open(table.root / "rows", read_only=True, options=RowFileOptions(io="threads")),
        "RocksDB": RocksDBStore.open(table.root / "rocksdb"),
    }
    mapped = np.memmap(table.root / "map", dtype=np.uint8, mode="r", shape=(table.num_rows, ROW_BYTES))
    generator, out = np.random.default_rng(3), np.empty((READ, ROW_BYTES), dtype=np.uint8)
    keys = generator.integers(0, table.num_rows, READ)
    rates: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for name, store in stores.items():
            seconds = seconds_of(lambda store=store: store.read(keys, out))
            if turn:
                rates.setdefault(name, []).append(READ / seconds)
        seconds = seconds_of(lambda: np.take(mapped, keys, axis=0, out=out))
        if turn:
            rates.setdefault("np.memmap", []).append(READ / seconds)
    for store in stores.values():
        store.close()
    median = {name: statistics.median(each) for name, each in rates.items()}
    return [
        Row(case=case_of(table), metric=f"warm reads, {name}", value=median[name], unit="rows/s", peer=peer,
            peer_value=median[peer])
        for name in ("io_uring", "threads") for peer in ("RocksDB", "np.memmap")
    ]  # fmt: skip


def cached_reads(table: Table, turns: int) -> list[Row]:
    """Return the result rows of reads that hit a cache in host memory; the limit is torch's gather of as many rows."""
    store = RowFile.open(table.root / "rows", read_only=True)
    cache = Cache(ROW_BYTES, [table.num_rows], TableStores([TableStore(store)]), name="benchmark", keeps_read=True)
    plain = torch.empty(table.num_rows, ROW_BYTES // 8, dtype=torch.int64)
    out = torch.empty(BATCH, ROW_BYTES, dtype=torch.uint8)
    for first in range(0, table.num_rows, BATCH):
        keys = torch.arange(first, min(first + BATCH, table.num_rows))
        rows = out[: len(keys)]
        assert cache.read(RowBatch(keys, keys, torch.zeros_like(keys)), rows).all()
        plain[keys] = rows.view(torch.int64)
    generator = np.random.default_rng(5)
    gathered = torch.empty(BATCH, ROW_BYTES // 8, dtype=torch.int64)
    rates: dict[str, list[float]] = {"cache": [], "gather": []}
    for _ in range(5 * turns):
        keys = torch.from_numpy(generator.integers(0, table.num_rows, BATCH))
        batch = RowBatch(keys, keys, torch.zeros_like(keys))
        rates["cache"].append(BATCH / seconds_of(lambda batch=batch: cache.read(batch, out)))
        rates["gather"].append(
            BATCH / seconds_of(lambda keys=keys: torch.index_select(plain, 0, keys, out=gathered))
        )  # fmt: skip
        assert torch.equal(out.view(torch.int64), gathered)
    cache.close()
    median = {name: statistics.median(each) for name, each in rates.items()}
    case = f"{case_of(table)}, {torch.get_num_threads()} threads"
    return [
        Row(case=case, metric="warm reads of a cache in host memory", value=median["cache"], unit="rows/s",
            limit=median["gather"])
    ]  # fmt: skip


def opening(table: Table, turns: int) -> list[Row]:
    directory = table.root / "rows"
    opened, scanned, plain = [], [], []
    num_bytes = 0
    for _ in range(turns):
        drop_pages(directory)
        start = time.perf_counter()
        store = RowFile.open(directory, read_only=True)
        opened.append(time.perf_counter() - start)
        drop_pages(directory)
        start = time.perf_counter()
        for _keys, _rows in store.items():
            pass
        scanned.append(time.perf_counter() - start)
        store.close()
        drop_pages(directory)
        start = time.perf_counter()
        num_bytes = read_in_order(directory)
        plain.append(time.perf_counter() - start)
    rate = [num_bytes / 2**30 / statistics.median(each) for each in (opened, scanned, plain)]
    return [
        Row(case=case_of(table), metric="opening", value=rate[0], unit="GiB/s", limit=rate[2]),
        Row(case=case_of(table), metric="scan", value=rate[1], unit="GiB/s", limit=rate[2]),
    ]


def filling(table: Table) -> list[Row]:
    rate = {name: table.num_rows * ROW_BYTES / 2**30 / seconds for name, seconds in table.written.items()}
    return [
        *(
            Row(case=case_of(table), metric="writes with a commit", value=rate["row file"], unit="GiB/s", peer=peer,
                peer_value=rate[peer], limit=rate["plain writes"])
            for peer in ("RocksDB", "np.memmap")
        ),
        Row(case=case_of(table), metric="index of a row", value=table.index_bytes, unit="bytes"),
    ]  # fmt: skip


def overwriting(table: Table, skew: float) -> list[Row]:
    """Overwrite rows that are drawn by a power law, in all twice the table's bytes."""
    store = RowFile.open(table.root / "rows")
    weights = np.arange(1, table.num_rows + 1, dtype=np.float64) ** -skew
    shares = np.cumsum(weights / weights.sum())
    generator = np.random.default_rng(4)
    order = generator.permutation(table.num_rows)
    user, step, most, start = 0, 0, 0.0, time.perf_counter()
    while user < 2 * table.num_rows * ROW_BYTES:
        drawn = np.searchsorted(shares, generator.random(2 * BATCH)).clip(0, table.num_rows - 1)
        keys = order[np.unique(drawn)]
        store.write(keys, rows_for(keys, step + 1))
        user += len(keys) * ROW_BYTES
        step += 1
        if step % 16 == 0:
            store.commit()
            most = max(most, store.file_bytes / store.live_bytes)
    store.commit()
    seconds = time.perf_counter() - start
    case = f"{case_of(table)}, overwrites of Zipf {skew}"
    rows = [
        Row(case=case, metric="write amplification", value=store.written_bytes / user, unit="bytes a byte", limit=1.0),
        Row(case=case, metric="space after commits, at most", value=most, unit="bytes a live byte", limit=1.0),
        Row(case=case, metric="writes", value=user / 2**30 / seconds, unit="GiB/s"),
    ]
    start = time.perf_counter()
    store.snapshot(table.root / "snapshot")
    copied = store.file_bytes / 2**30 / (time.perf_counter() - start)
    rows.append(Row(case=case, metric="snapshot", value=copied, unit="GiB/s"))
    store.close()
    shutil.rmtree(table.root / "snapshot")
    return rows


def case_of(table: Table) -> str:
    return f"{table.num_rows / 1e6:g} M rows of {ROW_BYTES} bytes"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--part", choices=["reads", "cache", "overwrites"], default="reads")
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of the power law of overwrites")
    parser.add_argument("--dir", type=Path, default=None, help="directory on the disk to measure")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        table = Table(Path(folder), options.rows, with_peers=options.part == "reads")
        if options.part == "reads":
            append_rows("row_file", filling(table), dry=options.dry)
            append_rows("row_file", cold_reads(table, options.turns), dry=options.dry)
            append_rows("row_file", warm_reads(table, options.turns), dry=options.dry)
            append_rows("row_file", opening(table, options.turns), dry=options.dry)
        elif options.part == "cache":
            append_rows("row_file", cached_reads(table, options.turns), dry=options.dry)
        else:
            append_rows("row_file", overwriting(table, options.skew), dry=options.dry)


if __name__ == "__main__":
    main()
