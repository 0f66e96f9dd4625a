# SPDX-License-Identifier: Apache-2.0
"""`GrpcService` by grpcio: all methods, encryption, and limits before a message is in memory.

Each call in flight holds a thread, a stream two. The health service (``grpc.health.v1.Health``), which probes and
clients that balance their calls ask, is here, too: https://github.com/grpc/grpc/blob/master/doc/health-checking.md. Its
checks name "" or the service of inference for the server, or a model.

Needs the extra ``serve``: grpcio.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from terarec.errors import MissingDependencyError
from terarec.serve.calls import Call
from terarec.serve.grpc.messages import METHODS, SERVICE, message_class
from terarec.serve.grpc.service import Failure, GrpcService, Metadata, PendingInference, failure_of
from terarec.serve.protocol import ServerBusyError, UnknownModelError

HEALTH_SERVICE = "grpc.health.v1.Health"
"""Full name of the service."""

_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_POLL_SECONDS = 0.2  # between two looks for a watcher; models say nobody when they change

_Request, _Response = message_class("HealthCheckRequest"), message_class("HealthCheckResponse")


class HealthService:
    """Answers the calls of the health service.

    Args:
        service: Knows the models.
        most_watchers: Limit of the calls that watch; each holds a thread.
    """

    def __init__(self, service: GrpcService, most_watchers: int) -> None:
        self._service = service
        self._has_ended = threading.Event()
        self._places = threading.BoundedSemaphore(most_watchers)

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler]:
        """Return the handlers of the methods, whose messages are bytes."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    def end(self) -> None:
        """End the calls that watch."""
        self._has_ended.set()

    def _check(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        name = _name_in(body, context)
        status = self._status(name)
        if status == _SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {name!r} is served")
        return _encoded(status)

    def _watch(self, body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name = _name_in(body, context)
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAVAILABLE, "as many calls watch as may; try again")
        # By the library, when the call has ended in whatever way.
        if not context.add_callback(self._places.release):
            self._places.release()
            return
        last = 0
        while context.is_active():
            status = self._status(name)
            if status != last:
                yield _encoded(status)
                last = status
            if self._has_ended.wait(_POLL_SECONDS):
                return

    def _status(self, name: str) -> int:
        """Return the status of the server, or of a model."""
        is_ready = not self._has_ended.is_set() and self._service.server_ready()
        if name and name != SERVICE:
            try:
                is_ready = self._service.model_ready(name) and is_ready
            except UnknownModelError:
                return _SERVICE_UNKNOWN
        return _SERVING if is_ready else _NOT_SERVING


def _name_in(body: bytes, context: grpc.ServicerContext) -> str:
    try:
        name: str = _Request.FromString(body).service
    except DecodeError:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is no HealthCheckRequest")
        raise AssertionError("unreachable: abort raises") from None
    return name


def _encoded(status: int) -> bytes:
    encoded: bytes = _Response(status=status).SerializeToString()
    return encoded


_LOGGER = logging.getLogger(__name__)

MOST_AHEAD = 64
"""Requests of a stream that are read before earlier ones are answered."""


class RequestStream:
    """Requests that one thread reads and another one answers.

    `_pending` passes them on, and None at the end; `_places` has a place for each that may be read ahead. `end` may be
    called from any thread, and lets both threads end.

    Args:
        service: What answers.
        client: Address of the client.
        metadata: Headers of the stream.
    """

    def __init__(self, service: GrpcService, client: str = "", metadata: Metadata = ()) -> None:
        self._service = service
        self._client = client
        self._metadata = tuple(metadata)
        self._pending: SimpleQueue[PendingInference | None] = SimpleQueue()
        self._places = threading.Semaphore(MOST_AHEAD)
        self._answered: PendingInference | None = None  # that the answering thread waits for
        self._has_ended = False

    def read(self, bodies: Iterable[bytes]) -> None:
        """Let requests be scored until there are no more."""
        try:
            for body in bodies:
                self._places.acquire()
                if self._has_ended:
                    break
                call = self._service.begin("ModelStreamInfer", body, self._client, self._metadata)
                self._pending.put(self._service.infer(body, call))
                del body  # the next one may be long in coming
        # The library's exception for a stream whose client has gone is of no public class.
        except Exception as error:
            _LOGGER.debug("a stream ended: %s", error)
        finally:
            self._pending.put(None)

    def __iter__(self) -> Iterator[PendingInference]:
        while (pending := self._pending.get()) is not None:
            self._answered = pending
            if self._has_ended:
                pending.scored.cancel()
            yield pending
            # An error in it refers to the model that raised it, and the next request may be long in coming.
            self._answered = pending = None
            self._places.release()

    def end(self) -> None:
        """Read no further requests, and drop those that wait."""
        self._has_ended = True
        self._places.release()  # the reader may wait for one
        if (answered := self._answered) is not None:
            answered.scored.cancel()
        with contextlib.suppress(Empty):
            while True:
                pending = self._pending.get_nowait()
                if pending is not None:
                    pending.scored.cancel()
        self._pending.put(None)


try:
    import grpc
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

CheckCall: TypeAlias = Callable[[str, Metadata, bytes], None]
"""Takes the method of a call, its metadata and its message, and raises `TerarecError` if the call is not allowed."""

OTHER_CALLS = 16
"""Calls other than inference that are answered at once: a model that is loaded must not keep probes waiting."""

_ENDS_STREAM = "triton_grpc_error"
"""Header with which a client wants a stream to end with the status of the first error, as in Triton."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcLimits:
    """Limits of a server.

    Attributes:
        max_message_bytes: Length of a message, as received and after it is decompressed.
        max_in_flight: Requests that wait or are scored.
        max_streams: Streams that are open.
    """

    max_message_bytes: int
    max_in_flight: int
    max_streams: int


class GrpcioServer:
    """A server of grpcio.

    Args:
        limits: Limits.
        check: Callback for each call; for a stream once, without a message.
        methods: Names of the methods; the others are unknown.
        shares_port: Whether other processes listen on the same port.
    """

    def __init__(
        self,
        limits: GrpcLimits,
        check: CheckCall,
        *,
        methods: Collection[str] = tuple(METHODS),
        shares_port: bool = False,
    ) -> None:
        self._limits = limits
        self._methods = methods
        self._check = check
        self._num_streams = 0
        self._lock = threading.Lock()  # of the number of streams
        self._health: HealthService | None = None
        calls = limits.max_in_flight + OTHER_CALLS
        # A stream needs two, a call that watches the health one.
        self._threads = ThreadPoolExecutor(calls + 3 * limits.max_streams, thread_name_prefix="terarec-grpc")
        self._server = grpc.server(
            self._threads,
            # Beyond these a call would wait for a thread, unanswered.
            maximum_concurrent_rpcs=calls + 2 * limits.max_streams,
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", calls + 2 * limits.max_streams),
                ("grpc.so_reuseport", int(shares_port)),
                # Clients that keep idle connections alive, as Triton's can, are not taken for attackers.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on an address, encrypted with `credentials`; return the port.

        Raises:
            RuntimeError: The address cannot be bound.
        """
        port: int
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        return port

    def start(self, service: GrpcService) -> None:
        """Answer calls by `service`."""
        handlers = {name: self._handler(service, name) for name in self._methods}
        self._server.add_registered_method_handlers(SERVICE, handlers)
        self._health = HealthService(service, self._limits.max_streams)
        self._server.add_registered_method_handlers(HEALTH_SERVICE, self._health.handlers())
        self._server.start()

    def stop(self, grace_seconds: float) -> None:
        """Accept no further call, and end those in flight that take longer than this."""
        if self._health is not None:
            self._health.end()  # or calls that watch would take all of that time
        self._server.stop(grace_seconds).wait()
        self._threads.shutdown(wait=False)

    def _handler(self, service: GrpcService, name: str) -> grpc.RpcMethodHandler:
        # Without (de)serializers: what is no message is answered in words, and is no error of this server.
        if METHODS[name].is_stream:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, service))

        def answer(body: bytes, context: grpc.ServicerContext) -> bytes:
            call = service.begin(name, body, context.peer(), context.invocation_metadata())
            try:
                self._check(name, context.invocation_metadata(), body)
                answered = _infer(service, body, context, call) if name == "ModelInfer" else service.call(name, body)
                service.end(call, answered)
                return answered
            except Exception as error:
                failure = failure_of(error)
            service.end(call, failure)
            _abort(context, failure)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _stream(self, service: GrpcService, bodies: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        failure: Failure | None = None
        metadata = context.invocation_metadata()
        try:
            self._check("ModelStreamInfer", metadata, b"")
            stream = self._open_stream(service, context)
            self._threads.submit(stream.read, bodies)
        except Exception as error:
            failure = failure_of(error)
            service.end(None, failure)
        if failure is not None:
            _abort(context, failure)
        ends_by_error = any(name == _ENDS_STREAM and value == "true" for name, value in metadata)
        for pending in stream:
            answer = _streamed(pending)
            service.end(pending.call, answer)
            if isinstance(answer, Failure):
                if ends_by_error:
                    _abort(context, answer)
                answer = pending.stream_failure(answer)
            yield answer
            del pending, answer  # as in `RequestStream`

    def _open_stream(self, service: GrpcService, context: grpc.ServicerContext) -> RequestStream:
        with self._lock:
            if self._num_streams >= self._limits.max_streams:
                limit = self._limits.max_streams
                raise ServerBusyError("server", f"{limit} streams are open, which is the limit; try again")
            self._num_streams += 1
        stream = RequestStream(service, context.peer(), context.invocation_metadata())

        def leave() -> None:
            stream.end()
            with self._lock:
                self._num_streams -= 1

        # By the library, when the call has ended in whatever way: the end of a generator must not wait for a lock.
        if not context.add_callback(leave):
            leave()
        return stream


def _infer(service: GrpcService, body: bytes, context: grpc.ServicerContext, call: Call | None) -> bytes:
    pending = service.infer(body, call)
    # A client that leaves, or whose deadline passes, is dropped from the queue.
    if not context.add_callback(pending.scored.cancel):
        pending.scored.cancel()
    return pending.response()


def _streamed(pending: PendingInference) -> bytes | Failure:
    """Return the answer to a request of a stream, or why there is none."""
    try:
        return pending.stream_response()
    except Exception as error:
        return failure_of(error)


def _abort(context: grpc.ServicerContext, failure: Failure) -> NoReturn:
    context.abort(grpc.StatusCode[failure.code], failure.message)
    raise AssertionError("unreachable: abort raises")
