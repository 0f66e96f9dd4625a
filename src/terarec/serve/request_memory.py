# SPDX-License-Identifier: Apache-2.0
"""`RequestMemory`: a limit of the memory of requests that are read, wait or are scored, over all transports."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from terarec.serve.protocol import ServerBusyError

UNCOUNTED_BYTES = 65536
"""Requests of up to so much memory are not counted: the limit of their number bounds them."""

SMALL_BYTES = 65536
"""Requests, with what they have in shared memory, up to this length are read where they arrive, in less time than
another thread takes to begin."""

TYPED_FACTOR = 24
"""Memory of a value that gRPC sends by itself, to its bytes in a message, at most: that of empty texts."""

FEW_BYTES = UNCOUNTED_BYTES // TYPED_FACTOR
"""Bodies up to this length are not looked at for that."""

MESSAGES = 4
"""Messages of gRPC of the greatest length that may wait to be read: as many as bodies of HTTP are in memory."""

_LARGE, _OTHER = TYPED_FACTOR, 8
"""Memory of the requests that wait for their turn, and of the others, in bodies of the greatest length: any one fits
that is not refused for its length, and requests of a usual length must have room beside them."""

_LEAST_BYTES = 1 << 27
"""Memory of the other requests where bodies are limited to few bytes."""

_WAIT_SECONDS = 10.0


class LargeRequestError(ServerBusyError):
    """A request of few bytes needs the memory of a large one: it is to be read again, in the turn of those."""


class RequestMemory:
    """Counts memory. Thread-safe.

    `_changed`, with its lock, guards `_num_bytes`, and the state of each `HeldMemory`.

    Args:
        most: Limit of the bytes of all requests. A larger one is not refused for its size: it counts as these.
        large_bytes: Bytes beyond which a request is one of those that wait for room; None for no such limit.
        wait_seconds: Time in which there may come to be room for a request.
    """

    def __init__(self, most: int, *, large_bytes: int | None = None, wait_seconds: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._most = most
        self._large_bytes = large_bytes
        self._wait_seconds = wait_seconds
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all requests at present."""
        return self._num_bytes

    def hold(self) -> HeldMemory:
        """Return the memory of a request, which has none so far. The time to wait begins."""
        return HeldMemory(self, time.monotonic() + self._wait_seconds if self._wait_seconds else None)

    def _take(self, held: HeldMemory, num_bytes: int) -> None:
        if self._large_bytes is not None and held.num_bytes + num_bytes > self._large_bytes:
            problem = f"the request needs {held.num_bytes + num_bytes} bytes, and is to wait for room"
            raise LargeRequestError("server", f"{problem}; try again")
        with self._changed:
            more = min(num_bytes, self._most - held.num_bytes)

            def fits() -> bool:
                return held.is_released or self._num_bytes + more <= self._most

            left = 0.0 if held.deadline is None else max(held.deadline - time.monotonic(), 0.0)
            if not self._changed.wait_for(fits, left) or held.is_released:
                problem = f"the request needs {more} bytes, and those in flight hold {self._num_bytes} of {self._most}"
                raise ServerBusyError("server", f"{problem}; try again")
            held.num_bytes += more
            self._num_bytes += more

    def _release(self, held: HeldMemory) -> None:
        with self._changed:
            held.is_released = True
            self._num_bytes -= held.num_bytes
            held.num_bytes = 0
            self._changed.notify_all()


def request_memories(max_request_bytes: int) -> tuple[RequestMemory, RequestMemory]:
    """Return the memory of most requests, and that of large ones, which wait for room and do not take that of others.

    Args:
        max_request_bytes: Limit of the bytes of a body.
    """
    most = max(_OTHER * max_request_bytes, _LEAST_BYTES)
    # Of those that do not wait, the largest would else be refused whenever there is another one.
    return (
        RequestMemory(most, large_bytes=most // 4),
        RequestMemory(_LARGE * max_request_bytes, wait_seconds=_WAIT_SECONDS),
    )


class HeldMemory:
    """Memory of one request, until the block ends or `release` is called.

    Attributes:
        deadline: Time until which `take` waits, by `time.monotonic`; None where it does not.
        num_bytes: Bytes that count at present.
        is_released: Whether no more can be taken.
    """

    num_bytes = 0
    is_released = False
    _uncounted = 0

    def __init__(self, memory: RequestMemory, deadline: float | None) -> None:
        self._memory = memory
        self.deadline = deadline
        self._is_small = deadline is None

    def take(self, num_bytes: int) -> None:
        """Count memory before it is taken.

        Raises:
            LargeRequestError: It is so much that the request has to wait for its turn.
            ServerBusyError: Others hold it; or the request has been released meanwhile.
        """
        self._uncounted += num_bytes
        if self._uncounted > UNCOUNTED_BYTES:
            self._memory._take(self, self._uncounted)
            self._uncounted = 0

    def release(self, _: object = None) -> None:
        """Count the memory no longer. Also a callback of a future."""
        # Of a request that does not wait, no thread takes more at the same time.
        if self.num_bytes or not self._is_small:
            self._memory._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def memory_of_json(body: bytes | bytearray) -> int:
    """Return about the memory of the values in JSON, or more, before it is parsed: that of most bodies is less."""
    # Of a text with a wide letter, which may be an escape, each takes four bytes.
    is_wide = not body.isascii() or b"\\u" in body
    # An element of a list takes 8 bytes, and one of a short text 56 to 64; a list itself 72, an object 240.
    return len(body) * (4 if is_wide else 1) + 72 * body.count(b",") + 152 * body.count(b"[") + 384 * body.count(b"{")
