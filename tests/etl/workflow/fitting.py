# SPDX-License-Identifier: Apache-2.0
"""Fits a workflow on a block in memory, phase by phase, as engines do on files."""

from pathlib import Path

from terarec.etl.columns import Rows
from terarec.etl.ops.states import SpillOptions
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.transform import run_steps


def fit(workflow: Workflow, block: Rows, directory: Path) -> Workflow:
    """`workflow`, which has neither grouped steps nor side tables, with its states."""
    plan = workflow.plan
    memory = SpillOptions(directory=directory)
    for phase, steps in enumerate(plan.fit_phases):
        work = plan.fit_pass(phase)
        statistics = {step: plan.operators[step].statistic(plan.types[step], memory) for step in steps}
        rows = block.select(work.reads)
        for step in work.row_steps:
            rows = plan.operators[step].transform(rows, workflow.states.get(step))
        _, partials = run_steps(plan, work, rows.training(), workflow.states, statistics=statistics)
        for step, statistic in statistics.items():
            statistic.merge(partials[step])
            workflow.states[step] = statistic.finish()
    return workflow
