"""Phases that are done once, by this run or by an interrupted one before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from terarec.etl.engine.progress import OnProgress, PhaseReport, ProgressMeter
from terarec.formats import Journal

Result = dict[str, Any]


class Phases:
    """Runs phases and commits them.

    Args:
        journal: knows which are done.
        progress: called after every block.

    Attributes:
        meter: to be told of every block.
    """

    def __init__(self, journal: Journal, progress: OnProgress | None) -> None:
        self.meter = ProgressMeter(progress)
        self._journal = journal
        self._reports: list[PhaseReport] = []
        self._results: list[Result] = []

    @property
    def reports(self) -> tuple[PhaseReport, ...]:
        """What each phase took."""
        return tuple(self._reports)

    @property
    def results(self) -> tuple[Result, ...]:
        """What each phase returned."""
        return tuple(self._results)

    def run(self, name: str, work: Callable[[], Result], num_bytes: int) -> Result:
        """The result of phase `name`, by `work` unless it is done already.

        Args:
            name: of the phase.
            work: does it; what it returns goes to the journal as JSON.
            num_bytes: of the sources that it reads.
        """
        known = self._journal.result(name)
        if known is not None:
            self.meter.skip(num_bytes)
            self._reports.append(PhaseReport(**{**known["report"], "resumed": True}))
            self._results.append(known["result"])
            return dict(known["result"])
        self.meter.begin(name)
        result = work()
        report = self.meter.end()
        self._reports.append(report)
        self._results.append(result)
        self._journal.commit(name, {"report": dataclasses.asdict(report), "result": result})
        return result
