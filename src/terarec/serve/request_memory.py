# SPDX-License-Identifier: Apache-2.0
"""`RequestMemory`: a limit of the memory of requests that are read, wait or are scored, over all transports."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from terarec.serve.protocol import ServerBusyError

UNCOUNTED_BYTES = 65536
"""Requests of up to so much memory are not counted: the limit of their number bounds them."""

TYPED_FACTOR = 20
"""Memory of a value that gRPC sends by itself, to the bytes that it takes in a message, at most."""

FEW_BYTES = UNCOUNTED_BYTES // TYPED_FACTOR
"""Bodies up to this length are not looked at for that."""

_LARGE, _OTHER = 16, 8
"""Memory of the requests that wait for their turn, and of the others, in bodies of the greatest length: texts of JSON
take up to 17 times their bytes, and requests of a usual length must have room beside them."""

_LEAST_BYTES = 1 << 27
"""Memory of the other requests where bodies are limited to few bytes."""

_WAIT_SECONDS = 10.0


class RequestMemory:
    """Counts memory. Thread-safe.

    `_changed`, with its lock, guards `_num_bytes`, and the state of each `HeldMemory`.

    Args:
        max_request_bytes: Limit of the bytes of a body.
    """

    def __init__(self, max_request_bytes: int) -> None:
        self._changed = threading.Condition()
        self._most = {True: _LARGE * max_request_bytes, False: max(_OTHER * max_request_bytes, _LEAST_BYTES)}
        self._num_bytes = {True: 0, False: 0}

    def hold(self, *, waits: bool) -> HeldMemory:
        """Return the memory of a request, which has none so far.

        Args:
            waits: Whether the request waits until there is room. These do not take the room of others.
        """
        return HeldMemory(self, waits)

    def _take(self, held: HeldMemory, num_bytes: int) -> None:
        most, waits = self._most[held.waits], held.waits
        with self._changed:
            # One that is alone always fits.
            more = min(num_bytes, most - held.num_bytes)

            def fits() -> bool:
                return held.is_released or self._num_bytes[waits] + more <= most

            if not (self._changed.wait_for(fits, _WAIT_SECONDS) if waits else fits()) or held.is_released:
                problem = f"requests in flight hold {self._num_bytes[waits]} bytes, which is the limit; try again"
                raise ServerBusyError("server", problem)
            held.num_bytes += more
            self._num_bytes[waits] += more

    def _release(self, held: HeldMemory) -> None:
        with self._changed:
            held.is_released = True
            self._num_bytes[held.waits] -= held.num_bytes
            held.num_bytes = 0
            self._changed.notify_all()


class HeldMemory:
    """Memory of one request, until the block ends or `release` is called.

    Attributes:
        waits: As in `RequestMemory.hold`.
        num_bytes: Bytes that count at present.
        is_released: Whether no more can be taken.
    """

    num_bytes = 0
    is_released = False
    _uncounted = 0

    def __init__(self, memory: RequestMemory, waits: bool) -> None:
        self._memory = memory
        self.waits = waits

    def take(self, num_bytes: int) -> None:
        """Count memory before it is taken.

        Raises:
            ServerBusyError: Others hold it; or the request has been released meanwhile.
        """
        self._uncounted += num_bytes
        if self._uncounted > UNCOUNTED_BYTES:
            self._memory._take(self, self._uncounted)
            self._uncounted = 0

    def release(self, _: object = None) -> None:
        """Count the memory no longer. Also a callback of a future."""
        # A request whose body is small has none, and is read before this.
        if self.num_bytes or self.waits:
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
