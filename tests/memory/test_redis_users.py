# SPDX-License-Identifier: Apache-2.0
"""Processes that have a table on a server, whether they look rows up or not."""

import threading
from pathlib import Path
from unittest import mock

import pytest

from terarec.memory import redis_users
from terarec.memory.redis_server import RedisServer
from terarec.memory.redis_users import RedisUsers
from tests.ps.redis_processes import needs_redis, running
from tests.waiting import wait_for

NAME = "hps_et{t/p0}u"


@needs_redis
def test_a_process_has_a_table_until_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    with running(tmp_path / "redis") as started:
        client = pytest.importorskip("redis").Redis(started.host, started.port)
        server = RedisServer(started.spec())
        first, second = (RedisUsers(server, [NAME, "hps_et{o/p0}u"]) for _ in range(2))
        # By the clock of the server: those of processes differ.
        monkeypatch.setattr("time.time", lambda: 0.0)
        for users in (first, second):
            users.join()
        assert client.zcard(NAME) == 2
        client.zadd(NAME, {"gone": client.time()[0] - redis_users.USE_SECONDS - 1})
        assert first.leave(NAME)
        assert not second.leave(NAME)
        assert not client.exists(NAME)
        first.close()
        assert client.zcard("hps_et{o/p0}u") == 1
        second.close()
        assert not client.keys()
        server.close()
    assert not {thread.name for thread in set(threading.enumerate()) - threads} & {"terarec-redis-users"}


@needs_redis
def test_a_process_says_again_that_it_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lookups that reached the server did: one that found all rows in its cache counted as gone."""
    monkeypatch.setattr(redis_users, "USE_SECONDS", 3)
    with running(tmp_path / "redis") as started:
        client = pytest.importorskip("redis").Redis(started.host, started.port)
        server = RedisServer(started.spec())
        started.kill()
        users = RedisUsers(server, [NAME])
        users.join()  # which a server that is away is told later
        started.start()
        wait_for(lambda: client.zcard(NAME) == 1)
        users.close()
        assert not client.keys()
        server.close()


@needs_redis
def test_a_process_goes_on_saying_so_after_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread ended with an error of the client that is no `StorageError`: others removed rows in use."""
    monkeypatch.setattr(redis_users, "USE_SECONDS", 1)
    with running(tmp_path / "redis") as started:
        client = pytest.importorskip("redis").Redis(started.host, started.port)
        server = RedisServer(started.spec())
        users = RedisUsers(server, [NAME])
        users.join()
        with mock.patch.object(server, "run", side_effect=RuntimeError("of the client")) as run:
            wait_for(lambda: run.call_count > 1)
        client.delete(NAME)
        wait_for(lambda: client.zcard(NAME) == 1)
        assert "of the client" in caplog.text
        users.close()
        server.close()
