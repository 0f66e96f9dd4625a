# SPDX-License-Identifier: Apache-2.0
"""Rows in a real Redis or Valkey: their layout, eviction, faults, a cluster."""

import contextlib
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from terarec.errors import StorageError
from terarec.memory.batch_parts import mixed
from terarec.memory.redis_server import RedisServer, request
from terarec.spec import OverflowSpec
from terarec.spec.parameter_server import TLSSpec
from tests.certificates import Certificates
from tests.programs import OPENSSL, Program
from tests.ps import tiers
from tests.ps.redis_processes import PROGRAMS, RedisProcess, needs_redis, running
from tests.ps.tiers import table_of
from tests.waiting import wait_for

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


def test_the_layout_is_that_of_hugectr(each_server: RedisProcess) -> None:
    tier = tiers.redis(RedisServer(each_server.spec(num_partitions=3)), "hps_et.dcn.user", 4)
    tier.insert(KEYS, ROWS)
    client = redis.Redis(each_server.host, each_server.port)
    for key, row in zip(KEYS.tolist(), ROWS, strict=True):
        name = f"hps_et{{hps_et.dcn.user/p{partition_by_formula(key, 3)}}}v"
        assert client.hget(name, key.to_bytes(8, "little", signed=True)) == row.numpy().tobytes()


def test_partitions_by_the_formula() -> None:
    keys = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    assert (mixed(keys) % np.uint64(7)).tolist() == [partition_by_formula(key, 7) for key in keys.tolist()]


@pytest.mark.parametrize("evict", ["random", "lru"])
def test_a_full_partition_evicts(each_server: RedisProcess, evict: str) -> None:
    overflow = OverflowSpec(max_rows=60, evict=evict, keep=0.5)  # type: ignore[arg-type]
    server = RedisServer(each_server.spec(num_partitions=1, overflow=overflow))
    tier = tiers.redis(server, f"hps_et.full.{evict}", 4)
    tier.insert(KEYS[:60], ROWS[:60])
    assert tier.count() == 60
    tier.insert(KEYS[60:], ROWS[60:])
    assert tier.count() == 30
    assert tier.statistics().evicted == 70


def test_rows_of_another_size_are_missing_and_counted(each_server: RedisProcess) -> None:
    tier = tiers.redis(RedisServer(each_server.spec(num_partitions=1)), "hps_et.m.sizes", 4)
    tier.insert(KEYS, ROWS)
    client = redis.Redis(each_server.host, each_server.port)
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
    slow = tiers.host(4)
    slow.insert(KEYS[:50], -ROWS[:50])
    tier = tiers.redis(RedisServer(own_server.spec()), "hps_et.m.t", 4, clock)
    table = table_of([tier, slow])
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
    tiers.redis(RedisServer(own_server.spec()), "hps_et.m.t", 4).insert(KEYS, ROWS)
    table = table_of([tiers.redis(RedisServer(own_server.spec(timeout_seconds=0.1)), "hps_et.m.t", 4, clock)])
    own_server.pause()
    assert torch.equal(table.lookup(KEYS), torch.zeros(100, 4))
    assert table.statistics().tiers[0].errors == 1
    own_server.resume()

    def is_used_again() -> bool:
        clock.now += 0.3
        return torch.equal(table.lookup(KEYS), ROWS)

    wait_for(is_used_again)


def test_a_full_server_rejects_rows_and_serves_the_others(tmp_path: Path) -> None:
    with running(tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = tiers.redis(RedisServer(server.spec()), "hps_et.m.t", 4)
        tier.insert(KEYS, ROWS)
        many = torch.arange(1000, 301_000)
        with pytest.raises(StorageError):
            tier.insert(many, torch.zeros(300_000, 4))
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)


def test_a_user_with_a_password(tmp_path: Path) -> None:
    with running(tmp_path / "redis") as server:
        client = redis.Redis(server.host, server.port)
        client.acl_setuser("reader", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@all"])
        client.acl_setuser("default", enabled=False)
        tier = tiers.redis(RedisServer(server.spec(user="reader", password="s3cret")), "hps_et.m.t", 4)
        tier.insert(KEYS, ROWS)
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)
        with pytest.raises(StorageError):
            tiers.redis(RedisServer(server.spec(user="reader", password="wrong")), "hps_et.m.t", 4).lookup(KEYS)


def server_options(certificates: Certificates) -> list[str]:
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    return [word for name, file in files.items() for word in (f"--tls-{name}-file", certificates.file(file))]


def client_spec(certificates: Certificates, **changes: str | None) -> TLSSpec:
    given = {"certificate": certificates.file("client.crt"), "key": certificates.file("client.key")}
    return TLSSpec(**{"ca_certificates": certificates.authority, **given, **changes})  # type: ignore[arg-type]


def skip_without(program: Program, folder: Path, *, is_encrypted: bool) -> None:
    """Skip a test whose server is not installed, or was built without encryption."""
    path = program.require()
    if is_encrypted:
        OPENSSL.require()
        words = [path, "--port", "0", "--tls-port", "1", "--dir", str(folder)]
        output = subprocess.run(words, capture_output=True, timeout=60).stdout
        if b"No tls-cert-file configured" not in output:
            pytest.skip(f"{path} was built without TLS")


EACH_PROGRAM = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.names[0])


@EACH_PROGRAM
def test_encrypted_connections_check_the_server_and_the_client(tmp_path: Path, program: Program) -> None:
    skip_without(program, tmp_path, is_encrypted=True)
    certificates = Certificates(tmp_path)
    with running(tmp_path / "redis", *server_options(certificates), program=program, is_encrypted=True) as server:
        named = client_spec(certificates, server_name="redis.localhost")
        held = tiers.redis(RedisServer(server.spec(tls=named)), "hps_et.m.t", 4)
        held.insert(KEYS, ROWS)
        assert torch.equal(held.lookup(KEYS).rows, ROWS)
        other = tmp_path / "other"
        other.mkdir()
        for wrong in (
            None,  # not encrypted
            client_spec(certificates, server_name="redis.example"),  # a name that the certificate does not have
            client_spec(certificates),  # nor has it the address of the server
            client_spec(
                certificates, server_name="redis.localhost", certificate=None, key=None
            ),  # the client is unknown
            client_spec(
                certificates, server_name="redis.localhost", ca_certificates=Certificates(other).authority
            ),  # another authority
        ):
            with pytest.raises(StorageError):
                tiers.redis(RedisServer(server.spec(tls=wrong)), "hps_et.m.t", 4).lookup(KEYS)


@contextlib.contextmanager
def cluster_of_one(directory: Path) -> Iterator[tuple[RedisProcess, Any]]:
    with running(directory, "--cluster-enabled", "yes", "--cluster-announce-ip", "{host}") as process:
        client = redis.Redis(process.host, process.port)
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: client.cluster("info")["cluster_state"] == "ok")
        yield process, client


def test_a_cluster_whose_nodes_cannot_be_listed_after_a_move(tmp_path: Path) -> None:
    """The client's own error, or one of a client that another thread had closed, reached lookups."""
    with cluster_of_one(tmp_path / "redis") as (process, client):
        server = RedisServer(process.spec())
        client.set("k", 1)
        assert server.is_cluster
        read = redis.connection.Connection.read_response
        moved = redis.exceptions.MovedError(f"0 {process.address}")
        failing = mock.patch.object(redis.connection.Connection, "read_response", side_effect=moved)
        with failing, pytest.raises(StorageError):
            server.run([request("k", b"GET")])
        is_first = itertools.count()

        def close_once(*arguments: Any, **options: Any) -> Any:
            if next(is_first):
                return read(*arguments, **options)
            server.close()  # as another thread does whose command failed
            raise moved

        assert server.run([request("k", b"GET")]) == [b"1"]
        with mock.patch.object(redis.connection.Connection, "read_response", close_once):
            assert server.run([request("k", b"GET")]) == [b"1"]
        server.close()


def test_calls_of_a_cluster_take_turns(tmp_path: Path) -> None:
    """More at once than connections: one call failed, which let the tier rest for all."""
    with cluster_of_one(tmp_path / "redis") as (process, client):
        server = RedisServer(process.spec(num_connections=2, timeout_seconds=60.0))
        assert server.is_cluster

        def take(_: int) -> list[Any]:
            return server.run([request("k", b"BLPOP", b"0")])

        with ThreadPoolExecutor(4) as pool:
            taken = pool.map(take, range(4))
            # The calls that have no connection yet must not fail while the others block.
            wait_for(lambda: client.info("clients")["blocked_clients"] == 2)
            client.rpush("k", *range(4))
            assert sorted(reply[0][1] for reply in taken) == [b"0", b"1", b"2", b"3"]
        server.close()


@pytest.mark.slow
@EACH_PROGRAM
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_cluster_of_three(tmp_path: Path, program: Program, is_encrypted: bool) -> None:
    skip_without(program, tmp_path, is_encrypted=is_encrypted)
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-announce-ip", "{host}"]
    tls, client_options, words = None, dict[str, Any](), list[str]()
    if is_encrypted:
        certificates = Certificates(tmp_path)
        tls = client_spec(certificates, server_name="redis.localhost")
        options += [*server_options(certificates), "--tls-cluster", "yes", "--tls-replication", "yes"]
        files = {"cert": tls.certificate, "key": tls.key, "cacert": tls.ca_certificates}
        words = ["--tls", *(word for name, file in files.items() for word in (f"--{name}", str(file)))]
        client_options = {"ssl": True, "ssl_ca_certs": tls.ca_certificates, "ssl_check_hostname": False}
        client_options |= {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}

    def client(node: RedisProcess) -> Any:
        return redis.Redis(node.host, node.port, **client_options)

    with (
        running(tmp_path / "0", *options, program=program, is_encrypted=is_encrypted) as first,
        running(tmp_path / "1", *options, program=program, is_encrypted=is_encrypted) as second,
        running(tmp_path / "2", *options, program=program, is_encrypted=is_encrypted) as third,
    ):
        nodes = [first, second, third]
        # Each forms clusters of the other's servers, and Valkey's wheel comes without one.
        command = shutil.which(program.names[0].replace("-server", "-cli")) or "redis-cli"
        create = [command, *words, "--cluster", "create", *(node.address for node in nodes), "--cluster-yes"]
        subprocess.run(create, check=True, stdout=subprocess.DEVNULL, timeout=60)
        tier = tiers.redis(RedisServer(second.spec(num_partitions=16, timeout_seconds=2.0, tls=tls)), "hps_et.m.t", 4)
        for node in nodes:  # each learns of the others by itself
            wait_for(lambda node=node: client(node).cluster("info")["cluster_state"] == "ok")
        tier.insert(KEYS, ROWS)
        assert torch.equal(tier.lookup(KEYS).rows, ROWS)
        assert tier.count() == 100
        assert all(client(node).dbsize() > 0 for node in nodes)
        table = table_of([tier])
        third.kill()
        lost = (table.lookup(KEYS) == 0).all(1)
        assert bool(lost.any())
        third.start()
        wait_for(lambda: client(first).cluster("info")["cluster_state"] == "ok")
        wait_for(lambda: torch.equal(table.lookup(KEYS), ROWS))
