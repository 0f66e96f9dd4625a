"""Ids of a workflow's columns -> what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.workflow import Workflow


class IdValues:
    """What the ids of one column of a fitted workflow stand for.

    Attributes:
        kind: of the step that makes the values; None where the source does.
        num_reserved: of the first ids, those that stand for no value of their own: 0 for missing ones, then the rare or
            unseen ones; 0 where ids have no such order.

    Args:
        workflow: a fitted one.
        name: a column after the last step.
    """

    def __init__(self, workflow: Workflow, name: str) -> None:
        plan, states = workflow.plan, workflow.states
        step, self._input = _making_step(plan, name)
        self._code = None if step is None else plan.codes[step]
        self._state = None if step is None else states.get(step)
        self.kind = None if self._code is None else self._code.kind
        is_id = step is not None and plan.types[-1][name].kind == "id"
        self.num_reserved = 0 if self._code is None else self._code.reserved_ids(is_id)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """What each of ``ids int64[n]`` stands for, as text."""
        if self._code is not None and self.num_reserved:
            return self._code.describe_ids(self._input, ids, self._state)
        return [str(number) for number in ids]


def _making_step(plan: Plan, name: str) -> tuple[int | None, str]:
    """The step whose values the column `name` holds after the last step, and the column that it made them of."""
    for step in reversed(range(len(plan.codes))):
        code = plan.codes[step]
        if name not in code.writes:
            continue
        origin = code.origin(name)
        if origin is None:
            return step, code.input_of(name) or ""
        name = origin
    return None, name
