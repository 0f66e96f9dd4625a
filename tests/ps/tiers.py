# SPDX-License-Identifier: Apache-2.0
"""The kinds of tiers that the behaviour suite runs on, each with one table."""

import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terarec.kernels.slots import SLOT_BYTES, RowBatch
from terarec.memory.guarded import Guarded, TierStatistics
from terarec.memory.level import Level
from terarec.memory.redis_server import RedisServer
from terarec.ps.levels import disk_level, host_level, redis_level
from terarec.ps.table import DefaultRows, Found, TableGroup, TableTiers
from terarec.spec import HostMemorySpec, RocksDBSpec, RowFileSpec
from tests.ps.redis_processes import RedisProcess


def distinct_rows(width: int, keys: torch.Tensor, salt: float = 0.0) -> torch.Tensor:
    """Return rows float32[n, width] that differ from key to key, and with `salt`."""
    return keys.double().unsqueeze(1).mul(torch.arange(1.0, width + 1)).sin().add(salt).float()


class Tier:
    """A level with one table, which is used alone."""

    def __init__(self, guarded: Guarded, width: int) -> None:
        self.guarded = guarded
        self.width = width
        self._table = TableGroup(["t"], width, [guarded]).table(0)
        self.insert, self.erase = self._table.insert, self._table.erase
        self.clear, self.count, self.flush = self._table.clear, self._table.count, self._table.flush

    @property
    def memory_bytes(self) -> int:
        return self.guarded.level.memory_bytes

    def lookup(self, keys: Tensor) -> Found:
        found = self._table.find(keys)
        if not self._table.statistics().tiers[0].is_available:
            self.guarded.level.read(RowBatch(keys, keys, torch.zeros_like(keys)), found.rows.view(torch.uint8))
        return found

    def statistics(self) -> TierStatistics:
        return self._table.statistics().tiers[0].counted

    def close(self) -> None:
        self._table.close()


def table_of(tiers: Sequence[Tier], default: DefaultRows | None = None, keeps_found: Sequence[bool] = ()) -> TableTiers:
    """Return a table that is in several tiers."""
    for tier, keeps in zip(tiers, keeps_found, strict=False):
        tier.guarded.keeps_found = keeps
    group = TableGroup(["t"], tiers[0].width, [tier.guarded for tier in tiers], [default] if default else [])
    return group.table(0)


class Delegating:
    """A level of which a test changes some methods."""

    def __init__(self, level: Level) -> None:
        self.level = level

    def __getattr__(self, name: str) -> Any:
        return getattr(self.level, name)


def host(
    width: int,
    spec: HostMemorySpec | None = None,
    kind: Callable[[Level], Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tier:
    """Return rows in host memory, whose level `kind` wraps."""
    guarded = host_level(spec or HostMemorySpec(), ["t"], width, clock)
    if kind is not None:
        guarded.level = kind(guarded.level)
    return Tier(guarded, width)


def redis(server: RedisServer, tag: str, width: int, clock: Callable[[], float] = time.monotonic) -> Tier:
    return Tier(redis_level(server, [tag], width, clock), width)


def disk(spec: RowFileSpec | RocksDBSpec, directory: Path, width: int) -> Tier:
    return Tier(disk_level(spec, [directory], ["t"], width), width)


_NUMBERS = itertools.count()
Make = Callable[[Path, int, Callable[[], RedisProcess]], Tier]


def _host(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return host(width)


def _partitioned_host(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return host(width, HostMemorySpec(num_partitions=3))


def _redis(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return redis(RedisServer(server().spec()), f"hps_et.m.{next(_NUMBERS)}", width)


def _redis_in_small_batches(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return redis(RedisServer(server().spec(num_partitions=1, batch_rows=7)), f"hps_et.m.{next(_NUMBERS)}", width)


def _row_file(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return disk(RowFileSpec(path=str(path)), path / "t", width)


def _row_file_in_small_memory(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return disk(RowFileSpec(path=str(path), cache_bytes=9 * (4 * width + SLOT_BYTES)), path / "t", width)


def _row_file_alone(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return disk(RowFileSpec(path=str(path), cache_bytes=0), path / "t", width)


def _rocksdb(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return disk(RocksDBSpec(path=str(path)), path / "t", width)


KINDS: dict[str, Make] = {
    "host": _host,
    "partitioned host": _partitioned_host,
    "redis": _redis,
    "redis in small batches": _redis_in_small_batches,
    "row file": _row_file,
    "row file in small memory": _row_file_in_small_memory,
    "row file alone": _row_file_alone,
}
if importlib.util.find_spec("rocksdict"):
    KINDS["rocksdb"] = _rocksdb
