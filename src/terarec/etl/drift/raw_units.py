"""Numbers of a data set in the units of the raw columns: what scaled them is undone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.etl.workflow import Workflow


def in_raw_units(workflow: Workflow, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """What numbers of the dense column `name` were before logarithms and scales, which keep their order.

    It goes back to the source, or to the step that made a number of something else. What `Clip` cut off and
    `FillMissing` filled in stays so.

    Args:
        workflow: that made the data set.
        name: the column after the last step.
        numbers: float64[n], without missing ones.
    """
    for step in reversed(range(len(workflow.plan.operators))):
        code = workflow.plan.operators[step]
        if name not in code.writes:
            continue
        before = code.origin(name) or code.input_of(name)
        if before is None:
            break
        numbers = code.inverse(before, numbers, workflow.states.get(step), is_float32=True)
        name = before
    return numbers
