"""Rows in a real Redis or Valkey: their layout, eviction, faults, a cluster."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.errors import StorageError
from terarec.ps import HostMemoryTier, RedisServer, RedisTier, TableTiers
from terarec.ps.tier import mixed
from terarec.spec import OverflowSpec
from tests.ps.redis_processes import RedisProcess, needs_redis, running

pytestmark = needs_redis
redis = pytest.importorskip("redis")
KEYS = torch.arange(-20, 80)
ROWS = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
_MASK = 2**64 - 1


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server that a test may stop."""
    with running(tmp_path / "redis") as server:
        yield server


def partition_by_formula(key: int, num_partitions: int) -> int:
    """The mixer with Python's integers, as HugeCTR describes it."""
    value = key & _MASK
    for left, right, factor in ((25, 50, 0xA24BAED4963EE407), (24, 49, 0x9FB21C651E98DF25)):
        value ^= ((value >> left | value << 64 - left) ^ (value >> right | value << 64 - right)) & _MASK
        value = value * factor & _MASK
    return (value ^ value >> 28) % num_partitions


def test_the_layout_is_that_of_hugectr(redis_server: RedisProcess) -> None:
    tier = RedisTier(RedisServer(redis_server.spec(num_partitions=3)), "hps_et.dcn.user", 4)
    tier.insert(KEYS, ROWS)
    client = redis.Redis(port=redis_server.port)
    for key, row in zip(KEYS.tolist(), ROWS, strict=True):
        name = f"hps_et{{hps_et.dcn.user/p{partition_by_formula(key, 3)}}}v"
        assert client.hget(name, key.to_bytes(8, "little", signed=True)) == row.numpy().tobytes()


def test_partitions_by_the_formula() -> None:
    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    assert (mixed(keys) % np.uint64(7)).tolist() == [partition_by_formula(key, 7) for key in keys.tolist()]


@pytest.mark.parametrize("evict", ["random", "lru"])
def test_a_full_partition_evicts(redis_server: RedisProcess, evict: str) -> None:
    overflow = OverflowSpec(max_rows=60, evict=evict, keep=0.5)  # type: ignore[arg-type]
    server = RedisServer(redis_server.spec(num_partitions=1, overflow=overflow))
    tier = RedisTier(server, f"hps_et.full.{evict}", 4)
    tier.insert(KEYS[:60], ROWS[:60])
    assert tier.count() == 60
    tier.insert(KEYS[60:], ROWS[60:])
    assert tier.count() == 30
    assert tier.statistics().evicted == 70


def test_rows_of_another_size_are_missing_and_counted(redis_server: RedisProcess) -> None:
    tier = RedisTier(RedisServer(redis_server.spec(num_partitions=1)), "hps_et.m.sizes", 4)
    tier.insert(KEYS, ROWS)
    client = redis.Redis(port=redis_server.port)
    for key, value in ((3, b""), (4, b"12345"), (5, bytes(4 * 5))):
        client.hset("hps_et{hps_et.m.sizes/p0}v", key.to_bytes(8, "little"), value)
    found = tier.lookup(KEYS)
    assert KEYS[~found.mask].tolist() == [3, 4, 5]
    assert torch.equal(found.rows[found.mask], ROWS[found.mask])
    assert tier.statistics().damaged == 3


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lookups_go_on_while_a_server_is_killed_and_started_again(own_server: RedisProcess) -> None:
    clock = Clock()
    slow = HostMemoryTier("t", 4)
    slow.insert(KEYS[:50], -ROWS[:50])
    tier = RedisTier(RedisServer(own_server.spec()), "hps_et.m.t", 4)
    table = TableTiers([tier, slow], clock=clock)
    tier.insert(KEYS, ROWS)
    assert torch.equal(table.lookup(KEYS), ROWS)
    own_server.kill()
    served = torch.cat([-ROWS[:50], torch.zeros(50, 4)])
    assert torch.equal(table.lookup(KEYS), served)
    assert torch.equal(table.lookup(KEYS), served)
    use = table.statistics().tiers[0]
    assert (use.is_available, use.errors, use.skipped) == (False, 1, 1)
    assert table.statistics().defaults == 100
    own_server.start()
    assert torch.equal(table.lookup(KEYS), served)  # it still rests
    clock.now += 0.3
    assert torch.equal(table.lookup(KEYS), ROWS)
    assert table.statistics().tiers[0].is_available


def test_a_slow_server_is_passed_over(own_server: RedisProcess) -> None:
    clock = Clock()
    tier = RedisTier(RedisServer(own_server.spec(timeout_seconds=0.1)), "hps_et.m.t", 4)
    table = TableTiers([tier], clock=clock)
    tier.insert(KEYS, ROWS)
    own_server.pause()
    assert torch.equal(table.lookup(KEYS), torch.zeros(100, 4))
    assert table.statistics().tiers[0].errors == 1
    own_server.resume()
    clock.now += 0.3
    assert torch.equal(table.lookup(KEYS), ROWS)


def test_a_full_server_rejects_rows_and_serves_the_others(tmp_path: Path) -> None:
    with running(tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisTier(RedisServer(server.spec()), "hps_et.m.t", 4)
        tier.insert(KEYS, ROWS)
        many = torch.arange(1000, 301_000)
        with pytest.raises(StorageError):
            tier.insert(many, torch.zeros(300_000, 4))
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)


def test_a_user_with_a_password(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as server:
        client = redis.Redis(port=server.port)
        client.acl_setuser("reader", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@all"])
        client.acl_setuser("default", enabled=False)
        tier = RedisTier(RedisServer(server.spec(user="reader", password="s3cret")), "hps_et.m.t", 4)
        tier.insert(KEYS, ROWS)
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)
        with pytest.raises(StorageError):
            RedisTier(RedisServer(server.spec(user="reader", password="wrong")), "hps_et.m.t", 4).lookup(KEYS)


@pytest.mark.slow
def test_a_cluster_of_three(tmp_path: Path) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    with (
        running(tmp_path / "0", *options) as first,
        running(tmp_path / "1", *options) as second,
        running(tmp_path / "2", *options) as third,
    ):
        nodes = [first, second, third]
        create = ["redis-cli", "--cluster", "create", *(node.address for node in nodes), "--cluster-yes"]
        subprocess.run(create, check=True, stdout=subprocess.DEVNULL, timeout=60)
        tier = RedisTier(RedisServer(second.spec(num_partitions=16, timeout_seconds=2.0)), "hps_et.m.t", 4)
        for node in nodes:  # each learns of the others by itself
            _until(lambda node=node: redis.Redis(port=node.port).cluster("info")["cluster_state"] == "ok")
        tier.insert(KEYS, ROWS)
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)
        assert tier.count() == 100
        assert all(redis.Redis(port=node.port).dbsize() > 0 for node in nodes)
        table = TableTiers([tier])
        third.kill()
        lost = (table.lookup(KEYS) == 0).all(1)
        assert bool(lost.any())
        third.start()
        _until(lambda: redis.Redis(port=first.port).cluster("info")["cluster_state"] == "ok")
        _until(lambda: torch.equal(table.lookup(KEYS), ROWS))


def _until(holds: object) -> None:
    for _ in range(300):
        if holds():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError("it never came")
