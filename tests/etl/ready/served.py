# SPDX-License-Identifier: Apache-2.0
"""The records that the rows of a log would be, were they served."""

from __future__ import annotations

from typing import Any

from terarec.etl.columns import Rows, kind_of
from terarec.etl.workflow import Workflow
from tests.etl.column_values import values_of


def served_records(workflow: Workflow, block: Rows) -> dict[str, list[Any]]:
    """The raw values of `workflow.record_columns` for the rows of a whole log that the workflow keeps.

    Args:
        workflow: a fitted one.
        block: all rows, as the source gives them.
    """
    plan, brought = workflow.plan, {name: block.columns.get(name) for name in workflow.record_columns}
    for step, code in enumerate(plan.operators):
        block = code.transform(block, workflow.states.get(step))
        made = code.writes if code.stage == "grouped" else brought if code.stage == "rows" else ()
        brought.update({name: block.columns[name] for name in made if name in brought and name in block.columns})
    records = {}
    for name, column in brought.items():
        assert column is not None
        values = values_of(column)
        if kind_of(column) == "hex32":
            values = [None if value is None else f"{value:08x}" for value in values]
        records[name] = values
    return records
