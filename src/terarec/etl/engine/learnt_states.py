"""What steps learnt, in the files of the saved workflow, so that it outlives a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from terarec.etl.ops import State
from terarec.etl.workflow import Plan
from terarec.etl.workflow.saved import STATES, state_name


class LearntStates:
    """The states that phases learn.

    Args:
        plan: of the workflow.
        directory: of the saved workflow.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory / STATES
        self._learnt: dict[int, State] = {}

    def keep(self, states: Mapping[int, State]) -> None:
        """Save the states of these steps.

        Raises:
            StorageError: the disk is full.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for step, state in states.items():
            state.save(self._directory, state_name(self._plan, step))
        self._learnt.update(states)

    def state(self, step: int) -> State:
        """What a step has learnt, in this run or in an interrupted one."""
        if step in self._learnt:
            return self._learnt[step]
        return self._plan.codes[step].load_state(self._directory, state_name(self._plan, step))
