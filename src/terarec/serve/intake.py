"""Bodies of requests: how long, how slow and how many at once they may be."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import anyio
from starlette.requests import Request

from terarec.errors import TerarecError
from terarec.serve.messages import RequestTimeoutError, RequestTooLargeError, ServerBusyError
from terarec.spec import ServingSpec

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
            check: Called before anything is received; raises what is wrong with the head.

        Raises:
            RequestTooLargeError: It is longer than `ServingSpec.max_request_bytes`, as announced or as received.
            RequestTimeoutError: It has not arrived within `ServingSpec.receive_timeout_seconds`.
            ServerBusyError: As many requests, or bytes of them, are in flight as may be.
        """
        held = bytearray()
        self._num_requests += 1
        try:
            try:
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
            held.clear()

    def _check_room(self, request: Request) -> None:
        announced = request.headers.get("content-length", "0")
        if int(announced) > self._spec.max_request_bytes:  # the HTTP parser has checked that these are digits
            raise self._too_large(f"{announced} bytes")
        if self._num_requests > self._spec.max_in_flight:
            limit = self._spec.max_in_flight
            raise ServerBusyError(f"{limit} requests are in flight, which is the limit; try again")

    async def _receive(self, request: Request, held: bytearray) -> None:
        try:
            with anyio.fail_after(self._spec.receive_timeout_seconds):
                async for chunk in request.stream():
                    self._hold(held, chunk)
        except TimeoutError:
            limit = self._spec.receive_timeout_seconds
            raise RequestTimeoutError(
                f"the body: got {len(held)} bytes in {limit:g} seconds, expected the whole body by then"
            ) from None

    async def _discard(self, request: Request) -> None:
        """Receive what is left of a refused body, and forget it, where the connection ends with the answer.

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
        if self._num_bytes + len(chunk) > HELD_REQUESTS * self._spec.max_request_bytes:
            raise ServerBusyError(f"requests in flight hold {self._num_bytes} bytes, which is the limit; try again")
        held += chunk
        self._num_bytes += len(chunk)

    def _too_large(self, got: str) -> RequestTooLargeError:
        limit = self._spec.max_request_bytes
        return RequestTooLargeError(f"the body: got {got}, expected at most {limit}; send fewer records at a time")
