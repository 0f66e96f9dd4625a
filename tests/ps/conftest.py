# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator

import pytest

from tests.ps.redis_processes import PROGRAMS, RedisProcess, running


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A server for tests that do not stop it."""
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session", params=PROGRAMS, ids=lambda program: program.names[0])
def each_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis, and a Valkey, for tests that do not stop it."""
    with running(tmp_path_factory.mktemp("redis"), program=request.param) as server:
        yield server
