# SPDX-License-Identifier: Apache-2.0
"""The requests of one stream: read ahead, answered in their order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue

from terarec.serve.grpc.service import GrpcService, Metadata, PendingInference

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
            self._places.release()

    def end(self) -> None:
        """Read no further requests, and drop those that wait."""
        self._has_ended = True
        self._places.release()  # the reader may wait for one
        if self._answered is not None:
            self._answered.scored.cancel()
        with contextlib.suppress(Empty):
            while True:
                pending = self._pending.get_nowait()
                if pending is not None:
                    pending.scored.cancel()
        self._pending.put(None)
