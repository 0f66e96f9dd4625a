# SPDX-License-Identifier: Apache-2.0
"""`RedisUsers`: the processes that have a table on a server, so that its rows stay until the last one leaves."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress

from terarec.errors import StorageError
from terarec.memory.redis_server import RedisServer, Request, request, request_on
from terarec.repeating import RepeatedCall

USE_SECONDS = 600
"""After which a process that has not said that it has a table counts as gone."""


def users_of(name: str) -> str:
    """Return the name of the sorted set of a table, beside a hash or a mark of its first partition."""
    return f"{name[:-1]}u"


class RedisUsers:
    """Says that this process has tables on a server, from `join` on, and who else has.

    The sorted set of a table has the processes, by the time at which each last said so, by the clock of the server. A
    thread says so again and again: a process that finds all rows in a cache, or has no lookups, has them all the same.

    Args:
        server: The connections.
        names: Name of the sorted set of each table.
    """

    def __init__(self, server: RedisServer, names: Sequence[str]) -> None:
        self._server = server
        self._names = tuple(names)
        self._id = uuid.uuid4().hex.encode()
        # Held during the exchanges, so that the thread says nothing of a table after this process has left it.
        self._lock = threading.Lock()
        self._joined: set[str] = set()
        self._saying: RepeatedCall | None = None

    def join(self) -> None:
        """Say that this process has all tables. A server that cannot be reached is told later."""
        with self._lock:
            self._joined = set(self._names)
            self._say()
            if self._saying is None:
                # Also after errors of any kind: of a thread that ended, others would remove the rows.
                self._saying = RepeatedCall("terarec-redis-users", self._say_again, USE_SECONDS / 3)

    def leave(self, name: str) -> bool:
        """Say that this process has a table no more; return whether others have it."""
        with self._lock:
            self._joined.discard(name)
            (now,) = self._times([name])
            gone = request(name, b"ZREMRANGEBYSCORE", b"-inf", b"%d" % (now - USE_SECONDS))
            return bool(self._server.run([self._leaving(name), gone, request(name, b"ZCARD")])[-1])

    def close(self) -> None:
        """Leave all tables."""
        if self._saying is not None:
            self._saying.close()
        with self._lock, suppress(StorageError):  # it is forgotten in time
            joined, self._joined = self._joined, set()
            if joined:
                self._server.run([self._leaving(name) for name in sorted(joined)])

    def _say_again(self) -> None:
        with self._lock:
            self._say()

    def _say(self) -> None:
        names = sorted(self._joined)
        with suppress(StorageError):  # a full server does not take it, and has rows to read all the same
            self._server.run(
                [
                    command
                    for name, now in zip(names, self._times(names), strict=True)
                    for command in (
                        request(name, b"ZADD", b"%d" % now, self._id),
                        request(name, b"EXPIRE", b"%d" % USE_SECONDS),
                    )
                ]
            )

    def _leaving(self, name: str) -> Request:
        return request(name, b"ZREM", self._id)

    def _times(self, names: Sequence[str]) -> list[int]:
        """Return the seconds since 1970 on the node of each name."""
        return [int(seconds) for seconds, _ in self._server.run([request_on(name, b"TIME") for name in names])]
