"""Fits a workflow on a block in memory, phase by phase, as engines do on files."""

from pathlib import Path

from terarec.etl.columns import Block
from terarec.etl.operators import SpillOptions
from terarec.etl.workflow import Workflow, run_row_steps, run_steps


def fit(workflow: Workflow, block: Block, directory: Path) -> Workflow:
    """`workflow`, which has neither grouped steps nor side tables, with its states."""
    plan = workflow.plan
    memory = SpillOptions(directory=directory)
    for phase, steps in enumerate(plan.fit_phases):
        work = plan.fit_pass(phase)
        statistics = {step: plan.codes[step].statistic(plan.types[step], memory) for step in steps}
        rows = run_row_steps(plan, work, block.only(work.reads), workflow.states).training()
        _, partials = run_steps(plan, work, rows, workflow.states, statistics=statistics)
        for step, statistic in statistics.items():
            statistic.merge(partials[step])
            workflow.states[step] = statistic.finish()
    return workflow
