import shutil
from collections.abc import Iterator

import pytest

from tests.ps.redis_processes import PROGRAM, PROGRAMS, RedisProcess, running


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A server for tests that do not stop it."""
    if PROGRAM is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session", params=PROGRAMS)
def each_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis, and a Valkey, for tests that do not stop it."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    with running(tmp_path_factory.mktemp("redis"), program=request.param) as server:
        yield server
