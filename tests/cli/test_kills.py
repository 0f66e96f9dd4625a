# SPDX-License-Identifier: Apache-2.0
"""Commands that are killed at random moments: the result is whole or not there, and the command runs again."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terarec.checkpoint import latest
from terarec.config.files import load_update_stream
from terarec.serve import UpdateReceiver, open_stream
from tests.cli.cases import CASES, Originals, digests
from tests.cli.conftest import Workshop, figures
from tests.cli.test_stopping import start
from tests.ps.redis_processes import RedisProcess, needs_redis

pytestmark = pytest.mark.usefixtures("reports")

NAMES = ("convert", "convert back", "export", "export table", "export triton", "predict data", "drift", "init-config")
KILLS = 6


@pytest.fixture(scope="module")
def originals(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("original"), workshop)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "redis")
    yield server
    server.kill()


def seconds_of(*arguments: object) -> float:
    """How long a command takes in a process of its own; it must succeed."""
    begin = time.monotonic()
    ended = start(*arguments).wait(300)
    assert ended.returncode == 0, ended.stderr
    return time.monotonic() - begin


def kill_within(seconds: float, seed: int, *arguments: object) -> None:
    process = start(*arguments)
    time.sleep(random.Random(seed).uniform(0, seconds))
    process.close()


def results(out: Path) -> set[str]:
    """Names of the files of a result, without those under construction beside it."""
    return {name for name in digests(out) if ".partial" not in name and ".former" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_command_leaves_all_or_nothing(name: str, originals: Originals, tmp_path: Path) -> None:
    """Finding Q1, and kills during conversions and exports, which were not tried."""
    root, whole = tmp_path / "root", tmp_path / "whole"
    originals.copy(CASES[name].reads, root)
    whole.mkdir()
    before = digests(root)
    seconds = seconds_of(*CASES[name].words(root, whole))
    expected = results(whole)
    for seed in range(KILLS):
        out = tmp_path / f"out-{seed}"
        out.mkdir()
        kill_within(1.1 * seconds, seed, *CASES[name].words(root, out))
        assert results(out) in (set(), expected), f"seed {seed}"
        if not results(out):
            figures(*CASES[name].words(root, out))
            assert not [path for path in digests(out) if ".partial" in path], f"seed {seed}"
        assert results(out) == expected, f"seed {seed}"
        assert digests(root) == before


@needs_redis
@pytest.mark.slow
def test_a_killed_publication_is_repeated(originals: Originals, redis: RedisProcess, tmp_path: Path) -> None:
    root = tmp_path / "root"
    originals.copy(("run",), root)
    before = digests(root)

    def publish(stream: object) -> list[object]:
        return ["publish", root / "run", "--to", f"redis://{redis.address}/{stream}", "--once"]

    step = latest(root / "run" / "checkpoints")
    seconds = seconds_of(*publish("whole"))
    for seed in range(KILLS):
        kill_within(1.1 * seconds, seed, *publish(seed))
        figures(*publish(seed))
        stream = open_stream(load_update_stream(f"redis://{redis.address}/{seed}"))
        with UpdateReceiver(stream, tmp_path / f"replica-{seed}", every_seconds=None) as receiver:
            receiver.poll()
        received = latest(tmp_path / f"replica-{seed}" / "checkpoints")
        assert digests(received) == digests(step)
        assert digests(root) == before
