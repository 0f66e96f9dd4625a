# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts whose link is cut, comes back or becomes slow in the middle of training.

The hosts are network namespaces of this machine, joined by a pair of virtual Ethernet devices; making them takes root.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from terarec.checkpoint import complete_checkpoints
from terarec.dist import Ranks
from tests.dist.host_worker import spec_of
from tests.dist.test_training import check_same_weights, data, fit
from tests.programs import IP

pytestmark = pytest.mark.slow
__all__ = ["data"]  # a fixture

PORT = 29617  # in a namespace, where nobody else listens
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MOST_SECONDS = 240.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two network namespaces and the link between them."""

    def __init__(self, name: str) -> None:
        self.names = (f"{name}-a", f"{name}-b")
        ends = (f"{name}a", f"{name}b")
        for host in self.names:
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for host, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            ip("-n", host, "link", "set", end, "name", "link0")
            ip("-n", host, "address", "add", f"{address}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", host, "link", "set", device, "up")

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "link0", "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", "link0", "up")

    def slow(self, rate: str) -> None:
        for host in self.names:
            options = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "500ms"]
            command = ["tc", "-n", host, "qdisc", "replace", "dev", "link0", *options]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def remove(self) -> None:
        for host in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", host)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    IP.require()
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"tr{os.getpid() % 100000}"
    made: Hosts | None = None
    try:
        made = Hosts(name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


def train(
    hosts: Hosts, data: Path, out: Path, *, seconds: float, at_step: int = 0, act: Callable[[], None] | None = None
) -> list[dict[str, Any]]:
    """Train on both hosts and call `act` once rank 0 has done `at_step`; return the last line of each rank."""
    processes = []
    for rank, host in enumerate(hosts.names):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "link0",
        }
        worker = [sys.executable, "-m", "tests.dist.host_worker", str(data), str(out), str(seconds)]
        named = ["unshare", "--uts", "sh", "-c", f'hostname host-{"ab"[rank]}; exec "$@"', "sh", *worker]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *named],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
        )
    try:
        first = processes[0].stdout
        assert first is not None
        lines = []
        for line in first:
            lines.append(line)
            if act is not None and line == f"step {at_step}\n":
                act()
        others = [process.communicate(timeout=MOST_SECONDS)[0].splitlines() for process in processes[1:]]
        return [json.loads(found[-1]) for found in (lines, *others)]
    finally:
        for process in processes:
            process.kill()


def check_goes_on(hosts: Hosts, data: Path, out: Path, expected: Path) -> None:
    """Check that a run that ended in the middle goes on from its checkpoint, and gives what one process does."""
    reached = complete_checkpoints(out / "checkpoints")
    assert reached
    assert reached[-1].name < "step-00000120"
    assert train(hosts, data, out, seconds=60.0) == [{"steps": 120}] * 2
    check_same_weights(out, expected)


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    fit(Ranks(), spec_of(data), out, None, False)
    return out


def test_a_broken_link_is_named_and_the_run_continues_from_its_checkpoint(
    hosts: Hosts, data: Path, expected: Path, tmp_path: Path
) -> None:
    began: list[float] = []

    def cut() -> None:
        hosts.cut()
        began.append(time.monotonic())

    found = train(hosts, data, tmp_path / "run", seconds=8.0, at_step=20, act=cut)
    assert began
    assert time.monotonic() - began[0] < 60.0  # where the backend alone would wait for minutes
    for rank, (raised, names) in enumerate(zip(found, (("host-a", "host-b"), ("host-b", "host-a")), strict=True)):
        assert raised["step"] >= 20, raised
        assert raised["pairs"] == [[rank, 1 - rank]], raised
        assert all(name in raised["error"] for name in names), raised
    hosts.mend()
    check_goes_on(hosts, data, tmp_path / "run", expected)


def test_a_link_that_comes_back_in_time_or_is_slow_changes_nothing(
    hosts: Hosts, data: Path, expected: Path, tmp_path: Path
) -> None:
    def disturb() -> None:
        hosts.cut()
        time.sleep(2.0)
        hosts.mend()
        hosts.slow("8mbit")

    found = train(hosts, data, tmp_path / "run", seconds=60.0, at_step=20, act=disturb)
    assert found == [{"steps": 120}] * 2
    check_same_weights(tmp_path / "run", expected)


def test_a_link_that_becomes_too_slow_ends_the_run_in_time(
    hosts: Hosts, data: Path, expected: Path, tmp_path: Path
) -> None:
    found = train(hosts, data, tmp_path / "run", seconds=4.0, at_step=20, act=lambda: hosts.slow("1kbit"))
    assert all(raised["step"] >= 20 and raised["collective"] for raised in found), found
    hosts.slow("1gbit")
    check_goes_on(hosts, data, tmp_path / "run", expected)
