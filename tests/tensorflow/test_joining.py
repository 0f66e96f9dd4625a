# SPDX-License-Identifier: Apache-2.0
"""The start of ranks among programs that do not belong to them, by sockets of this process."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from terarec.errors import CollectiveError, ConfigError
from terarec.kernels.environment import MOST_PORT, Launch, launch
from terarec.tensorflow.joining import connect
from tests.addresses import own_address
from tests.waiting import PATIENCE, wait_for

MAGIC = b"terarec1"
HEAD_OF_MUCH = MAGIC + struct.pack("<I", 1 << 20)
"""The head of a message of 1 MiB."""


def rank(number: int, size: int = 2) -> Launch:
    return Launch(rank=number, size=size, local_size=None, local_rank=number, has_address=True, is_mpi=False)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    host, port = own_address()
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    return host, port


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def call(place: tuple[str, int], opened: ExitStack) -> socket.socket:
    """Connect to what listens there, or will."""
    called: list[socket.socket] = []

    def reaches() -> bool:
        with suppress(ConnectionRefusedError):
            called.append(socket.create_connection(place))
        return bool(called)

    wait_for(reaches)
    return opened.enter_context(called[0])


def trickle(stranger: socket.socket, content: bytes, stop: threading.Event) -> None:
    """Send a byte at a time, until the other side closes the connection."""
    with stranger, suppress(OSError):
        for number in range(1 << 20):
            if stop.wait(0.02):
                return
            stranger.sendall(content[number : number + 1] or b" ")


def test_strangers_keep_no_rank_waiting(place: tuple[str, int], threads: ThreadPoolExecutor) -> None:
    first = threads.submit(connect, rank(0), PATIENCE)
    stop = threading.Event()
    with ExitStack() as opened:
        opened.callback(stop.set)
        silent = [call(place, opened) for _ in range(200)]  # more than are heard at once
        for content in (HEAD_OF_MUCH, b"GET / HTTP/1.1"):
            threads.submit(trickle, call(place, opened), content, stop)
        for message in (b"[" * 100_000, b"[]", b"{}", json.dumps({"job": "other"}).encode(), b"\xff"):
            call(place, opened).sendall(MAGIC + struct.pack("<I", len(message)) + message)
        own = connect(rank(1), PATIENCE)
        theirs = first.result(PATIENCE)
        silent[-1].settimeout(PATIENCE)
        assert silent[-1].recv(1) == b""  # strangers are sent away then
    assert own[1] is theirs[0] is None
    one, other = own[0], theirs[1]
    assert one is not None
    assert other is not None
    with one, other:
        assert one.getpeername() == other.getsockname()


def test_strangers_that_keep_calling_do_not_hold_a_rank(place: tuple[str, int], threads: ThreadPoolExecutor) -> None:
    stop = threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(place) as stranger:
                stranger.sendall(MAGIC)

    for _ in range(2):
        threads.submit(keep_calling)
    with ExitStack() as opened:
        opened.callback(stop.set)
        with pytest.raises(CollectiveError, match="rank 0 waited for rank 1") as raised:
            connect(rank(0), 0.5)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(b"", "cannot reach rank 0"), (MAGIC + struct.pack("<I", 2) + b"{}", "rank 0 has not sent the addresses")],
    ids=["hello", "addresses"],
)
def test_a_first_rank_that_trickles_does_not_hold_another(
    place: tuple[str, int], threads: ThreadPoolExecutor, answer: bytes, expected: str
) -> None:
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with suppress(OSError):
                caller, _ = server.accept()
                caller.sendall(answer)
                trickle(caller, HEAD_OF_MUCH, stop)

    with socket.create_server(place) as server, ExitStack() as ended:
        server.settimeout(0.1)
        ended.callback(threads.submit(serve).result, PATIENCE)
        ended.callback(stop.set)
        with pytest.raises(CollectiveError, match=expected):
            connect(rank(1), 0.5)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("RANK", "1" * 5000), ("MASTER_PORT", "70000")],
)
def test_variables_of_a_launcher_that_do_not_fit_are_named(
    place: tuple[str, int], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name, fitting in (("RANK", "0"), ("WORLD_SIZE", "2"), (variable, value)):
        monkeypatch.setenv(name, fitting)
    with pytest.raises(ConfigError) as raised:
        connect(launch() or rank(0), 0.5)
    assert raised.value.where == ("MASTER_PORT" if variable == "MASTER_PORT" else "RANK")
    assert len(str(raised.value)) < 200


def test_ranks_try_no_port_after_the_last(place: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(MOST_PORT - 1))
    with pytest.raises(CollectiveError, match="cannot reach rank 0"):
        connect(rank(1), 0.5)
