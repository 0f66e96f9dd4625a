# SPDX-License-Identifier: Apache-2.0
"""What a test may take for granted on a busy machine, beside other runs: neither a pace nor a port."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.addresses import own_address
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
WAITS = ("communicate", "join", "poll", "result", "settimeout", "wait")
"""Calls whose first argument is how long to wait."""
LIMIT = re.compile(rf"(?:\btimeout=|\.(?:{'|'.join(WAITS)})\()\s*\d")
LONGEST_PAUSE, SHORTEST_LIMIT = 2.0, 60.0


def sources(pattern: str | re.Pattern[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the tree of each file of the suite that has a pattern in it."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if re.search(pattern, text):
            yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Yield the line and the seconds of each wait whose limit is a number in the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            limit = next((one.value for one in node.keywords if one.arg == "timeout"), None)
            if limit is None and node.args and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                limit = node.args[0]
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
                yield node.lineno, float(limit.value)


def released_ports(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each use of a port after the block that held the socket with it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for block in ast.walk(function):
            inner = {*ast.walk(block)} if isinstance(block, ast.With) else set()
            ports = {
                name.id
                for node in inner
                if isinstance(node, ast.Assign) and "getsockname()" in ast.unparse(node.value)
                for target in node.targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and node.id in ports and node not in inner and node.lineno > block.lineno:
                    yield node.lineno


def test_a_wait_is_a_pause_or_has_a_limit_for_a_busy_machine() -> None:
    """Finding K2: on a busy machine a broker took more than the 20 s that a test gave it to create a topic."""
    assert PATIENCE >= SHORTEST_LIMIT
    short = [
        f"{path}:{line}: {seconds:g} s"
        for path, tree in sources(LIMIT)
        for line, seconds in limits(tree)
        if LONGEST_PAUSE < seconds < SHORTEST_LIMIT
    ]
    assert short == []


def test_no_port_is_used_after_its_socket_is_closed() -> None:
    """Finding K3: a port that was let go came to another test, whose server then met the clients of the first."""
    places = [f"{path}:{line}" for path, tree in sources("getsockname") for line in released_ports(tree)]
    # Of which the port is one of an address that nobody else asks for.
    assert {place.partition(":")[0] for place in places} == {"tests/addresses.py"}


def test_waits_and_ports_are_seen() -> None:
    """Findings K2 and K3: as the tests were that failed."""
    text = """
def test_one():
    admin.create_topics([topic])[name].result(20)
    run(command, timeout=5.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        connect(port)
    serve(port)
"""
    tree = ast.parse(text)
    assert LIMIT.search(text)
    assert [*limits(tree)] == [(3, 20.0), (4, 5.0)]
    assert [*released_ports(tree)] == [9]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.1 is the only address of its own that a test has")
def test_servers_that_tests_start_have_addresses_of_their_own() -> None:
    """Finding K3: a client that still tries to reach a server that has ended reaches no other."""
    addresses = [own_address() for _ in range(50)]
    assert len({*addresses}) == len(addresses)
    assert all(host != "127.0.0.1" for host, _ in addresses)
