# SPDX-License-Identifier: Apache-2.0
"""Measure memory and checkpoints of a table in tiers that is much larger than its budget.

It fills a table of 512-byte rows (64 weights and the state of AdaGrad) in a file tier, trains it on random keys, saves
it, loads it into a new table and continues to train. Every 10 ms it samples the growth of the process' anonymous memory
(the memory that a cgroup counts besides the page cache) since the table was created. At the end of training it measures
how much of the files is in the page cache. With ``--cgroup 2GiB`` the process is in a cgroup of that size from the
start (Linux, as root), so that the kernel enforces the bound: it drops page cache first, and kills a process that needs
more.

The limit of saving is a sequential write of as many bytes with a flush; the limit of opening is a sequential read that
bypasses the page cache, at the rates of files of at most ``--disk-gb`` in the same run. A checkpoint on another file
system (``--copy-to``) copies; on the same one it links. The delta after a step is compared with the bytes of its rows.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from record import Row, append_rows

from terarec.batch import one_hot
from terarec.checkpoint import TrainState, load, save
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, FeatureSpec, TableSpec, Tiers
from terarec.spec.tiers import parse_size
from terarec.storage import RowValues
from terarec.train.devices import keep_freed_memory

NAME = "tiered_memory"
WIDTH = 64
ROW_BYTES = 2 * 4 * WIDTH
BATCH = 16_384
FILL_ROWS = 16_384
PIECE = 16 << 20
PAGE = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True)
class MemoryRow(Row):
    """A row with the memory of the process and the page cache in MiB."""

    budget_mib: float
    access: str
    most_mib: float | None = None
    beside_mib: float | None = None
    index_mib: float | None = None
    page_cache_mib: float | None = None
    cgroup_mib: float | None = None
    cgroup_most_mib: float | None = None


class MemoryGroup:
    """A cgroup with a memory limit for this process, which leaves it at the end.

    Raises:
        OSError: The system has no such cgroups, or does not let this process create one.
    """

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        self._has_v1 = (root / "memory").is_dir()
        self._parent = root / "memory" if self._has_v1 else root
        self._path = self._parent / f"terarec-{os.getpid()}"
        self._path.mkdir()
        try:
            (self._path / ("memory.limit_in_bytes" if self._has_v1 else "memory.max")).write_text(str(limit))
            (self._path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._path.rmdir()
            raise

    def most_bytes(self) -> int:
        """Return the peak memory of the group, page cache included."""
        return int((self._path / ("memory.max_usage_in_bytes" if self._has_v1 else "memory.peak")).read_text())

    def leave(self) -> None:
        (self._parent / "cgroup.procs").write_text(str(os.getpid()))
        self._path.rmdir()


class Sampler:
    """Sampler of the peak anonymous memory of the process."""

    def __init__(self) -> None:
        self.most = self.first = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(0.01):
            self.most = max(self.most, anonymous_bytes())

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self.most - self.first


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def cached_bytes(directory: Path) -> int:
    """Return the bytes of the files below a directory that the page cache holds."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for path in directory.rglob("*.rows"):
        if not path.is_file() or not (size := path.stat().st_size):
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            held = (ctypes.c_ubyte * (-(-size // PAGE)))()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), held) == 0:
                total += sum(byte & 1 for byte in held) * PAGE
    return total


@contextmanager
def timed(into: dict[str, float], name: str):
    start = time.perf_counter()
    yield
    into[name] = time.perf_counter() - start


def disk_rates(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second of writing a file with a flush, and of reading it without the page cache."""
    path, piece = directory / "probe", mmap.mmap(-1, PIECE)
    piece.write(os.urandom(PIECE))
    pieces = max(1, num_bytes // PIECE)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(pieces):
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)
    written = time.perf_counter() - start
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    start = time.perf_counter()
    while os.readv(descriptor, [piece]):
        pass
    read = time.perf_counter() - start
    os.close(descriptor)
    path.unlink()
    return pieces * PIECE / written, pieces * PIECE / read


class Table:
    """A table in tiers with its optimizer."""

    def __init__(self, rows: int, tiers: Tiers) -> None:
        self.rows = rows
        table = TableSpec(name="t", rows=rows, width=WIDTH, tiers=tiers)
        self.embedding = EmbeddingCollection([table], [FeatureSpec(name="f", table="t")])
        self.optimizer = RowOptimizer(self.embedding, AdaGradSpec(lr=0.01))

    def fill(self) -> None:
        """Initialize all rows."""
        for first in range(0, self.rows, FILL_ROWS):
            keys = torch.arange(first, min(first + FILL_ROWS, self.rows))
            weights = torch.rand(len(keys), WIDTH)
            self.embedding.tables["t"].import_(RowValues(keys=keys, weights=weights, state={"sum": weights}))

    def train(self, steps: int, seed: int) -> int:
        """Train on random keys; return the total number of changed rows over all steps."""
        generator, changed = torch.Generator().manual_seed(seed), 0
        for _ in range(steps):
            keys = torch.randint(0, self.rows, (1, BATCH), generator=generator)
            self.embedding(one_hot(["f"], keys)).pooled.square().sum().backward()
            self.optimizer.step()
            changed += keys.unique().numel()
        return changed

    def index_bytes(self) -> int:
        return self.embedding.arenas[0].data.index_bytes

    def state(self, step: int) -> TrainState:
        tables = self.embedding.tables
        nothing = {"state": {}, "param_groups": []}
        return TrainState(step=step, dense={}, tables=tables, optimizer=nothing, rng=torch.get_rng_state(), progress={})


def measured(call: Callable[[], object], tiers: Tiers, files: Path, index: Callable[[], int]) -> dict[str, float]:
    sampler = Sampler()
    call()
    most, mib = sampler.stop(), 1 << 20
    return {
        "most_mib": most / mib,
        "beside_mib": (most - parse_size(tiers.fast)) / mib,
        "index_mib": index() / mib,
        "page_cache_mib": cached_bytes(files) / mib,
    }


def run(options: argparse.Namespace, root: Path, group: MemoryGroup | None) -> list[Row]:
    rows = int(options.gb * 1e9) // ROW_BYTES
    num_bytes = rows * ROW_BYTES
    case = f"{rows / 1e6:.1f} M rows of {ROW_BYTES} bytes, {options.gb:g} GB"
    tiers = Tiers(host=options.host, file=str(root / "files"), direct=options.direct)
    common = {"budget_mib": parse_size(options.host) / 2**20, "access": "direct" if options.direct else "page cache"}
    if group is not None:
        case += f", in a cgroup of {options.cgroup}"
        common["cgroup_mib"] = parse_size(options.cgroup) / 2**20
    seconds: dict[str, float] = {}
    keep_freed_memory()
    table = Table(1000, Tiers(host="1MiB", file=str(root / "warm")))
    table.train(1, 0)  # memory that the process needs for a table of any size
    table = Table(rows, tiers)

    def fill_and_train() -> None:
        with timed(seconds, "fill"):
            table.fill()
        with timed(seconds, "train"):
            table.train(options.steps, 1)

    memory = measured(fill_and_train, tiers, root / "files", table.index_bytes)
    write_rate, read_rate = disk_rates(root, int(min(options.gb, options.disk_gb) * 1e9))
    target = root / "saved" if options.copy_to is None else options.copy_to / "saved"
    with timed(seconds, "save"):
        path = save(target, table.state(1), kind="base")
    changed_bytes = table.train(1, 2) * ROW_BYTES
    with timed(seconds, "delta"):
        delta = save(target, table.state(2), kind="delta")
    delta_bytes = sum(each.stat().st_size for each in delta.rglob("*") if each.is_file())
    opened = Table(rows, Tiers(host=options.host, file=str(root / "opened"), direct=options.direct))
    loaded: dict[str, float] = {}
    with timed(loaded, "open"):
        load(path).load_tables(opened.embedding.tables, with_state=True)
    opened.train(1, 3)
    if group is not None:
        memory["cgroup_most_mib"] = group.most_bytes() / 2**20
    result = [
        MemoryRow(
            case=case, metric="memory above the budget", value=memory["beside_mib"], unit="MiB", **common, **memory
        ),
        MemoryRow(
            case=case, metric="training", value=options.steps * BATCH / seconds["train"], unit="rows/s", **common
        ),
        MemoryRow(
            case=case,
            metric="checkpoint" + ("" if options.copy_to is None else " on another file system"),
            value=num_bytes / seconds["save"] / 2**30,
            unit="GiB/s",
            limit=write_rate / 2**30,
            **common,
        ),
        MemoryRow(
            case=case,
            metric="opening a checkpoint",
            value=num_bytes / loaded["open"] / 2**30,
            unit="GiB/s",
            limit=read_rate / 2**30,
            **common,
        ),
        MemoryRow(
            case=case,
            metric="delta of a step",
            value=delta_bytes / changed_bytes,
            unit="bytes a byte",
            limit=1.0,
            **common,
        ),
    ]
    if options.copy_to is not None:
        shutil.rmtree(target)
    print(", ".join(f"{name} {taken:.1f} s" for name, taken in {**seconds, **loaded}.items()))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0, help="bytes of all rows")
    parser.add_argument("--host", default="1GiB", help="budget of host memory")
    parser.add_argument("--cgroup", help="memory limit of a cgroup to run in, such as 2GiB")
    parser.add_argument("--direct", action="store_true", help="bypass the page cache")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--disk-gb", type=float, default=4.0, help="size of the file that measures the disk's rate")
    parser.add_argument("--dir", type=Path, default=None, help="directory of the files")
    parser.add_argument("--copy-to", type=Path, default=None, help="directory on another file system, for a checkpoint")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args(arguments)
    group = None
    if options.cgroup is not None:
        try:
            group = MemoryGroup(parse_size(options.cgroup))
        except OSError as error:
            print(f"skipped: cannot create a cgroup with a memory limit here ({error})")
            return
    try:
        with TemporaryDirectory(dir=options.dir) as directory:
            append_rows(NAME, run(options, Path(directory), group), dry=options.dry)
    finally:
        if group is not None:
            group.leave()


if __name__ == "__main__":
    main()
