# SPDX-License-Identifier: Apache-2.0
"""Readers, updaters, erasers and evictors of the same keys: no level ever gives a row that is older than the newest."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from terarec.kernels.slots import SLOT_BYTES, RowBatch
from terarec.memory.batch_parts import batch_of
from terarec.memory.level import Level
from terarec.memory.redis_server import RedisServer
from terarec.ps.cache import EmbeddingCache
from terarec.ps.table import TableTiers
from terarec.spec import CacheSpec, HostMemorySpec, OverflowSpec, RocksDBSpec, RowFileSpec
from tests.params import in_every_run
from tests.ps.redis_processes import PROGRAM, RedisProcess, running
from tests.ps.tiers import KINDS, Delegating, Tier, disk, host, redis, table_of

WIDTH = 4
NUM_KEYS = 96
NUM_UPDATERS = 2
ROUNDS = 25
_ROW_BYTES = 4 * WIDTH


class Delayed(Delegating):
    """A level before and behind whose calls other threads run."""

    def __init__(self, level: Level) -> None:
        super().__init__(level)
        self._random = random.Random(3)

    def _wait(self) -> None:
        time.sleep(self._random.choice([0.0, 0.0, 2e-4, 1e-3]))

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        self._wait()
        found = self.level.read(batch, out)
        self._wait()
        return found

    def write(self, batch: RowBatch, values: Tensor) -> None:
        self._wait()
        self.level.write(batch, values)
        self._wait()

    def erase(self, batch: RowBatch) -> None:
        self._wait()
        self.level.erase(batch)
        self._wait()


Make = Callable[[Path, Callable[[], RedisProcess]], list[Tier]]


def files(path: Path, cache_rows: int = 0) -> Tier:
    spec = RowFileSpec(path=str(path), cache_bytes=cache_rows * (_ROW_BYTES + SLOT_BYTES))
    return delayed(disk(spec, path / "rows", WIDTH))


def delayed(tier: Tier) -> Tier:
    tier.guarded.level = Delayed(tier.guarded.level)
    return tier


def small_host(evict: str, num_partitions: int = 1) -> Tier:
    overflow = OverflowSpec(max_rows=20, evict=evict, keep=0.5)  # type: ignore[arg-type]
    return delayed(host(WIDTH, HostMemorySpec(overflow=overflow, num_partitions=num_partitions)))


def server(start: Callable[[], RedisProcess], name: str) -> Tier:
    return delayed(redis(RedisServer(start().spec(num_partitions=2, timeout_seconds=30.0)), name, WIDTH))


STACKS: dict[str, Make] = {
    "files": lambda path, start: [files(path)],
    "cached files": lambda path, start: [files(path, 20)],
    "host, files": lambda path, start: [delayed(host(WIDTH)), files(path)],
    "host, cached files": lambda path, start: [delayed(host(WIDTH)), files(path, 20)],
    "partitions, cached files": lambda path, start: [small_host("random", 3), files(path, 20)],
    "small host by use, cached files": lambda path, start: [small_host("lru"), files(path, 20)],
    "small host by uses, host": lambda path, start: [small_host("lfu"), delayed(host(WIDTH))],
}
if PROGRAM is not None:
    STACKS["host, Redis, cached files"] = lambda path, start: [
        delayed(host(WIDTH)),
        server(start, "hps_et.race.1"),
        files(path, 20),
    ]
if "rocksdb" in KINDS:
    STACKS["host, RocksDB"] = lambda path, start: [
        delayed(host(WIDTH)),
        delayed(disk(RocksDBSpec(path=str(path)), path / "rocks", WIDTH)),
    ]


class Run:
    """Threads that read and change the keys of a table, and the newest value of each key, 0 for none."""

    def __init__(self, table: TableTiers, cache: EmbeddingCache | None) -> None:
        self._table = table
        self._cache = cache
        self._newest = torch.ones(NUM_KEYS)
        self._is_done = threading.Event()
        self._errors: list[BaseException] = []

    def newest(self) -> Tensor:
        """Run all threads, and return the newest values."""
        updaters = [self._thread(self._update, number) for number in range(NUM_UPDATERS)]
        readers = [self._thread(self._read, seed) for seed in range(2)]
        for thread in updaters:
            thread.join()
        self._is_done.set()
        for thread in readers:
            thread.join()
        assert not self._errors
        return self._newest

    def _thread(self, work: Callable[[int], None], number: int) -> threading.Thread:
        def run() -> None:
            try:
                work(number)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def _update(self, number: int) -> None:
        """Set or remove keys of this thread alone, so that the last value of each is known."""
        drawn = random.Random(number)
        mine = [key for key in range(NUM_KEYS) if key % NUM_UPDATERS == number]
        for step in range(ROUNDS):
            keys = torch.tensor(drawn.sample(mine, 12))
            value = float(2 + step) if drawn.random() < 0.6 else 0.0
            rows = torch.full((12, WIDTH), value)
            if value:
                self._table.insert(keys, rows)
            else:
                self._table.erase(keys)
            if self._cache is not None and value:
                self._cache.update(keys, rows)
            elif self._cache is not None:
                self._cache.forget(keys)
            self._newest[keys] = value

    def _read(self, seed: int) -> None:
        """Look keys up, more at times than fast levels hold, so that rows are evicted."""
        drawn = random.Random(100 + seed)
        while not self._is_done.is_set():
            keys = torch.tensor(drawn.sample(range(NUM_KEYS), drawn.choice([3, 10, 30, 60])))
            rows = self._table.lookup(keys) if self._cache is None else self._cache.lookup(keys)
            # A row is always whole.
            assert torch.equal(rows, rows[:, :1].expand(-1, WIDTH))


# What a cache does depends on the level below it alone; that of three levels has all of its ways.
CASES = [(stack, has_cache) for stack in STACKS for has_cache in (False, True)]
QUICK = [(stack, False) for stack in STACKS] + [("files", True), ("host, cached files", True)]


@pytest.mark.parametrize(("stack", "has_cache"), in_every_run(QUICK, CASES))
def test_every_level_gives_the_newest_row_or_none(stack: str, has_cache: bool, tmp_path: Path) -> None:
    """Finding L1."""
    with ExitStack() as held:
        tiers = STACKS[stack](tmp_path, lambda: held.enter_context(running(tmp_path / "redis")))
        check_stack(tiers, has_cache)


def check_stack(tiers: Sequence[Tier], has_cache: bool) -> None:
    table = table_of(tiers, keeps_found=[True] * (len(tiers) - 1) + [False])
    keys = torch.arange(NUM_KEYS)
    tiers[-1].insert(keys, torch.ones(NUM_KEYS, WIDTH))
    cache = EmbeddingCache(table, 20, CacheSpec()) if has_cache else None
    newest = Run(table, cache).newest()
    for tier in tiers:
        rows = torch.empty(NUM_KEYS, WIDTH)
        found = tier.guarded.level.read(batch_of(keys, 0), rows.view(torch.uint8))
        assert rows[found, 0].tolist() == newest[found].tolist()
    assert bool(found.equal(newest > 0)), "the slowest level has all rows"
    for _ in range(2):
        assert table.lookup(keys)[:, 0].tolist() == newest.tolist()
        if cache is not None:
            assert cache.lookup(keys)[:, 0].tolist() == newest.tolist()
    table.close()
