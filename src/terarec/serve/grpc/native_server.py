# SPDX-License-Identifier: Apache-2.0
"""`GrpcService` by pygrpc-native: calls arrive as events, and are answered by the thread that has the answer.

No thread waits for an answer, and HTTP/2 is spoken outside the interpreter's lock, so that a server of small requests
answers two to three times as many as by grpcio. It has no encryption, reads gzip but not deflate, and holds a message
in memory before its length is known. Streams and health checks go through grpcio, on a socket in a private directory.

Needs the extra ``serve``: pygrpc-native, grpcio.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc

from terarec.errors import MissingDependencyError
from terarec.io.owned import OwnedDirectory
from terarec.parallel import available_threads
from terarec.serve.calls import Call
from terarec.serve.grpc.grpcio_server import OTHER_CALLS, CheckCall, GrpcioServer, GrpcLimits
from terarec.serve.grpc.messages import METHODS, SERVICE
from terarec.serve.grpc.service import Failure, GrpcService, Metadata, PendingInference, failure_of
from terarec.serve.protocol import RequestTooLargeError, UnavailableError

try:
    from pygrpc_native import EVENT_CALL, NativeGrpcFront
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

_EVENTS = 64  # taken at once
_POLL_SECONDS = 0.01  # while the last answers are awaited
_LINGER_SECONDS = 0.1  # in which clients read them

_Details: TypeAlias = tuple[Metadata, str, float | None] | None
"""Headers of a call, the address of its client, and the time that is left."""

_UNARY = tuple(name for name, method in METHODS.items() if not method.is_stream)


class NativeServer:
    """A server of pygrpc-native.

    `_pending` has the requests in flight by the number of their call. The thread of events adds them; whoever takes one
    out, at its end or when its client has gone, is the only one to have it. `_unanswered` has the numbers of all calls
    until their answers have been handed over, which is later: `stop` waits for these, and until they have been sent.

    Args:
        limits: Limits.
        address: ``HOST:PORT`` to listen on.
        check: Callback for each call; for a stream once, without a message.
        shares_port: Whether other processes listen on the same port.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(
        self,
        limits: GrpcLimits,
        address: str,
        check: CheckCall,
        *,
        shares_port: bool = False,
    ) -> None:
        self._limits = limits
        self._check = check
        self._front = NativeGrpcFront(
            address,
            [(f"/{SERVICE}/{name}", False) for name in _UNARY],
            io_threads=min(2, available_threads()),
            call_details=True,  # without them it does not tell of clients that leave
            metrics=True,  # which tell of answers that have not been sent
            max_concurrent_streams=limits.max_in_flight + OTHER_CALLS,
            reuse_port=shares_port,
        )
        self.port: int = self._front.bound_port
        self._directory = OwnedDirectory(Path(tempfile.gettempdir()), "terarec-grpc").__enter__()
        socket = str(self._directory.files / "streams")
        self._streams = GrpcioServer(limits, check, methods=("ModelStreamInfer",))
        self._streams.bind(f"unix:{socket}")
        self._front.set_fallback(socket)
        self._pending: dict[int, PendingInference] = {}
        self._unanswered: set[int] = set()
        self._threads = ThreadPoolExecutor(OTHER_CALLS, thread_name_prefix="terarec-grpc")
        self._is_stopping = False
        self._events: threading.Thread | None = None

    def start(self, service: GrpcService) -> None:
        """Answer calls by `service`."""
        self._streams.start(service)
        self._front.start()
        self._events = threading.Thread(target=self._dispatch, args=(service,), name="terarec-grpc-events", daemon=True)
        self._events.start()

    def stop(self, grace_seconds: float) -> None:
        """Accept no further call, and end those in flight that take longer than this."""
        self._is_stopping = True
        end = time.monotonic() + grace_seconds
        self._streams.stop(grace_seconds)
        while (self._unanswered or self._has_unsent()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        # A connection that is closed before all of its client's bytes were read is reset, and the client loses what it
        # has not read yet.
        time.sleep(min(_LINGER_SECONDS, max(end - time.monotonic(), 0.0)))
        for number in tuple(self._pending):
            self._cancel(number)
        self._threads.shutdown(wait=False)
        self._front.close()
        if self._events is not None:
            self._events.join()
        self._directory.close()

    def _has_unsent(self) -> bool:
        # Its threads send an answer some time after it has been handed over, and `close` does not wait for them: 38 of
        # 150 answers of 200 kB were lost when it followed at once.
        metrics = self._front.metrics()
        assert metrics is not None, "the server was made with metrics"
        calls = metrics["methods"].values()
        return any(of["started"] > sum(ended["count"] for ended in of["status"].values()) for of in calls)

    def _dispatch(self, service: GrpcService) -> None:
        while (events := self._front.recv_batch_details(_EVENTS)) is not None:
            # One by one, and none afterwards: messages would be kept in memory until others come.
            while events:
                self._take(service, *events.pop(0))

    def _take(
        self,
        service: GrpcService,
        kind: int,
        number: int,
        method: int,
        body: bytes | None,
        _: object,
        details: _Details,
    ) -> None:
        if kind != EVENT_CALL or body is None or details is None:
            self._cancel(number)  # the client has gone, or its deadline has passed
            return
        call: Call | None = None
        try:
            call = service.begin(_UNARY[method], body, details[1], details[0])
            self._begin(service, number, call, _UNARY[method], body, details[0])
        except Exception as error:
            self._fail(service, number, call, failure_of(error))

    def _begin(
        self, service: GrpcService, number: int, call: Call | None, name: str, body: bytes, metadata: Metadata
    ) -> None:
        if self._is_stopping:
            raise UnavailableError("server", "it is shutting down")
        if len(body) > self._limits.max_message_bytes:
            limit = self._limits.max_message_bytes
            raise RequestTooLargeError("the message", f"got {len(body)} bytes, expected at most {limit}")
        self._check(name, metadata, body)
        if name != "ModelInfer":
            # In other threads, since a load takes minutes.
            self._unanswered.add(number)
            self._threads.submit(self._answer, service, number, call, name, body)
            return
        pending = service.infer(body, call)
        self._unanswered.add(number)
        self._pending[number] = pending
        pending.scored.add_done_callback(partial(self._finish, service, number))

    def _cancel(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.scored.cancel()
            self._unanswered.discard(number)
            if pending.call is not None:
                failure = failure_of(CancelledError())
                pending.call.end(failure.code, failure.reason)

    def _answer(self, service: GrpcService, number: int, call: Call | None, name: str, body: bytes) -> None:
        try:
            answer = service.call(name, body)
        except Exception as error:
            self._fail(service, number, call, failure_of(error))
        else:
            service.end(call, answer)
            self._front.respond(number, answer)
        finally:
            self._unanswered.discard(number)

    def _finish(self, service: GrpcService, number: int, _: object) -> None:
        """Answer a request; called by the thread that has scored it."""
        pending = self._pending.pop(number, None)
        if pending is None:  # its client has gone
            return
        try:
            answer = pending.response()
        except BaseException as error:  # CancelledError, too
            self._fail(service, number, pending.call, failure_of(error))
        else:
            service.end(pending.call, answer)
            self._front.respond(number, answer)
        finally:
            self._unanswered.discard(number)

    def _fail(self, service: GrpcService, number: int, call: Call | None, failure: Failure) -> None:
        service.end(call, failure)
        self._front.fail(number, grpc.StatusCode[failure.code].value[0], failure.message)
