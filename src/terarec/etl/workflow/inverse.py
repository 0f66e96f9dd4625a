"""Ids of a workflow's columns -> the values they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.etl.ops import Operator
from terarec.etl.values import ValueIds
from terarec.etl.workflow.plan import producer
from terarec.etl.workflow.workflow import Workflow


class IdValues:
    """The values behind the ids of one column of a fitted workflow.

    Attributes:
        kind: Kind of the step that makes the values; None where the source does.
        num_reserved: Number of the first ids without a value of their own: 0 for missing ones, then the rare or unseen
            ones; 0 where ids have no such order.
        vocabulary: Vocabulary that made the ids; None where there is none.

    Args:
        workflow: A fitted workflow.
        name: Column after the last step.
    """

    def __init__(self, workflow: Workflow, name: str) -> None:
        plan = workflow.plan
        step, made = producer(plan.operators, name, Operator.origin)
        self._operator = None if step is None else plan.operators[step]
        self._state = None if step is None else workflow.states.get(step)
        self._input = made if self._operator is None else self._operator.input_of(made) or ""
        self.kind: str | None = None
        self.num_reserved = 0
        self.vocabulary: ValueIds | None = None
        if self._operator is not None:
            self.kind = self._operator.kind
            self.num_reserved = self._operator.reserved_ids(plan.types[-1][name].kind == "id")
            self.vocabulary = self._operator.vocabularies(self._state).get(made)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """Return the value of each of ``ids int64[n]``, as text."""
        if self._operator is not None and self.num_reserved:
            return self._operator.describe_ids(self._input, ids, self._state)
        return [str(number) for number in ids]
