"""Connections between ranks: a check before the first collective, and another one where a collective has failed.

Every pair of ranks opens a connection, and pairs that cannot are named. The backend itself would only time out, without
saying between which machines.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from terarec.errors import CollectiveError

_CALLERS = 16  # connections that a rank opens at once
_TOKEN_BYTES = 4
_ANSWER_AFTER = 0.2  # seconds between attempts to reach a rank that refuses: it may be about to listen


class Links:
    """The addresses at which ranks answer for as long as they live.

    Attributes:
        hosts: Host name of each rank.

    Args:
        rank: Number of this rank.
        addresses: Address, port and host name of each rank.
        server: Socket at which this rank answers.
    """

    def __init__(self, rank: int, addresses: Sequence[tuple[str, int, str]], server: socket.socket) -> None:
        self.hosts = tuple(host for _, _, host in addresses)
        self._rank = rank
        self._addresses = tuple(addresses)
        self._server = server

    def unreachable(self, ranks: Sequence[int], *, timeout: float) -> dict[int, str]:
        """Return those of the ranks that do not answer this one, and why.

        Args:
            ranks: Numbers of ranks.
            timeout: Seconds within which a rank has to answer.
        """
        others = [other for other in ranks if other != self._rank]
        with ThreadPoolExecutor(_CALLERS) as pool:
            reasons = list(pool.map(lambda other: _call(self._addresses[other], other, timeout), others))
        return {other: reason for other, reason in zip(others, reasons, strict=True) if reason}

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._server.close()


def check_links(store: Store, rank: int, size: int, *, timeout: float) -> Links:
    """Connect every pair of ranks; they answer from then on.

    Args:
        store: Store that all ranks reach.
        rank: Number of this rank.
        size: Number of ranks.
        timeout: Seconds within which a connection has to stand.

    Raises:
        CollectiveError: A pair of ranks that cannot talk, or a rank that did not come; the same on every rank.
    """
    store = PrefixStore("links", store)
    store.set_timeout(timedelta(seconds=timeout))
    server = socket.create_server(("", 0), backlog=size)
    try:
        listener = threading.Thread(target=_answer, args=(server, rank), daemon=True)
        listener.start()
        own = [_own_address(store), server.getsockname()[1], socket.gethostname()]
        store.set(f"address/{rank}", json.dumps(own))
        addresses = [_address_of(store, other, size, timeout) for other in range(size)]
        with ThreadPoolExecutor(_CALLERS) as pool:
            reasons = list(pool.map(lambda other: _call(addresses[other], other, timeout), range(rank)))
        failed = {other: reason for other, reason in enumerate(reasons) if reason}
        store.set(f"failed/{rank}", json.dumps(failed))
        store.set_timeout(timedelta(seconds=3 * timeout))  # for ranks that wait for connections that never stand
        found = [json.loads(store.get(f"failed/{other}")) for other in range(size)]
        store.set(f"seen/{rank}", "")
        if rank == 0:  # whose process may hold the store: it stays until all have read it
            with suppress(RuntimeError):
                store.wait([f"seen/{other}" for other in range(size)])
    except Exception:
        server.close()
        raise
    links = Links(rank, addresses, server)
    hosts = links.hosts
    lines = [
        ((here, int(there)), f"rank {here} ({hosts[here]}) cannot reach rank {there} ({hosts[int(there)]}): {reason}")
        for here, of_rank in enumerate(found)
        for there, reason in of_rank.items()
    ]
    if lines:
        links.close()
        raise CollectiveError(
            f"{'; '.join(text for _, text in lines[:4])}"
            f"{f'; and {len(lines) - 4} further pairs' if len(lines) > 4 else ''}; expected every rank to reach every "
            "other one by TCP on any port",
            collective="check of links",
            pairs=tuple(pair for pair, _ in lines),
        )
    return links


def _address_of(store: Store, other: int, size: int, timeout: float) -> tuple[str, int, str]:
    try:
        host, port, name = json.loads(store.get(f"address/{other}"))
    except RuntimeError:  # torch.distributed.DistStoreError
        raise CollectiveError(
            f"rank {other} of {size} did not come within {timeout:g} s, expected all ranks to start",
            collective="check of links",
            rank=other,
        ) from None
    return str(host), int(port), str(name)


def _own_address(store: Store) -> str:
    """Return the address of this machine on the way to the one that holds the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"  # a store in a file is one of a single machine
    target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect(target[4])
        return str(probe.getsockname()[0])


def _answer(server: socket.socket, rank: int) -> None:
    """Send the number of this rank to all that connect, until the socket is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.sendall(rank.to_bytes(_TOKEN_BYTES, "little"))


def _call(address: tuple[str, int, str], other: int, timeout: float) -> str:
    """Return why the rank `other` cannot be reached; empty if it can."""
    host, port, _ = address
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, end - time.monotonic())) as connection:
                answer = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if int.from_bytes(answer, "little") == other and len(answer) == _TOKEN_BYTES:
                return ""
            return f"something else answers at {host}:{port}"
        except ConnectionRefusedError as error:
            if time.monotonic() + _ANSWER_AFTER >= end:
                return f"{host}:{port}: {error.strerror}"
            time.sleep(_ANSWER_AFTER)
        except OSError as error:
            return f"{host}:{port}: {error.strerror or f'no answer within {timeout:g} s'}"
