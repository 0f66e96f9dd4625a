"""The HTTP transport: endpoints in JSON of the Open Inference Protocol v2, limits on bodies and connections, uvicorn.

Needs the extra ``serve``: starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from terarec.errors import ConfigError, FormatError, MissingDependencyError, TerarecError
from terarec.serve.protocol import (
    RequestTimeoutError,
    RequestTooLargeError,
    ServerBusyError,
    UnknownModelError,
    UnsupportedContentError,
    decode_infer_request,
    encode,
)
from terarec.serve.service import InferenceService
from terarec.spec import ServingSpec
from terarec.spec.checks import one_line, shortened

try:
    import anyio
    import h11
    import uvicorn
    from anyio import CapacityLimiter, to_thread
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

HELD_REQUESTS = 4
"""Bodies of the greatest length that are in memory at once, whole or in part: one is scored, the others wait."""


class Intake:
    """Receives the bodies of requests within the limits of a `ServingSpec`. For one event loop."""

    def __init__(self, spec: ServingSpec) -> None:
        self._spec = spec
        self._num_requests = 0
        self._num_bytes = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, check: Callable[[], None]) -> AsyncIterator[bytearray]:
        """Receive the body of `request`, which counts as in flight until the context ends.

        Args:
            request: Request whose head has arrived.
            check: Callback before anything is received; it raises what is wrong with the head.

        Raises:
            RequestTooLargeError: It is longer than `ServingSpec.max_request_bytes`, as announced or as received.
            RequestTimeoutError: It has not arrived within `ServingSpec.receive_timeout_seconds`.
            ServerBusyError: As many requests, or bytes of them, are in flight as may be.
        """
        # One buffer that counts while it grows; `Request.body` would join a list of pieces into a second copy.
        held = bytearray()
        self._num_requests += 1
        try:
            try:
                # In this order the cheap answers come first: a wrong path or type costs no byte of the limits.
                check()
                self._check_room(request)
                await self._receive(request, held)
            except TerarecError:
                await self._discard(request)
                raise
            yield held
        finally:
            self._num_requests -= 1
            self._num_bytes -= len(held)
            # Frames of the request may refer to the buffer for longer than its memory counts.
            held.clear()

    def _check_room(self, request: Request) -> None:
        announced = request.headers.get("content-length", "0")
        if int(announced) > self._spec.max_request_bytes:  # the HTTP parser has checked that these are digits
            raise self._too_large(f"{announced} bytes")
        # This request is counted already, hence no `>=`.
        if self._num_requests > self._spec.max_in_flight:
            limit = self._spec.max_in_flight
            raise ServerBusyError("server", f"{limit} requests are in flight, which is the limit; try again")

    async def _receive(self, request: Request, held: bytearray) -> None:
        try:
            with anyio.fail_after(self._spec.receive_timeout_seconds):
                async for chunk in request.stream():
                    self._hold(held, chunk)
        except TimeoutError:
            limit = self._spec.receive_timeout_seconds
            raise RequestTimeoutError(
                "the body", f"got {len(held)} bytes in {limit:g} seconds, expected the complete body by then"
            ) from None

    async def _discard(self, request: Request) -> None:
        """Receive the rest of a rejected body, and drop it, where the connection ends with the answer.

        A connection that is closed while the client still sends loses the answer. On one that is kept open, the client
        has it at once, and the HTTP server discards the rest.
        """
        if "close" not in request.headers.get("connection", "").lower():
            return
        with anyio.move_on_after(self._spec.receive_timeout_seconds):
            while (await request.receive()).get("more_body", False):
                pass

    def _hold(self, held: bytearray, chunk: bytes) -> None:
        if len(held) + len(chunk) > self._spec.max_request_bytes:
            raise self._too_large(f"more than {self._spec.max_request_bytes} bytes")
        # Counted as received, not as declared, so that clients that declare much and send nothing do not block others.
        if self._num_bytes + len(chunk) > HELD_REQUESTS * self._spec.max_request_bytes:
            raise ServerBusyError(
                "server", f"requests in flight hold {self._num_bytes} bytes, which is the limit; try again"
            )
        held += chunk
        self._num_bytes += len(chunk)

    def _too_large(self, got: str) -> RequestTooLargeError:
        limit = self._spec.max_request_bytes
        return RequestTooLargeError("the body", f"got {got}, expected at most {limit}; send fewer records at a time")


SHUTDOWN_SECONDS = 10
"""Seconds that requests in flight may still take after a stop."""

MOST_CONNECTIONS = 16_384
"""Connections kept open at most, if the system's limit of open files allows this."""

_BACKLOG = 128
"""Connections accepted at once, before any of them can give way."""

_OTHER_FILES = 3 * _BACKLOG
"""Open files left for those just accepted, those that are being closed, and the process's own."""


class HttpServer(uvicorn.Server):
    """Reports when it is ready, and leaves signals to its caller: uvicorn would raise them again after it has stopped.

    Args:
        app: An ASGI application.
        started: Callback, called once requests are accepted.
        receive_timeout_seconds: Longest time from the first byte of a request to its last, or from a connection's
            beginning to the first request's end; later the connection is closed.
    """

    def __init__(self, app: ASGIApp, started: Callable[[], None], receive_timeout_seconds: float) -> None:
        # uvicorn has no options for these limits, but takes the class of its connections.
        protocol: Any = partial(
            _Connection, receive_timeout_seconds=receive_timeout_seconds, most_connections=_most_connections()
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                # Nothing but HTTP/1.1 is spoken; access logs would cost a line a request.
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
        """Finish requests in flight and return from `run`. Callable from any thread."""
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
        # The clock starts before the first byte, since a client may connect and stay silent.
        self._start()
        if len(self.connections) > self._most_connections:
            waiting = (other for other in self.connections if isinstance(other, _Connection) and other.is_waiting)
            silent = min(waiting, key=lambda other: other.last_heard)  # this one waits, at least
            self.connections.discard(silent)  # it is closed a little later, and must not be chosen again
            # Aborted rather than closed: a close would first wait for the peer to read what is buffered.
            silent.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request; the clock runs until it is complete."""
        self.last_heard = self.loop.time()
        super().data_received(data)
        # h11 leaves these states with the last byte of a request; its answer has no deadline.
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._deadline is None:
            self._start()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no other request came, without waiting for an answer to be read."""
        # uvicorn closes the transport, which first sends what is buffered to a peer that may no longer read.
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._receive_timeout_seconds, self.transport.abort)

    @property
    def is_waiting(self) -> bool:
        """True while no request of it is being answered."""
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
        else:  # the application rejects the rest of the body itself, with a message
            self._start()


def _most_connections() -> int:
    """Return how many connections the system's limit of open files allows, which is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A process may raise its soft limit up to the hard one; containers often start with a soft limit of 1,024.
    wanted = MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MOST_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else min(max(soft - _OTHER_FILES, soft // 4), MOST_CONNECTIONS)
    )


WORKERS = 1
"""Requests worked on at once. The model uses all cores already: with 4 connections and 1,024 Criteo records a request,
1 worker answered 46 to 54 requests a second, 2 workers 35 to 44, 4 workers 31 (2 busy Zen 3 cores)."""

_STATUS: tuple[tuple[type[TerarecError], int], ...] = (
    (UnknownModelError, 404),
    (RequestTimeoutError, 408),
    (RequestTooLargeError, 413),
    (UnsupportedContentError, 415),
    (ConfigError, 400),
    (FormatError, 400),
    (ServerBusyError, 503),
    (TerarecError, 500),
)

_HEADERS = {408: {"Connection": "close"}, 503: {"Retry-After": "1"}}
"""Headers of error responses. After half a body it is unknown where the next request begins."""


def create_app(service: InferenceService) -> Starlette:
    """Return the application that serves `service`; run it under any ASGI server."""
    model = "/v2/models/{name}"
    version = f"{model}/versions/{{version}}"
    transport = _Transport(service)
    routes = [
        Route("/v2", transport.server_metadata),
        Route("/v2/health/live", transport.live),
        Route("/v2/health/ready", transport.ready),
        *(Route(path, transport.model_metadata) for path in (model, version)),
        *(Route(f"{path}/ready", transport.model_ready) for path in (model, version)),
        *(Route(f"{path}/infer", transport.infer, methods=["POST"]) for path in (model, version)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={TerarecError: _error_response, HTTPException: _no_route, Exception: _broken},
    )
    # The protocol has no such paths: a wrong one is reported as unknown.
    app.router.redirect_slashes = False
    return app


class _Transport:
    """The endpoints. Work that takes longer than a look-up leaves the event loop for a thread."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._workers = CapacityLimiter(WORKERS)
        self._intake = Intake(service.spec)

    async def server_metadata(self, _: Request) -> Response:
        return _answer(encode(self._service.server_metadata()))

    async def live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _: Request) -> Response:
        # The application is created after the model is loaded: until then there is no answer.
        return JSONResponse({"ready": True})

    async def model_metadata(self, request: Request) -> Response:
        return _answer(encode(self._service.model_metadata(**request.path_params)))

    async def model_ready(self, request: Request) -> Response:
        metadata = self._service.model_metadata(**request.path_params)
        return JSONResponse({"name": metadata.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        async with self._intake.body(request, partial(self._check, request)) as body:
            score = partial(_infer, self._service, body, **request.path_params)
            # The body is parsed there, too, one at a time: parsed lists take many times the bytes of their text.
            return _answer(await to_thread.run_sync(score, limiter=self._workers))

    def _check(self, request: Request) -> None:
        self._service.model_metadata(**request.path_params)
        _check_content(request)


def _infer(service: InferenceService, body: bytes | bytearray, name: str, version: str | None = None) -> bytes:
    try:
        return encode(service.infer(decode_infer_request(body), name, version))
    except TerarecError as error:
        # Tracebacks and contexts hold all that was parsed until the garbage collector finds them.
        error.__context__ = None
        raise error.with_traceback(None) from None


def _check_content(request: Request) -> None:
    """Reject requests whose headers declare anything but plain JSON; without Content-Type it is taken as JSON."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedContentError("Content-Type", f"got {content_type}, expected application/json")
    if "inference-header-content-length" in request.headers:
        raise UnsupportedContentError(
            "inference-header-content-length", "got binary tensor data, expected tensors in JSON"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedContentError("Content-Encoding", f"got {encoding}, expected identity")


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error_response(_: Request, error: Exception) -> Response:
    # The table has subclasses before their bases, so that the first match is the nearest class.
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    return JSONResponse({"error": one_line(str(error))}, status_code=status, headers=_HEADERS.get(status))


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shortened(request.url.path)}: {error.detail}"
    return JSONResponse({"error": one_line(message)}, status_code=error.status_code, headers=error.headers)


def _broken(_: Request, error: Exception) -> Response:
    """Answer after an error of our own: the traceback goes to the server's log, one line to the client."""
    return JSONResponse({"error": f"internal error: {type(error).__name__}"}, status_code=500)
