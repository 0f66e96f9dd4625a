# SPDX-License-Identifier: Apache-2.0
"""The start of ranks without torch: a TCP connection between every pair of the processes that a launcher started.

Rank 0 listens where the launcher's variables say, or, for processes of one mpirun on one machine, at a port that it
writes to a file that only they know. It tells the others where each one listens, and of a pair the rank of the higher
number calls.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import terarec
from terarec.errors import CollectiveError, ConfigError, FormatError
from terarec.io.files import atomic_file
from terarec.io.opening import read_bytes
from terarec.kernels.environment import MOST_PORT, Launch, family_file, meeting_place

_MAGIC = b"terarec1"
_HEAD_BYTES = len(_MAGIC) + 4
_STRANGER = "another program answers there"
_MOST_BYTES = 1 << 20
_PORT_BYTES = 5
_PORTS = 16
"""Ports that rank 0 tries: torchrun's own server has the first one."""
_ANSWER_SECONDS = 10.0
"""Seconds within which a process that was called says who it is."""
_RETRY_SECONDS = 0.1
_MOST_CALLERS = 128
"""Connections of callers that have not said yet who they are; the oldest one gives way to a further one."""


def connect(launched: Launch, timeout: float) -> list[socket.socket | None]:
    """Return a connection to each rank but this one.

    Args:
        launched: The launch of this process.
        timeout: Seconds within which all have to come.

    Raises:
        ConfigError: The launcher's variables do not say where rank 0 listens.
        CollectiveError: Ranks that do not come, or that differ in their number or in the version of terarec.
    """
    end = time.monotonic() + timeout
    place = meeting_place()
    job = f"{place[0]}:{place[1]}" if place is not None else str(_file(launched))
    hello = {"job": job, "size": launched.size, "rank": launched.rank, "version": terarec.__version__}
    with ExitStack() as opened:
        peers: dict[int, socket.socket] = {}
        if launched.rank == 0:
            _welcome(launched, hello, peers, opened, end)
        else:
            _call_all(launched, hello, peers, opened, end)
        for peer in peers.values():
            peer.setblocking(False)
        opened.pop_all()
    return [peers.get(rank) for rank in range(launched.size)]


def _welcome(
    launched: Launch, hello: dict[str, Any], peers: dict[int, socket.socket], opened: ExitStack, end: float
) -> None:
    place, file = meeting_place(), None
    if place is not None:
        server = _listener(*place)
    else:
        file = _file(launched)
        server = socket.create_server(("127.0.0.1", 0), backlog=launched.size)
        with atomic_file(file) as partial:
            partial.write_text(str(server.getsockname()[1]))
    with server:
        ports = _accept(server, hello, range(1, launched.size), peers, opened, end)
        addresses = {rank: (peers[rank].getpeername()[0], port) for rank, port in ports.items()}
        for rank, peer in peers.items():
            try:
                _send(peer, {"addresses": addresses}, end)
            except OSError as error:
                raise CollectiveError(
                    f"rank {rank} has gone while others came: {error}", collective="start", rank=rank
                ) from None
    if file is not None:
        file.unlink(missing_ok=True)


def _call_all(
    launched: Launch, hello: dict[str, Any], peers: dict[int, socket.socket], opened: ExitStack, end: float
) -> None:
    first, server = _call_first(launched, hello, end)
    peers[0] = opened.enter_context(first)
    with server:
        try:
            addresses = _receive(first, end)["addresses"]
        except (OSError, ValueError, KeyError) as error:
            raise CollectiveError(
                f"rank 0 has not sent the addresses of all ranks: {error}; some did not come", collective="start"
            ) from None
        for rank in range(1, launched.rank):
            host, port = addresses[str(rank)]
            try:
                peer = socket.create_connection((host, port), timeout=_left(end))
                peers[rank] = opened.enter_context(peer)
                _no_delay(peer)
                _send(peer, hello, end)
            except OSError as error:
                raise CollectiveError(
                    f"rank {launched.rank} cannot reach rank {rank} at {host}:{port}: {error}",
                    collective="start",
                    rank=rank,
                ) from None
        _accept(server, hello, range(launched.rank + 1, launched.size), peers, opened, end)


def _call_first(launched: Launch, hello: dict[str, Any], end: float) -> tuple[socket.socket, socket.socket]:
    """Return the connection to rank 0, and the socket at which this rank listens on the same network."""
    reason: object = "it does not listen"
    while time.monotonic() < end:
        for host, port in _addresses(launched):
            if time.monotonic() >= end:
                break
            answer_end = min(end, time.monotonic() + _ANSWER_SECONDS)
            with ExitStack() as opened:
                try:
                    peer = opened.enter_context(socket.create_connection((host, port), timeout=_left(answer_end)))
                    server = opened.enter_context(
                        socket.create_server((peer.getsockname()[0], 0), family=peer.family, backlog=launched.size)
                    )
                    _no_delay(peer)
                    _send(peer, {**hello, "port": server.getsockname()[1]}, answer_end)
                    answer = _receive(peer, answer_end)
                except (OSError, ValueError) as error:
                    reason = error
                    continue
                if problem := answer.get("problem"):
                    raise CollectiveError(str(problem), collective="start", rank=0)
                opened.pop_all()
                return peer, server
        time.sleep(_RETRY_SECONDS)
    raise CollectiveError(f"rank {launched.rank} cannot reach rank 0: {reason}", collective="start", rank=0)


def _addresses(launched: Launch) -> list[tuple[str, int]]:
    place = meeting_place()
    if place is not None:
        return [(place[0], port) for port in _ports(place[1])]
    with suppress(OSError, ValueError, FormatError):
        file = _file(launched)
        if file.stat().st_uid == os.getuid():
            return [("127.0.0.1", int(read_bytes(file, most=_PORT_BYTES)))]
    return []


def _file(launched: Launch) -> Path:
    if launched.local_size != launched.size:
        raise ConfigError(
            "environment",
            f"got {launched.size} processes on several machines, expected MASTER_ADDR and MASTER_PORT, which say "
            "where rank 0 listens",
        )
    return family_file("terarec-sok")


def _ports(first: int) -> range:
    """Return the ports at which rank 0 may listen."""
    return range(first, min(first + _PORTS, MOST_PORT + 1))


def _listener(host: str, port: int) -> socket.socket:
    reason: OSError | None = None
    for one in _ports(port):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            reason = error
    raise CollectiveError(
        f"rank 0 cannot listen at {host}, port {port} or the {len(_ports(port)) - 1} after it: {reason}",
        collective="start",
        rank=0,
    )


def _accept(
    server: socket.socket,
    hello: dict[str, Any],
    expected: range,
    peers: dict[int, socket.socket],
    opened: ExitStack,
    end: float,
) -> dict[int, int]:
    """Add connections of the expected ranks to `peers`, and return the ports at which these listen."""
    ports: dict[int, int] = {}
    with closing(_callers(server, hello["job"], end)) as callers:
        while absent := [rank for rank in expected if rank not in peers]:
            peer, theirs = next(callers, (None, {}))
            if peer is None:
                raise CollectiveError(
                    f"rank {hello['rank']} waited for rank {', '.join(map(str, absent))}, expected all ranks to start",
                    collective="start",
                    rank=absent[0],
                )
            problem = _difference(hello, theirs, absent)
            try:
                if problem or hello["rank"] == 0:
                    _send(peer, {"problem": problem}, end)
                _no_delay(peer)
            except OSError:  # it has gone
                peer.close()
                continue
            if problem:
                peer.close()
                raise CollectiveError(problem, collective="start", rank=theirs.get("rank"))
            rank = theirs["rank"]
            peers[rank] = opened.enter_context(peer)
            ports[rank] = int(theirs.get("port", 0))
    return ports


def _callers(
    server: socket.socket, job: str, end: float
) -> Generator[tuple[socket.socket, dict[str, Any]], None, None]:
    """Yield each caller of a job, and what it says, until `end`.

    All are heard at once: a stranger that says nothing, or a byte at a time, keeps no rank waiting.
    """
    heard: dict[socket.socket, bytearray] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as unheard:
        unheard.callback(_close, heard)
        selector.register(server, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    with suppress(BlockingIOError, ConnectionError):  # it has gone
                        caller, _ = server.accept()
                        heard[caller] = bytearray()
                        caller.setblocking(False)
                        selector.register(caller, selectors.EVENT_READ, caller)
                    for oldest in list(heard)[:-_MOST_CALLERS]:
                        _drop(oldest, heard, selector)
                elif (caller := key.data) in heard:
                    try:
                        message = _advance(caller, heard[caller])
                        if message is not None and message.get("job") != job:
                            raise ValueError("a rank of another job")
                    except BlockingIOError:
                        continue
                    except (OSError, ValueError):  # a stranger, or one that has gone
                        _drop(caller, heard, selector)
                        continue
                    if message is not None:
                        selector.unregister(caller)
                        del heard[caller]
                        yield caller, message


def _close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _drop(caller: socket.socket, heard: dict[socket.socket, bytearray], selector: selectors.BaseSelector) -> None:
    selector.unregister(caller)
    del heard[caller]
    caller.close()


def _difference(ours: dict[str, Any], theirs: dict[str, Any], absent: list[int]) -> str:
    for name in ("size", "version"):
        if theirs.get(name) != ours[name]:
            return f"rank {theirs.get('rank')} has {name} {theirs.get(name)!r}, expected that of rank 0, {ours[name]!r}"
    if theirs.get("rank") not in absent:
        return f"rank {theirs.get('rank')} came twice, expected each once"
    return ""


def _no_delay(peer: socket.socket) -> None:
    # Of an exchange's small parts each would wait for the answer to the one before, up to 40 ms.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(peer: socket.socket, message: dict[str, Any], end: float) -> None:
    content = json.dumps(message).encode()
    peer.settimeout(_left(end))  # for all of it
    peer.sendall(_MAGIC + struct.pack("<I", len(content)) + content)


def _receive(peer: socket.socket, end: float) -> dict[str, Any]:
    """Return a message.

    Raises:
        OSError: None came until `end`.
        ValueError: The other side is no rank.
    """
    content = bytearray()
    while True:
        peer.settimeout(_left(end))  # again: it is one for each call
        if (message := _advance(peer, content)) is not None:
            return message


def _advance(peer: socket.socket, content: bytearray) -> dict[str, Any] | None:
    """Add what comes to the content of a message, and return the message once it is complete.

    Raises:
        OSError: Nothing comes.
        ValueError: The other side is no rank.
    """
    piece = peer.recv(_missing(content))
    if not piece:
        raise ConnectionResetError("it has closed the connection")
    content += piece
    if _missing(content):
        return None
    try:
        message = json.loads(content[_HEAD_BYTES:])
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise ValueError(_STRANGER)
    return message


def _missing(content: bytearray) -> int:
    """Return how many bytes of a message have to come: first those of its head, which has its size.

    Raises:
        ValueError: It is none.
    """
    if not _MAGIC.startswith(content[: len(_MAGIC)]):
        raise ValueError(_STRANGER)
    if len(content) < _HEAD_BYTES:
        return _HEAD_BYTES - len(content)
    (size,) = struct.unpack_from("<I", content, len(_MAGIC))
    if size > _MOST_BYTES:
        raise ValueError(_STRANGER)
    return int(_HEAD_BYTES + size - len(content))


def _left(end: float) -> float:
    """Return the seconds until `end`.

    Raises:
        TimeoutError: There are none.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
