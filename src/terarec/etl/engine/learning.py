"""What steps learn of the rows that they are shown, in bounded memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from terarec.etl.engine.learnt_states import LearntStates
from terarec.etl.ops import ColumnTypes, SpillOptions, Statistic
from terarec.etl.workflow import Plan, source_types

Statistics: TypeAlias = Mapping[int, Statistic]
"""Position of a step -> its statistic."""
Look: TypeAlias = Callable[[Statistics], dict[str, Any] | None]
"""Shows training rows to statistics; returns "rows", those of each split where they are known then, and what else is to
go to the journal. None: they saw others, and it is to be called again with fresh ones."""


class Learning:
    """Makes statistics and keeps the states that come of them.

    Args:
        plan: of the workflow.
        kept: takes the states.
        spill: directory for what does not fit in memory.
        memory_bytes: what all statistics of a phase may take together.
    """

    def __init__(self, plan: Plan, kept: LearntStates, spill: Path, memory_bytes: int) -> None:
        self._plan = plan
        self._kept = kept
        self._spill = spill
        self._memory_bytes = memory_bytes

    def learn(self, steps: Sequence[int], look: Look) -> dict[str, Any]:
        """Let fresh statistics of `steps` `look` at what they need, and save the states.

        Returns:
            What `look` returned; "spilled": names of the steps that did not fit in memory.

        Raises:
            StorageError: the disk is full, or what is learnt does not fit in memory.
        """
        statistics = self._fresh(steps)
        while (seen := look(statistics)) is None:
            statistics = self._fresh(steps)
        spilled = [self._name(step) for step in steps if any((self._spill / str(step)).iterdir())]
        self._kept.keep({step: statistic.finish() for step, statistic in statistics.items()})
        shutil.rmtree(self._spill)
        return {**seen, "spilled": spilled}

    def _fresh(self, steps: Sequence[int]) -> Statistics:
        shutil.rmtree(self._spill, ignore_errors=True)
        statistics: dict[int, Statistic] = {}
        for step in steps:
            directory = self._spill / str(step)
            directory.mkdir(parents=True)
            memory = SpillOptions(directory=directory, memory_bytes=self._memory_bytes // len(steps))
            statistics[step] = self._plan.codes[step].statistic(self._types(step), memory)
        return statistics

    def _types(self, step: int) -> ColumnTypes:
        table = self._plan.codes[step].side_table
        types: ColumnTypes = self._plan.types[step]
        return types if table is None else source_types(self._plan.spec.tables[table])

    def _name(self, step: int) -> str:
        return f"steps[{step}] {type(self._plan.spec.steps[step]).__name__}"
