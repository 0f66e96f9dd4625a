"""The kinds of tiers that the behaviour suite runs on."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from terarec.kernels.slots import SLOT_BYTES
from terarec.ps import HostMemoryTier, RedisServer, RedisTier, Tier
from terarec.ps.disk import rocksdb_tier, row_file_tier
from terarec.spec import HostMemorySpec, RocksDBSpec, RowFileSpec
from tests.ps.redis_processes import RedisProcess


def distinct_rows(width: int, keys: torch.Tensor, salt: float = 0.0) -> torch.Tensor:
    """Return rows float32[n, width] that differ from key to key, and with `salt`."""
    return keys.double().unsqueeze(1).mul(torch.arange(1.0, width + 1)).sin().add(salt).float()


_NUMBERS = itertools.count()
Make = Callable[[Path, int, Callable[[], RedisProcess]], Tier]


def _host(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return HostMemoryTier("t", width)


def _partitioned_host(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return HostMemoryTier("t", width, HostMemorySpec(num_partitions=3))


def _redis(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return RedisTier(RedisServer(server().spec()), f"hps_et.m.{next(_NUMBERS)}", width)


def _redis_in_small_batches(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return RedisTier(RedisServer(server().spec(num_partitions=1, batch_rows=7)), f"hps_et.m.{next(_NUMBERS)}", width)


def _row_file(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return row_file_tier(RowFileSpec(path=str(path)), path / "t", "t", width)


def _row_file_in_small_memory(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return row_file_tier(RowFileSpec(path=str(path), cache_bytes=9 * (4 * width + SLOT_BYTES)), path / "t", "t", width)


def _row_file_alone(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return row_file_tier(RowFileSpec(path=str(path), cache_bytes=0), path / "t", "t", width)


def _rocksdb(path: Path, width: int, server: Callable[[], RedisProcess]) -> Tier:
    return rocksdb_tier(RocksDBSpec(path=str(path)), path / "t", "t", width)


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
