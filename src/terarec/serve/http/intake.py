# SPDX-License-Identifier: Apache-2.0
"""Limits of the requests that a server holds at once, and of their bytes."""

from __future__ import annotations

from typing import Protocol

from terarec.errors import TerarecError
from terarec.serve.protocol import RequestTimeoutError, RequestTooLargeError, ServerBusyError

HELD_REQUESTS = 4
"""Bodies of the greatest length that are in memory at once, whole or in part: one is scored, the others wait."""


class Sender(Protocol):
    """A request whose body is being received.

    Attributes:
        heard: Time of the last bytes, in seconds of the event loop.
    """

    heard: float

    def reject(self, error: TerarecError) -> None:
        """Answer with `error`, and receive no more of the body."""


class Intake:
    """Counts the requests that are in flight, and the bytes of bodies in memory. For one event loop.

    A request for scores is in flight from the last byte of its body to its answer. Bodies that are still being received
    hold bytes alone, and where these are all taken, the one that has been silent for longest gives way: clients that
    send slowly do not keep others from being answered.

    `_senders` has exactly those whose body holds bytes and is not complete.

    Args:
        max_request_bytes: Limit of the bytes of a body.
        max_in_flight: Limit of the requests in flight.
    """

    def __init__(self, max_request_bytes: int, max_in_flight: int) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0
        self._num_bytes = 0
        self._senders: set[Sender] = set()

    def check_length(self, announced: str) -> None:
        """Check a value of Content-Length before anything of the body is received.

        Raises:
            RequestTooLargeError: It is longer than a body may be.
        """
        if int(announced) > self._max_request_bytes:  # the HTTP parser has checked that these are digits
            raise self._too_large(f"{announced} bytes")

    def hold(self, sender: Sender, present: int, more: int) -> None:
        """Count `more` bytes of a body of which `present` are there.

        Raises:
            RequestTooLargeError: They are more than a body may have.
            ServerBusyError: All bytes are taken by bodies that are complete, or that sent something more recently.
        """
        if present + more > self._max_request_bytes:
            raise self._too_large(f"more than {self._max_request_bytes} bytes")
        # Counted as received, not as declared, so that clients that declare much and send nothing do not block others.
        while self._num_bytes + more > HELD_REQUESTS * self._max_request_bytes:
            # The loop's clock stands still while it handles what has arrived: of those heard at once, the sender stays.
            silent = min((*self._senders, sender), key=lambda other: (other.heard, other is sender))
            if silent is sender:
                raise ServerBusyError(
                    "server", f"requests in flight hold {self._num_bytes} bytes, which is the limit; try again"
                )
            self._senders.discard(silent)  # here, so that the loop ends whatever the sender does
            silent.reject(
                RequestTimeoutError("the body", "others arrived faster, expected the complete body by then; try again")
            )
        self._senders.add(sender)
        self._num_bytes += more

    def release(self, sender: Sender, num_bytes: int) -> None:
        """Count the bytes of a body no longer."""
        self._senders.discard(sender)
        self._num_bytes -= num_bytes

    def complete(self, sender: Sender) -> None:
        """Keep a body that is complete until it is released: it gives way to no other."""
        self._senders.discard(sender)

    def begin(self) -> None:
        """Count a request for scores whose body is complete.

        Raises:
            ServerBusyError: As many requests are in flight as may be.
        """
        if self._num_in_flight >= self._max_in_flight:
            limit = self._max_in_flight
            raise ServerBusyError("server", f"{limit} requests are in flight, which is the limit; try again")
        self._num_in_flight += 1

    def end(self) -> None:
        """Count a request no longer that `begin` has counted."""
        self._num_in_flight -= 1

    def _too_large(self, got: str) -> RequestTooLargeError:
        limit = self._max_request_bytes
        return RequestTooLargeError("the body", f"got {got}, expected at most {limit}; send fewer records at a time")
