"""Numbers of a data set in the units of the raw columns: what scaled them is undone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.operators.log_op import LogOpCode
from terarec.etl.operators.normalize import NormalizeCode
from terarec.etl.operators.normalize_min_max import NormalizeMinMaxCode
from terarec.etl.workflow import Workflow
from terarec.spec import Rename


def in_raw_units(workflow: Workflow, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """What numbers of the dense column `name` were before logarithms and scales, which keep their order.

    It goes back to the source, or to the step that made a number of something else. What `Clip` cut off and
    `FillMissing` filled in stays so.

    Args:
        workflow: that made the data set.
        name: the column after the last step.
        numbers: float64[n], without missing ones.
    """
    for step in reversed(range(len(workflow.plan.codes))):
        code: Any = workflow.plan.codes[step]
        if name not in code.writes:
            continue
        if isinstance(code.spec, Rename):
            name = next(old for old, new in code.spec.names.items() if new == name)
            continue
        before = next((column for column, output in getattr(code.spec, "pairs", ()) if output == name), None)
        if before is None:
            break
        if isinstance(code, NormalizeCode | NormalizeMinMaxCode):
            numbers = _rounded(code.inverse(before, numbers, workflow.states.get(step)))
        elif isinstance(code, LogOpCode):
            shift = code.shift_of(before, workflow.states.get(step))
            numbers = _to_digits(code.inverse(before, numbers, workflow.states.get(step)) + shift) - shift
        name = before
    return numbers


def _rounded(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without the digits that float32 did not hold: 38 is to be 38 whichever mean and deviation it was scaled by."""
    width = float(np.ptp(numbers)) if len(numbers) else 0.0
    if not width > 0.0:
        return numbers
    return np.round(numbers, -math.floor(math.log10(width * 2.0**-20)) - 1)


def _to_digits(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers above 0 to five digits, which logarithms in float32 hold."""
    powers = 10.0 ** (4 - np.floor(np.log10(numbers, where=numbers > 0.0, out=np.zeros_like(numbers))))
    return np.asarray(np.round(numbers * powers) / powers)
