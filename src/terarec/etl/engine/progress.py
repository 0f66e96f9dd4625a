"""How far a preparation is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a preparation is.

    Attributes:
        phase: what is being done, such as "fit 1".
        rows: rows of the phase so far.
        phase_bytes: bytes of the sources that the phase has read, compressed as they are; on Spark, of the rows that
            the tasks of the phase have gone through, however often and in whatever form.
        done_bytes: the same of all phases so far.
        total_bytes: the same of all phases there will be.
        rows_per_second: of the phase.
        bytes_per_second: of the phase.
        seconds_left: until the end of the last phase, at the speed so far; None before there is one.
    """

    phase: str
    rows: int
    phase_bytes: int
    done_bytes: int
    total_bytes: int
    rows_per_second: float
    bytes_per_second: float
    seconds_left: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReport:
    """What a phase took.

    Attributes:
        name: of the phase.
        rows: that it went through.
        seconds: time taken.
        rows_per_second: `rows` / `seconds`.
        resumed: whether an interrupted run had done it already; the figures are that run's.
    """

    name: str
    rows: int
    seconds: float
    rows_per_second: float
    resumed: bool = False


OnProgress: TypeAlias = Callable[[Progress], None]


class ProgressMeter:
    """Adds blocks up, phase after phase.

    Args:
        tell: called after every block.

    Attributes:
        total_bytes: bytes of the sources to read in all phases together.
    """

    def __init__(self, tell: OnProgress | None) -> None:
        self.total_bytes = 0
        self._tell = tell
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self._rows = self._phase_bytes = self._done_bytes = self._skipped_bytes = 0

    def begin(self, phase: str) -> None:
        """Start a phase."""
        self._phase = phase
        self._phase_begun = time.perf_counter()
        self._rows = self._phase_bytes = 0

    def add(self, rows: int, num_bytes: int) -> None:
        """Count a block of the phase."""
        self._rows += rows
        self._phase_bytes += num_bytes
        self._done_bytes += num_bytes
        if self._tell is not None:
            self._tell(self._now())

    def skip(self, num_bytes: int) -> None:
        """Count bytes that need not be read, such as those of a phase that an interrupted run had done."""
        self._done_bytes += num_bytes
        self._skipped_bytes += num_bytes

    def end(self) -> PhaseReport:
        """What the phase took."""
        seconds = time.perf_counter() - self._phase_begun
        rate = self._rows / seconds if seconds else 0.0
        return PhaseReport(name=self._phase, rows=self._rows, seconds=seconds, rows_per_second=rate)

    def _now(self) -> Progress:
        now = time.perf_counter()
        seconds = max(now - self._phase_begun, 1e-9)
        read = self._done_bytes - self._skipped_bytes
        left = (self.total_bytes - self._done_bytes) * (now - self._begun) / read if read else None
        return Progress(
            phase=self._phase,
            rows=self._rows,
            phase_bytes=self._phase_bytes,
            done_bytes=self._done_bytes,
            total_bytes=self.total_bytes,
            rows_per_second=self._rows / seconds,
            bytes_per_second=self._phase_bytes / seconds,
            seconds_left=None if left is None else max(left, 0.0),
        )
