"""What steps learn, in files, so that it outlives a kill."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from terarec.etl.operators import ColumnTypes, SpillOptions, State, Statistic
from terarec.etl.workflow import Plan, source_types
from terarec.etl.workflow.saved import STATES, state_name

Statistics: TypeAlias = Mapping[int, Statistic]
"""Position of a step -> its statistic."""
Look: TypeAlias = Callable[[Statistics], dict[str, int]]
"""Shows training rows to statistics; returns the rows of each split where they are known then."""


class Learning:
    """Makes statistics and keeps the states that come of them, where the saved workflow has them.

    Args:
        plan: of the workflow.
        directory: of the saved workflow.
        spill: directory for what does not fit in memory.
        memory_bytes: what all statistics of a phase may take together.
    """

    def __init__(self, plan: Plan, directory: Path, spill: Path, memory_bytes: int) -> None:
        self._plan = plan
        self._directory = directory / STATES
        self._spill = spill
        self._memory_bytes = memory_bytes
        self._learnt: dict[int, State] = {}

    def learn(self, steps: Sequence[int], look: Look) -> dict[str, Any]:
        """Let fresh statistics of `steps` `look` at what they need, and save the states.

        Returns:
            "rows": what `look` returned; "spilled": names of the steps that did not fit in memory.

        Raises:
            StorageError: the disk is full, or what is learnt does not fit in memory.
        """
        shutil.rmtree(self._spill, ignore_errors=True)
        statistics: dict[int, Statistic] = {}
        for step in steps:
            directory = self._spill / str(step)
            directory.mkdir(parents=True)
            memory = SpillOptions(directory=directory, memory_bytes=self._memory_bytes // len(steps))
            statistics[step] = self._plan.codes[step].statistic(self._types(step), memory)
        rows = look(statistics)
        spilled = [self._name(step) for step in steps if any((self._spill / str(step)).iterdir())]
        self._directory.mkdir(parents=True, exist_ok=True)
        for step, statistic in statistics.items():
            self._learnt[step] = statistic.finish()
            self._learnt[step].save(self._directory, state_name(self._plan, step))
        shutil.rmtree(self._spill)
        return {"rows": rows, "spilled": spilled}

    def state(self, step: int) -> State:
        """What a step has learnt, in this run or in an interrupted one."""
        if step in self._learnt:
            return self._learnt[step]
        return self._plan.codes[step].load_state(self._directory, state_name(self._plan, step))

    def _types(self, step: int) -> ColumnTypes:
        table = self._plan.codes[step].table
        types: ColumnTypes = self._plan.types[step]
        return types if table is None else source_types(self._plan.spec.tables[table])

    def _name(self, step: int) -> str:
        return f"steps[{step}] {type(self._plan.spec.steps[step]).__name__}"
