# SPDX-License-Identifier: Apache-2.0
"""Work that a thread repeats in the background, of a class or a function; and when to try again what has failed."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from typing_extensions import override

from terarec.errors import TerarecError

_LOGGER = logging.getLogger(__name__)


class Backoff:
    """When something that has failed is tried again: after a pause, each twice as long as the one before.

    Attributes:
        due: Time of the next try, by `time.monotonic`.
    """

    def __init__(self, first_seconds: float, longest_seconds: float = 300.0) -> None:
        self.due = -math.inf
        self._pause = first_seconds
        self._longest = longest_seconds

    @property
    def is_due(self) -> bool:
        """Whether it may be tried by now."""
        return time.monotonic() >= self.due

    def fail(self) -> float:
        """Note that it has failed; return the seconds until the next try."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        self.due = time.monotonic() + pause
        return pause


class Repeating(ABC):
    """Calls `poll` periodically in a thread. Its errors are logged, and it is called again.

    A subclass calls `__init__` last, since the thread may call `poll` before that returns.

    Args:
        name: Name of the thread.
        every_seconds: Seconds between the end of a call and the next one; None for no thread.
        first_seconds: Seconds before the first call; None for as many.
    """

    def __init__(self, name: str, every_seconds: float | None, first_seconds: float | None = None) -> None:
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if every_seconds is not None:
            pauses = every_seconds, every_seconds if first_seconds is None else first_seconds
            self._thread = threading.Thread(target=self._repeat, args=pauses, name=name, daemon=True)
            self._thread.start()

    @abstractmethod
    def poll(self) -> int:
        """Do the work that there is; return how much there was."""

    def close(self) -> None:
        """Stop, after a call that is under way."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repeat(self, every_seconds: float, pause: float) -> None:
        # The wait is the sleep, which `close` ends at once.
        while not self._is_closed.wait(pause):
            pause = every_seconds
            try:
                self.poll()
            except (TerarecError, OSError) as error:
                # A trainer may also have removed the checkpoint for a newer one meanwhile.
                _LOGGER.warning("%s: %s; it is tried again", threading.current_thread().name, error)
            except Exception:  # a thread that ended would leave its owner behind for good
                _LOGGER.exception("%s: it is tried again", threading.current_thread().name)


class RepeatedCall(Repeating):
    """Calls a function periodically in a thread; see `Repeating`, whose other arguments it takes."""

    def __init__(
        self, name: str, work: Callable[[], object], every_seconds: float, first_seconds: float | None = None
    ) -> None:
        self._work = work
        super().__init__(name, every_seconds, first_seconds)

    @override
    def poll(self) -> int:
        self._work()
        return 1
