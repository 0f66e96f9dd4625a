# SPDX-License-Identifier: Apache-2.0
"""The start of ranks without torch: a TCP connection between every pair of the processes that a launcher started.

Rank 0 listens where the launcher's variables say, or, for processes of one mpirun on one machine, at a port that it
writes to a file that only they know. It tells the others where each one listens, and of a pair the rank of the higher
number calls.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import terarec
from terarec.errors import CollectiveError, ConfigError, FormatError
from terarec.io.files import atomic_file
from terarec.io.opening import read_bytes
from terarec.kernels.environment import Launch, family_file, meeting_place

_MAGIC = b"terarec1"
_MOST_BYTES = 1 << 20
_PORT_BYTES = 5
_PORTS = 16
"""Ports that rank 0 tries: torchrun's own server has the first one."""
_ANSWER_SECONDS = 10.0
"""Seconds within which a process that was called, or that calls, says who it is."""
_RETRY_SECONDS = 0.1


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
        for peer in peers.values():
            _send(peer, {"addresses": addresses})
    if file is not None:
        file.unlink(missing_ok=True)


def _call_all(
    launched: Launch, hello: dict[str, Any], peers: dict[int, socket.socket], opened: ExitStack, end: float
) -> None:
    first, server = _call_first(launched, hello, end)
    peers[0] = opened.enter_context(first)
    with server:
        first.settimeout(max(end - time.monotonic(), 0.1))
        try:
            addresses = _receive(first)["addresses"]
        except (OSError, ValueError, KeyError) as error:
            raise CollectiveError(
                f"rank 0 has not sent the addresses of all ranks: {error}; some did not come", collective="start"
            ) from None
        for rank in range(1, launched.rank):
            host, port = addresses[str(rank)]
            try:
                peer = socket.create_connection((host, port), timeout=max(end - time.monotonic(), 0.1))
                peers[rank] = opened.enter_context(peer)
                _no_delay(peer)
                _send(peer, hello)
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
            with ExitStack() as opened:
                try:
                    peer = opened.enter_context(socket.create_connection((host, port), timeout=_ANSWER_SECONDS))
                    server = opened.enter_context(
                        socket.create_server((peer.getsockname()[0], 0), family=peer.family, backlog=launched.size)
                    )
                    _no_delay(peer)
                    _send(peer, {**hello, "port": server.getsockname()[1]})
                    answer = _receive(peer)
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
        return [(place[0], place[1] + number) for number in range(_PORTS)]
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


def _listener(host: str, port: int) -> socket.socket:
    reason: OSError | None = None
    for number in range(_PORTS):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port + number, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            reason = error
    raise CollectiveError(
        f"rank 0 cannot listen at {host}, port {port} or the {_PORTS - 1} after it: {reason}",
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
    while absent := [rank for rank in expected if rank not in peers]:
        server.settimeout(max(end - time.monotonic(), 0.01))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            raise CollectiveError(
                f"rank {hello['rank']} waited for rank {', '.join(map(str, absent))}, expected all ranks to start",
                collective="start",
                rank=absent[0],
            ) from None
        peer.settimeout(_ANSWER_SECONDS)
        try:
            theirs = _receive(peer)
            if theirs.get("job") != hello["job"]:
                raise ValueError("a rank of another job")
            if problem := _difference(hello, theirs, absent):
                _send(peer, {"problem": problem})
                peer.close()
                raise CollectiveError(problem, collective="start", rank=theirs.get("rank"))
            if hello["rank"] == 0:
                _send(peer, {})
        except (OSError, ValueError):  # a stranger, or one that has gone
            peer.close()
            continue
        _no_delay(peer)
        rank = theirs["rank"]
        peers[rank] = opened.enter_context(peer)
        ports[rank] = int(theirs.get("port", 0))
    return ports


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


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    peer.sendall(_MAGIC + struct.pack("<I", len(content)) + content)


def _receive(peer: socket.socket) -> dict[str, Any]:
    """Return a message.

    Raises:
        OSError: None came.
        ValueError: The other side is no rank.
    """
    head = _exactly(peer, len(_MAGIC) + 4)
    (size,) = struct.unpack("<I", head[len(_MAGIC) :])
    if not head.startswith(_MAGIC) or size > _MOST_BYTES:
        raise ValueError("another program answers there")
    message = json.loads(_exactly(peer, size))
    if not isinstance(message, dict):
        raise ValueError("another program answers there")
    return message


def _exactly(peer: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = peer.recv(size - len(content))
        if not piece:
            raise ConnectionResetError("it has closed the connection")
        content += piece
    return bytes(content)
