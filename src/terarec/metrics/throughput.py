"""Samples a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throughput:
    """Counts samples and the wall-clock seconds since the start or the last `reset`.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.samples = 0
        self._start = self._clock()

    def update(self, samples: int) -> Throughput:
        """Count `samples` more."""
        self.samples += samples
        return self

    @property
    def seconds(self) -> float:
        """Wall-clock seconds counted."""
        return self._clock() - self._start

    def compute(self) -> float:
        """Samples a second; 0.0 before any time has passed."""
        seconds = self.seconds
        return self.samples / seconds if seconds > 0 else 0.0
