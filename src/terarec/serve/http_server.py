"""uvicorn as `terarec.serve.run` needs it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from terarec.errors import MissingDependencyError

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"serving needs {error.name}: pip install 'terarec[serve]'") from error

SHUTDOWN_SECONDS = 10
"""How long requests in flight may still take after a stop."""

MOST_CONNECTIONS = 16_384
"""Connections kept open at most, if the system's limit of open files allows so many."""

_BACKLOG = 128
"""Connections accepted at once, before any of them can give way."""

_OTHER_FILES = 3 * _BACKLOG
"""Open files left for those just accepted, those that are being closed, and the process's own."""


class HttpServer(uvicorn.Server):
    """Tells when it is ready, and leaves signals to its caller: uvicorn would raise them anew after it has stopped.

    Args:
        app: an ASGI application.
        started: called once requests are accepted.
        receive_timeout_seconds: Longest time from the first byte of a request to its last, or from a connection's
            beginning to the first request's end; later the connection is closed.
    """

    def __init__(self, app: Any, started: Callable[[], None], receive_timeout_seconds: float) -> None:
        protocol: Any = partial(
            _Connection, receive_timeout_seconds=receive_timeout_seconds, most_connections=_most_connections()
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                backlog=_BACKLOG,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept requests."""
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def stop(self) -> None:
        """Finish what is in flight and return from `run`. Callable from any thread."""
        self.should_exit = True


class _Connection(H11Protocol):
    """A connection that is closed if a request takes too long to arrive: uvicorn waits for ever.

    Where there are too many, the one that has been silent for longest gives way to the new one.
    """

    def __init__(self, *args: Any, receive_timeout_seconds: float, most_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout_seconds = receive_timeout_seconds
        self._most_connections = most_connections
        self._deadline: asyncio.TimerHandle | None = None
        self.last_heard = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._start()
        if len(self.connections) > self._most_connections:
            waiting = (other for other in self.connections if isinstance(other, _Connection) and other.is_waiting)
            silent = min(waiting, key=lambda other: other.last_heard)  # this one waits, at least
            self.connections.discard(silent)  # it is closed a little later, and must not be chosen again
            silent.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request; the clock runs until it is whole."""
        self.last_heard = self.loop.time()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._deadline is None:
            self._start()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no other request came, with no more patience for an answer that nobody reads."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._receive_timeout_seconds, self.transport.abort)

    @property
    def is_waiting(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._deadline = self.loop.call_later(self._receive_timeout_seconds, self._expire)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self.is_waiting:
            self.transport.abort()
        else:  # the application refuses the rest of the body itself, and says so
            self._start()


def _most_connections() -> int:
    """How many connections the system's limit of open files allows, which is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MOST_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else min(max(soft - _OTHER_FILES, soft // 4), MOST_CONNECTIONS)
    )
