# SPDX-License-Identifier: Apache-2.0
"""Phases of a preparation: their progress, and their results, which survive a kill."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from terarec.io.directories import Journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a preparation.

    Attributes:
        phase: Current work, such as "fit 1".
        rows: Rows of the phase so far.
        phase_bytes: Bytes of the sources that the phase has read, compressed as they are; on Spark, of the rows that
            the tasks of the phase have read, however often and in any form.
        done_bytes: Bytes that all phases have read so far.
        total_bytes: Bytes that all phases will read.
        rows_per_second: Rows per second of the phase.
        bytes_per_second: Bytes per second of the phase.
        seconds_left: Until the end of the last phase, at the speed so far; None before there is one.
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
    """Work and time of a phase.

    Attributes:
        name: Name of the phase.
        rows: Rows that it read.
        seconds: Time taken.
        rows_per_second: `rows` / `seconds`.
        resumed: Whether an interrupted run had done it already; the figures are that run's.
    """

    name: str
    rows: int
    seconds: float
    rows_per_second: float
    resumed: bool = False


OnProgress: TypeAlias = Callable[[Progress], None]


class ProgressMeter:
    """Counts blocks, phase by phase."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.total_bytes = 0
        self._on_progress = on_progress
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
        if self._on_progress is not None:
            self._on_progress(self._now())

    def skip(self, num_bytes: int) -> None:
        """Count bytes that need not be read, such as those of a phase that an interrupted run had done."""
        self._done_bytes += num_bytes
        self._skipped_bytes += num_bytes

    def end(self) -> PhaseReport:
        """Return the work and time of the phase."""
        seconds = time.perf_counter() - self._phase_begun
        rate = self._rows / seconds if seconds else 0.0
        return PhaseReport(name=self._phase, rows=self._rows, seconds=seconds, rows_per_second=rate)

    def _now(self) -> Progress:
        now = time.perf_counter()
        # The first block may come before the clock moves.
        seconds = max(now - self._phase_begun, 1e-9)
        read = self._done_bytes - self._skipped_bytes
        # Skipped bytes took no time, so they do not count for the speed.
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


Result: TypeAlias = dict[str, Any]
"""Result of a phase, as JSON."""


class Phases:
    """Runs phases and commits them, so that each is run once, by this run or by an interrupted one before it."""

    def __init__(self, journal: Journal, progress: OnProgress | None) -> None:
        self.meter = ProgressMeter(progress)
        self.reports: list[PhaseReport] = []
        self.results: list[Result] = []
        self._journal = journal

    def run(self, name: str, work: Callable[[], Result], num_bytes: int) -> Result:
        """Return the result of phase `name`, computed by `work` unless it is done already.

        Args:
            name: Name of the phase.
            work: Function that does it; its result goes to the journal.
            num_bytes: Bytes of the sources that it reads.
        """
        known = self._journal.result(name)
        if known is not None:
            self.meter.skip(num_bytes)
            # The figures of the run that did it: for this one it took no time.
            report, result = PhaseReport(**{**known["report"], "resumed": True}), dict(known["result"])
        else:
            self.meter.begin(name)
            result = work()
            report = self.meter.end()
            # With the report: a resumed run shows the time of the phase as it was.
            self._journal.commit(name, {"report": dataclasses.asdict(report), "result": result})
        self.reports.append(report)
        self.results.append(result)
        return result
