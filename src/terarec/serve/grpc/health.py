# SPDX-License-Identifier: Apache-2.0
"""The health service of gRPC (``grpc.health.v1.Health``), which probes and clients that balance their calls ask.

The service is "" or that of inference for the server, or the name of a model.
https://github.com/grpc/grpc/blob/master/doc/health-checking.md

Needs the extra ``serve``: grpcio.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import grpc
from google.protobuf.message import DecodeError

from terarec.serve.grpc.messages import SERVICE, message_class
from terarec.serve.grpc.service import GrpcService
from terarec.serve.protocol import UnknownModelError

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
