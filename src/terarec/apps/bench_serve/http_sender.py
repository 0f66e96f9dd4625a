# SPDX-License-Identifier: Apache-2.0
"""Sends complete HTTP/1.1 requests over kept connections, at the least cost for the sending side.

Needs the extra ``serve``: httptools.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from typing_extensions import override

from terarec.apps.bench_serve.load import RequestError
from terarec.errors import ConfigError, MissingDependencyError

try:
    import httptools
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

_REASON_BYTES = 200


class HttpAddress:
    """Where a server is.

    Attributes:
        host, port, is_tls: Host, port, and whether the connection is encrypted.
        prefix: Begin of all paths, without a slash at the end.

    Args:
        url: Its URL, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError("URL", f"got {url!r}, expected one such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = port or (443 if self.is_tls else 80)
        self.prefix = parts.path.rstrip("/")

    def request(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the bytes of a POST request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            *(f"{name}: {value}" for name, value in headers.items()),
            f"Content-Length: {len(body)}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class HttpSender:
    """Connections to an HTTP server; each has one request at a time. For one event loop."""

    def __init__(self, address: HttpAddress, timeout_seconds: float) -> None:
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._free = asyncio.Semaphore(0)

    async def open(self, connections: int) -> None:
        """Connect once; see `Sender`."""
        self._free = asyncio.Semaphore(connections)
        self._idle.append(await self._connect())

    async def send(self, body: bytes) -> None:
        """Send a complete request; see `Sender`."""
        async with self._free:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                # Not `wait_for`, which makes a task for each call.
                async with asyncio.timeout(self._timeout_seconds):
                    status, answer = await connection.ask(body)
            except TimeoutError:
                self._drop(connection)
                raise RequestError(f"no answer in {self._timeout_seconds:g} seconds") from None
            except OSError as error:
                self._drop(connection)
                raise RequestError("connection lost", error) from None
            except BaseException:
                self._drop(connection)
                raise
            if connection.is_open:
                self._idle.append(connection)
            else:
                self._drop(connection)
        if status != 200:
            raise RequestError(status, answer[:_REASON_BYTES].decode(errors="replace"))

    async def close(self) -> None:
        """Close the connections."""
        for connection in list(self._all):
            self._drop(connection)
        await asyncio.sleep(0)  # the loop closes the sockets

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._address.is_tls else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._address.host, self._address.port, ssl=context
            )
        except OSError as error:
            raise RequestError("cannot connect", error) from None
        self._all.add(connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        with suppress(OSError):
            connection.abort()


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; return its status and body when they come, or OSError."""
        self._answer = asyncio.get_running_loop().create_future()
        if self.is_open and self._transport is not None:
            self._transport.write(request)
        else:
            self._answer.set_exception(ConnectionError("closed by the server"))
        return self._answer

    def abort(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish(ConnectionError("closed by the server" if exc is None else str(exc)))

    @override
    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(ConnectionError("the answer is not HTTP/1.1"))
            self.abort()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, as the parser calls it."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """End an answer, as the parser calls it."""
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._finish((self._parser.get_status_code(), b"".join(self._parts)))
        self._parts.clear()

    def _finish(self, result: tuple[int, bytes] | ConnectionError) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if isinstance(result, ConnectionError):
            answer.set_exception(result)
        else:
            answer.set_result(result)
