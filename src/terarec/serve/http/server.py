# SPDX-License-Identifier: Apache-2.0
"""`HttpServer`: the event loop, its listening sockets, the limits of connections, and the end of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import partial

from terarec.errors import MissingDependencyError
from terarec.io.opening import allow_open_files
from terarec.serve.calls import CallSink
from terarec.serve.http.intake import Intake
from terarec.serve.http.messages import Request
from terarec.serve.http.routes import Route, Routes
from terarec.serve.http.security import Guard
from terarec.serve.statistics import ErrorCounts
from terarec.spec import ServingSpec

try:
    import uvloop

    from terarec.serve.http.connection import Connection
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

SHUTDOWN_SECONDS = 10.0
"""Seconds that requests in flight may still take after a stop."""

MOST_CONNECTIONS = 16_384
"""Connections kept open at most, if the system's limit of open files allows this."""

_BACKLOG = 1024
"""Connections that the system keeps for the server until it takes them."""

_ACCEPT_PAUSE = 0.1

_OTHER_FILES = 384
"""Open files left for those just accepted, those that are being closed, and the process's own."""


class HttpServer:
    """Serves `routes` on listening sockets until it is stopped.

    Attributes:
        intake, receive_seconds, keep_alive_seconds, is_stopping, date, connections, errors, calls: As in
            `connection.Server`.

    Args:
        routes: What is served.
        spec: Limits.
        guard: Checks who may call what.
        errors: As above.
        calls: As above.
    """

    def __init__(
        self, routes: Routes, spec: ServingSpec, guard: Guard, errors: ErrorCounts, calls: Sequence[CallSink] = ()
    ) -> None:
        self.calls = calls
        self.intake = Intake(spec.max_request_bytes, spec.max_in_flight)
        self.receive_seconds = spec.receive_timeout_seconds
        self.keep_alive_seconds = spec.keep_alive_seconds
        self.is_stopping = False
        self.date = formatdate(usegmt=True).encode()
        self.connections: set[Connection] = set()
        # Of TLS, the oldest first, with their beginnings; a connection is here or in `connections`.
        self._handshakes: dict[Connection, tuple[asyncio.Task[None], float]] = {}
        self.errors = errors
        self._routes = routes
        self._guard = guard
        self._drain_seconds = spec.drain_seconds
        self._most_connections = most_connections()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = asyncio.Event()
        self._is_stop_requested = False

    def run(
        self,
        sockets: Sequence[socket.socket],
        *,
        admin_sockets: Sequence[socket.socket] = (),
        tls: ssl.SSLContext | None = None,
        started: Callable[[], None] = lambda: None,
        draining: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until `stop` is called.

        Args:
            sockets: Listening sockets.
            admin_sockets: Listening sockets of administrators.
            tls: Certificates, for HTTPS.
            started: Callback, called once requests are accepted.
            draining: Callback, called at the beginning of the stop, before the listening sockets are closed.
        """
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(sockets, admin_sockets, tls, started, draining))

    def stop(self) -> None:
        """Finish requests in flight and return from `run`. Callable from any thread, and from a signal's handler."""
        self._is_stop_requested = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._is_stopped.set)

    async def _serve(
        self,
        sockets: Sequence[socket.socket],
        admin_sockets: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        started: Callable[[], None],
        draining: Callable[[], None],
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        listeners: list[asyncio.Server | _TlsListener] = []
        for bound in (*sockets, *admin_sockets):
            make = partial(Connection, self, is_admin=bound in admin_sockets)
            listeners.append(
                await loop.create_server(make, sock=bound, backlog=_BACKLOG)
                if tls is None
                else _TlsListener(bound, partial(self._begin_handshake, make, tls))
            )
        sweep = loop.create_task(self._sweep())
        try:
            started()
            if not self._is_stop_requested:
                await self._is_stopped.wait()
            # Probes see first that it is no longer ready, so that no further requests are sent here.
            draining()
            await asyncio.sleep(self._drain_seconds)
            for listener in listeners:
                listener.close()
            await self._finish_requests()
        finally:
            sweep.cancel()
            for handshake, _ in list(self._handshakes.values()):
                handshake.cancel()
            for connection in list(self.connections):
                connection.abort()
            await asyncio.sleep(0)  # which lets them close

    async def _finish_requests(self) -> None:
        self.is_stopping = True
        end = asyncio.get_running_loop().time() + SHUTDOWN_SECONDS
        for connection in list(self.connections):
            connection.stop()
        while any(connection.has_requests for connection in self.connections):
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(0.01)

    async def _sweep(self) -> None:
        """Check the time of all connections: one timer for all costs a request nothing."""
        pause = min(1.0, self.receive_seconds / 4, self.keep_alive_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            self.date = formatdate(usegmt=True).encode()
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.check_time(now)

    def route(self, request: Request) -> Route:
        """Return the route of a request whose head has arrived.

        Raises:
            TerarecError: It is rejected.
        """
        route = self._routes.find(request)
        if request.call is not None:
            request.call.route = route.path
        self._guard.check(request, route.access)
        if route.check is not None:
            route.check(request)
        return route

    def admit(self, connection: Connection) -> None:
        """Take a new connection; where there are too many, the one that has been silent for longest gives way."""
        self._handshakes.pop(connection, None)  # before its task ends
        self.connections.add(connection)
        self._make_room()

    def _begin_handshake(self, make: Callable[[], Connection], tls: ssl.SSLContext, client: socket.socket) -> None:
        loop, connection = asyncio.get_running_loop(), make()

        async def shake_hands() -> None:
            with contextlib.suppress(OSError, TimeoutError):  # a client that does not speak TLS, or leaves
                await loop.connect_accepted_socket(
                    lambda: connection, client, ssl=tls, ssl_handshake_timeout=self.receive_seconds
                )

        handshake = loop.create_task(shake_hands())
        self._handshakes[connection] = handshake, loop.time()
        handshake.add_done_callback(lambda _: self._handshakes.pop(connection, None))
        self._make_room()

    def _make_room(self) -> None:
        if len(self.connections) + len(self._handshakes) <= self._most_connections:
            return
        waiting = (other for other in self.connections if other.is_waiting)
        silent = min(waiting, key=lambda other: other.last_heard, default=None)
        shaking = next(iter(self._handshakes), None)
        # What is closed a little later must not be chosen again.
        if silent is None or (shaking is not None and self._handshakes[shaking][1] < silent.last_heard):
            assert shaking is not None  # a new connection waits, at least
            self._handshakes.pop(shaking)[0].cancel()
        else:
            self.connections.discard(silent)
            # Aborted rather than closed: a close would first wait for the peer to read what is buffered.
            silent.abort()


class _TlsListener:
    """Accepts connections. A server of asyncio tells of them once keys are agreed on, which a silent client never does.

    Args:
        bound: Listening socket.
        begin: Callback for each connection.
    """

    def __init__(self, bound: socket.socket, begin: Callable[[socket.socket], None]) -> None:
        bound.listen(_BACKLOG)
        bound.setblocking(False)
        self._bound = bound
        self._task = asyncio.create_task(self._accept(begin))

    async def _accept(self, begin: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                client, _ = await asyncio.get_running_loop().sock_accept(self._bound)
            except OSError:  # the client has gone, or no file can be opened at present
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            begin(client)

    def close(self) -> None:
        """Accept no further connections."""
        self._task.cancel()
        self._bound.close()


def most_connections() -> int:
    """Return how many connections the system's limit of open files allows, which is raised as far as it may be."""
    allowed = allow_open_files(MOST_CONNECTIONS + _OTHER_FILES)
    return min(max(allowed - _OTHER_FILES, allowed // 4), MOST_CONNECTIONS)
