# SPDX-License-Identifier: Apache-2.0
"""`Connection`: requests of one client in, responses in their order out, within limits of time and size."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Protocol, cast

import httptools
from typing_extensions import override

from terarec.errors import TerarecError
from terarec.serve.calls import Call, CallSink
from terarec.serve.http.intake import Intake
from terarec.serve.http.messages import Request, Response, error_line, error_response
from terarec.serve.http.routes import Route
from terarec.serve.protocol import RequestTimeoutError
from terarec.serve.statistics import ErrorCounts

log = logging.getLogger("terarec.serve")

MAX_HEAD_BYTES = 65536
"""Longest head of a request."""

_LINGER_SECONDS = 2.0
"""Time for a client to read the last response of a connection, and to close it, before it is cut."""

_LENGTHS = ("content-length", "transfer-encoding")
"""Fields that say where a body ends."""

_PROBE_SECONDS = 0.05
"""Time after which the other side has answered a probe, if it is near."""

_TCP_CLOSE = 7
"""First byte of Linux's TCP_INFO where the other side has reset the connection."""


class Server(Protocol):
    """What a connection needs of its server.

    Attributes:
        intake: Counts requests and bytes.
        receive_seconds: Timeout for a request to arrive.
        keep_alive_seconds: Timeout for the next request of a connection.
        is_stopping: Whether connections end with their present requests.
        date: The present time, as the header Date has it.
        connections: The open connections.
        errors: Counts responses of errors that were sent.
        calls: Where calls go when they have ended.
    """

    intake: Intake
    receive_seconds: float
    keep_alive_seconds: float
    is_stopping: bool
    date: bytes
    connections: set[Connection]
    errors: ErrorCounts
    calls: Sequence[CallSink]

    def route(self, request: Request) -> Route:
        """Return the route of a request whose head has arrived; raise `TerarecError` if it is rejected."""

    def admit(self, connection: Connection) -> None:
        """Take a new connection; where there are too many, another one gives way."""


class _Exchange:
    """A request, and the response to it.

    Attributes:
        request: The request.
        route: Its route; None for one that is rejected.
        response: The response, once it is there.
        is_received: Whether the body is complete.
        is_in_flight: Whether it counts in the `Intake`.
        is_sent: Whether the response has been sent.
        is_old: Whether it is of HTTP/1.0.
        keeps_alive: Whether the client keeps the connection.
        heard: As in `Sender`.
    """

    __slots__ = (
        "connection", "heard", "is_in_flight", "is_old", "is_received", "is_sent", "keeps_alive", "num_bytes",
        "request", "response", "route",
    )  # fmt: skip

    def __init__(self, connection: Connection, request: Request, *, keeps_alive: bool, is_old: bool = False) -> None:
        self.connection = connection
        self.request = request
        self.route: Route | None = None
        self.response: Response | None = None
        self.is_received = self.is_in_flight = self.is_sent = False
        self.is_old = is_old
        self.keeps_alive = keeps_alive
        self.heard = 0.0
        self.num_bytes = 0

    def reject(self, error: TerarecError) -> None:
        """Answer with `error`; the rest of the body is received and dropped."""
        self.response = error_response(error)
        self.release()
        self.connection.advance()

    def release(self) -> None:
        """Let go of the body and its places in the intake."""
        intake = self.connection.server.intake
        if self.is_in_flight:
            self.is_in_flight = False
            intake.end()
        intake.release(self, self.num_bytes)
        self.num_bytes = 0
        # Frames of the handler may refer to the request for longer than its memory counts.
        self.request.body = b""


class Connection(asyncio.Protocol):
    """One connection.

    The server's sweep calls `check_time`; `deadline` moves with each state. The clock of a request begins with its
    first byte, that of the first one with the connection, since a client may connect and stay silent.

    Args:
        server: The server.
        is_admin: Whether the connection came to the address of administrators.
    """

    def __init__(self, server: Server, *, is_admin: bool) -> None:
        self.server = server
        self.last_heard = 0.0
        self.deadline = 0.0
        self._is_admin = is_admin
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._field_bytes = 0  # since the last byte of a body, or the end of a head or a request
        self._begun_ns = 0  # of the request that arrives, where somebody watches
        self._is_in_head = self._has_advanced = False
        self._asks_upgrade = self._is_known_head = False
        self._headers: dict[str, str] = {}
        self._receiving: _Exchange | None = None
        self._exchanges: deque[_Exchange] = deque()  # in the order of their requests; the first one is answered
        self._task: asyncio.Task[None] | None = None
        self._is_closing = self._is_half_closed = self._is_deaf = False
        self._is_paused = self._is_full = False
        self._transport: asyncio.Transport
        self._peer = ""

    # Callbacks of the event loop.
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Begin to wait for a request.
        self._transport = cast(asyncio.Transport, transport)
        peer = self._transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.last_heard = self._loop.time()
        self.deadline = self.last_heard + self.server.receive_seconds
        self.server.admit(self)

    @override
    def data_received(self, data: bytes) -> None:
        # Take a piece of a request.
        self.last_heard = self._loop.time()
        if self._is_closing or self._is_deaf:  # what comes behind the last request is dropped
            return
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._reject_bytes(HTTPStatus.BAD_REQUEST, f"the request: not HTTP/1.1 ({error})")
            return
        self._field_bytes = 0 if self._has_advanced else self._field_bytes + len(data)
        self._has_advanced = False
        # Of a body in chunks, what follows the last one and what stands beside their sizes has no length either.
        if self._field_bytes > MAX_HEAD_BYTES and (self._is_in_head or self._receiving is not None):
            what = "head" if self._is_in_head else "fields of the body"
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._reject_bytes(status, f"the {what}: got more than {MAX_HEAD_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            if self._receiving is None:  # of CONNECT: what follows is for nobody here
                self._refuse_more()
                return
            # Nothing but HTTP/1.1 is spoken, as if the client had not asked. The parser takes no body then: another one
            # reads on behind a head of the same length.
            self._parser, self._is_known_head = httptools.HttpRequestParser(self), True
            lengths = (f"{name}: {self._headers[name]}\r\n" for name in _LENGTHS if name in self._headers)
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{''.join(lengths)}\r\n".encode("latin-1"))

    @override
    def eof_received(self) -> bool:
        # Answer the requests that are complete to a client that sends no more; close otherwise.
        is_encrypted = self._transport.get_extra_info("sslcontext") is not None
        if self._receiving is not None and not self._receiving.is_received:
            return False
        if self._is_closing or not self._exchanges or is_encrypted:
            return False
        self._is_half_closed = True
        self._refuse_more()
        self._probe()
        return True

    @override
    def pause_writing(self) -> None:
        # Begin no further response: the client does not read.
        self._is_full = True
        self.deadline = self._loop.time() + self.server.receive_seconds

    @override
    def resume_writing(self) -> None:
        # Begin responses again.
        self._is_full = False
        self.advance()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        # Drop the requests of a client that has gone. One that closes with an answer unread resets the connection, and
        # then this is the only call.
        if self._receiving is not None and not self._receiving.is_received and not self._is_closing:
            log.debug("client %s left while its request arrived", self._peer)
        self.server.connections.discard(self)
        self._is_closing = True
        if self._task is not None:
            log.debug("client %s left before its answer", self._peer)
            self._task.cancel()
        for exchange in self._exchanges:
            exchange.release()
            if exchange.request.call is not None and not exchange.is_sent:
                exchange.request.call.end(None, "client_left")
        self._exchanges.clear()
        self._receiving = None

    # Callbacks of the parser.
    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._is_known_head:
            return
        self._url, self._headers, self._is_in_head = b"", {}, True
        if self.server.calls:
            self._begun_ns = time.monotonic_ns()
        self.deadline = self.last_heard + self.server.receive_seconds

    def on_url(self, url: bytes) -> None:
        """Take a piece of the URL."""
        if not self._is_known_head:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those behind a body in chunks are dropped."""
        if self._is_in_head:
            key = name.decode("latin-1").lower()
            text = value.decode("latin-1")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Choose the route, and reject at once what will not be read."""
        self._is_in_head, self._has_advanced = False, True
        if self._is_known_head:
            self._is_known_head = False
            return
        method = self._parser.get_method().decode("latin-1")
        self._asks_upgrade = method != "CONNECT" and self._parser.should_upgrade()
        path, _, query = self._target().partition("?")
        request = Request(
            method,
            path,
            query,
            self._headers,
            peer=self._peer,
            is_admin=self._is_admin,
        )
        if self.server.calls:
            request.call = Call(
                method=request.method,
                path=path,
                client=self._peer,
                traceparent=self._headers.get("traceparent", ""),
                tracestate=self._headers.get("tracestate", ""),
                sinks=self.server.calls,
                begun_ns=self._begun_ns,
            )
        is_old = self._parser.get_http_version() == "1.0"
        exchange = _Exchange(self, request, keeps_alive=self._parser.should_keep_alive(), is_old=is_old)
        self._receiving = exchange
        self._exchanges.append(exchange)
        try:
            # In this order the cheap answers come first: a wrong path or type costs no byte of the limits.
            exchange.route = self.server.route(request)
            self.server.intake.check_length(self._headers.get("content-length", "0"))
        except TerarecError as error:
            exchange.reject(error)
            return
        expects = self._headers.get("expect", "").lower() == "100-continue" and not is_old
        if expects and exchange is self._exchanges[0]:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _target(self) -> str:
        # A URL with its host, as a proxy is sent: that one counts in place of the field.
        url = self._url.decode("latin-1")
        scheme, separator, rest = url.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            return url
        self._headers["host"], _, path = rest.partition("/")
        return f"/{path}"

    def on_body(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        self._has_advanced = True
        exchange = self._receiving
        if exchange is None or exchange.response is not None:
            return
        exchange.heard = self.last_heard
        try:
            self.server.intake.hold(exchange, exchange.num_bytes, len(chunk))
        except TerarecError as error:
            exchange.reject(error)
            return
        # Most bodies are one piece, which is not copied.
        if not exchange.num_bytes:
            exchange.request.body = chunk
        elif isinstance(exchange.request.body, bytearray):
            exchange.request.body += chunk
        else:
            exchange.request.body = bytearray(exchange.request.body)
            exchange.request.body += chunk
        exchange.num_bytes += len(chunk)
        if exchange.request.call is not None:
            exchange.request.call.received_bytes = exchange.num_bytes

    def on_message_complete(self) -> None:
        """Answer the request, or let it wait for those before it."""
        self._has_advanced = True
        if self._asks_upgrade:  # its body is to come
            self._asks_upgrade = False
            return
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            return
        exchange.is_received = True
        self.server.intake.complete(exchange)
        # Probes and questions about models are answered however many requests wait.
        if exchange.response is None and exchange.route is not None and exchange.route.access == "use":
            try:
                self.server.intake.begin()
                exchange.is_in_flight = True
            except TerarecError as error:
                exchange.reject(error)
        # One client may not let requests wait without end.
        if len(self._exchanges) > 1 and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self.advance()

    # Responses.
    def advance(self) -> None:
        """Send or begin the next response, if it is its turn."""
        while self._exchanges and self._task is None and not self._is_full:
            exchange = self._exchanges[0]
            if exchange.response is None:
                if exchange.is_received and exchange.route is not None:
                    self._task = self._loop.create_task(self._answer(exchange, exchange.route))
                return
            if not exchange.is_sent:
                exchange.is_sent = True
                is_last = not exchange.keeps_alive or exchange.response.is_last or self.server.is_stopping
                self._write(exchange, exchange.response, is_last=is_last)
                if is_last:
                    self._finish(is_received=exchange.is_received)
                    return
            if not exchange.is_received:  # the rest of a rejected body is dropped as it comes
                return
            self._exchanges.popleft()
        if not self._exchanges and not self._is_closing:
            self.deadline = self._loop.time() + self.server.keep_alive_seconds
            if self._is_half_closed:
                self._transport.close()
        if self._is_paused and len(self._exchanges) <= 1:
            self._is_paused = False
            self._transport.resume_reading()

    async def _answer(self, exchange: _Exchange, route: Route) -> None:
        try:
            response = await route.handler(exchange.request)
        except TerarecError as error:
            response = error_response(error)
        except Exception as error:
            log.exception("%s %s failed", exchange.request.method, exchange.request.path)
            response = error_response(error)
        finally:
            exchange.release()
        self._task, exchange.response = None, response
        self.advance()

    def _write(self, exchange: _Exchange, response: Response, *, is_last: bool) -> None:
        request = exchange.request
        if response.status >= HTTPStatus.BAD_REQUEST:
            self.server.errors.add("http", response.reason or "not_ready")  # of probes
        head = [_FIRST_LINES[response.status], b"Date: ", self.server.date, b"\r\n"]
        if response.media_type:
            head.append(f"Content-Type: {response.media_type}\r\n".encode("latin-1"))
        head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in response.headers.items()]
        if is_last and not response.is_last:
            head.append(b"Connection: close\r\n")
        elif exchange.is_old and not is_last:  # such a client waits for the end of the connection otherwise
            head.append(b"Connection: keep-alive\r\n")
        head.append(b"Content-Length: %d\r\n\r\n" % len(response.body))
        if request.method != "HEAD":
            head.append(response.body)
        self._transport.write(b"".join(head))
        if request.call is not None:
            request.call.end(response.status, response.reason, len(response.body))

    def _finish(self, *, is_received: bool) -> None:
        """Close once the client has read the last response: what it still sends would else make it lose that."""
        self._is_closing = True
        self.deadline = self._loop.time() + (_LINGER_SECONDS if is_received else self.server.receive_seconds)
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if self._is_half_closed or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()

    def _reject_bytes(self, status: int, text: str) -> None:
        """Answer bytes that are no request, and read no more."""
        exchange = self._receiving
        if exchange is None:
            calls = self.server.calls
            call = Call(method="", path="", client=self._peer, sinks=calls) if calls else None
            exchange = _Exchange(self, Request("", "", call=call), keeps_alive=False)
            self._exchanges.append(exchange)
        exchange.keeps_alive, exchange.is_received = False, True
        if exchange.response is None:
            exchange.response = error_line(status, text, "malformed")
        exchange.release()
        self._refuse_more()
        self.advance()

    def _refuse_more(self) -> None:
        self._is_deaf, self._is_in_head, self._receiving = True, False, None

    # Time.
    @property
    def is_waiting(self) -> bool:
        """True while no complete request of it waits for its answer."""
        return not self._exchanges or not self._exchanges[0].is_received

    @property
    def has_requests(self) -> bool:
        """True while a request of it is to be answered, or its answer to be sent."""
        return any(not exchange.is_sent for exchange in self._exchanges) or self._transport.get_write_buffer_size() > 0

    def check_time(self, now: float) -> None:
        """Do what is due once `deadline` has passed."""
        if now < self.deadline:
            return
        if self._is_closing or self._is_full:
            self._transport.abort()
        elif self._receiving is not None and self._receiving.response is None:
            limit, num_bytes = self.server.receive_seconds, self._receiving.num_bytes
            problem = f"got {num_bytes} bytes in {limit:g} seconds, expected the complete body by then"
            self._receiving.reject(RequestTimeoutError("the body", problem))
        elif self.is_waiting:
            self._transport.abort()

    def stop(self) -> None:
        """Close if nothing of a request is there; else the present request is the last one."""
        if not self._exchanges and not self._is_closing:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _probe(self) -> None:
        """Find out whether a client that sends no more still reads: the end of a stream looks the same for both.

        A system answers bytes for a socket that is closed by a reset; a client that still reads passes over a response
        100. Fast answers need no such question.
        """
        tcp_info = getattr(socket, "TCP_INFO", None)
        connection = self._transport.get_extra_info("socket")
        if tcp_info is None or connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return

        def ask() -> None:
            if self._task is not None and not self._is_closing:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._loop.call_later(_PROBE_SECONDS, look)

        def look() -> None:
            if self._task is not None and not self._is_closing:
                if connection.getsockopt(socket.IPPROTO_TCP, tcp_info, 1)[0] == _TCP_CLOSE:
                    self._transport.abort()
                else:
                    self._loop.call_later(1.0, look)

        self._loop.call_later(_PROBE_SECONDS, ask)


_FIRST_LINES: Mapping[int, bytes] = {
    status: f"HTTP/1.1 {status.value} {status.phrase}\r\nX-Content-Type-Options: nosniff\r\n".encode()
    for status in HTTPStatus
}
