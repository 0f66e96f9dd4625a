"""Rows, judged before anything is learnt from them."""

from __future__ import annotations

from terarec.etl.columns import Block
from terarec.etl.workflow.data_set import dense_values, label_values, weight_values
from terarec.etl.workflow.plan import Plan


def judge(plan: Plan, block: Block) -> None:
    """Look for what `plan.judging` can tell to be refused of rows as they stand after the row steps.

    Raises:
        RowFaultError: a step, or the data set, refuses a value.
    """
    if not block.num_rows:
        return
    for step in plan.judging.steps:
        block = plan.codes[step].transform(block, None)
    for label in plan.judging.labels:
        label_values(label, block)
    dense_values(plan.judging.dense, block)
    if plan.judging.weight is not None:
        weight_values(plan.judging.weight, block)
