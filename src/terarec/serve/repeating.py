"""`Repeating`: work that a thread repeats while others go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from terarec.errors import TerarecError

_LOGGER = logging.getLogger(__name__)


class Repeating:
    """Calls a function every so many seconds in a thread. What it raises is logged, and it is called again.

    Args:
        name: Name of the thread.
        work: The function.
        every_seconds: Seconds between the end of a call and the next one; None for no thread.
    """

    def __init__(self, name: str, work: Callable[[], object], every_seconds: float | None) -> None:
        self._work = work
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if every_seconds is not None:
            self._thread = threading.Thread(target=self._run, args=(every_seconds,), name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, after a call that is under way."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, every_seconds: float) -> None:
        while not self._is_closed.wait(every_seconds):
            try:
                self._work()
            except (TerarecError, OSError) as error:
                # A trainer may also have removed the checkpoint for a newer one meanwhile.
                _LOGGER.warning("%s: %s; it is tried again", threading.current_thread().name, error)
