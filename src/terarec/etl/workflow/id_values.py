"""Ids of a workflow's columns -> what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.etl.operators.bucketize import BucketizeCode
from terarec.etl.operators.categorify import CategorifyCode, Vocabularies
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.workflow import Workflow
from terarec.spec import MISSING_ID, Categorify, Explode, GivenIds, History, ListSlice, Pad, Rename

MISSING, RARE = "(missing)", "(rare or unseen)"


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
        spec = None if step is None else plan.spec.steps[step]
        self.kind = None if spec is None else spec.kind
        is_id = step is not None and plan.types[-1][name].kind == "id"
        self.num_reserved = 1 + spec.hash_buckets if isinstance(spec, Categorify) else int(is_id)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """What each of ``ids int64[n]`` stands for, as text."""
        if isinstance(self._code, CategorifyCode) and isinstance(self._state, Vocabularies):
            found = self._code.inverse(self._input, ids.tolist(), self._state)
            return [
                _reserved(number) if value is None else str(value) for number, value in zip(ids, found, strict=True)
            ]
        if isinstance(self._code, BucketizeCode):
            boundaries = self._code.boundaries_of(self._input, self._state)
            ends = ["-inf", *(f"{boundary:g}" for boundary in boundaries), "inf"]
            return [MISSING if number == MISSING_ID else f"[{ends[number - 1]}, {ends[number]})" for number in ids]
        if self._code is not None and self.num_reserved:
            return [MISSING if number == MISSING_ID else f"(bucket {number})" for number in ids]
        return [str(number) for number in ids]


def _reserved(number: int) -> str:
    return MISSING if number == MISSING_ID else RARE


def _making_step(plan: Plan, name: str) -> tuple[int | None, str]:
    """The step whose values the column `name` holds after the last step, and the column that it made them of."""
    for step in reversed(range(len(plan.codes))):
        spec = plan.spec.steps[step]
        if name not in spec.writes or isinstance(spec, Explode):
            continue
        if isinstance(spec, Rename):
            name = next(old for old, new in spec.names.items() if new == name)
            continue
        columns = getattr(spec, "columns", ())
        outputs = getattr(spec, "outputs", ()) or columns
        made_of = columns[outputs.index(name)] if len(columns) == len(outputs) and name in outputs else ""
        if not isinstance(spec, ListSlice | Pad | History | GivenIds):
            return step, made_of
        name = made_of
    return None, name
