"""The steps of a workflow, done to a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column
from terarec.etl.ops import State, Statistic
from terarec.etl.workflow.plan import Pass, Plan


def run_steps(
    plan: Plan,
    work: Pass,
    block: Block,
    states: Mapping[int, State],
    *,
    grouped: Mapping[int, Mapping[str, Column]] | None = None,
    statistics: Mapping[int, Statistic] | None = None,
) -> tuple[Block, dict[int, Any]]:
    """The steps after the split, done to a block that has its splits. Several threads may call it.

    Args:
        plan: of the workflow.
        work: the pass.
        block: only training rows where `statistics` look at it.
        states: of the fitted steps among ``work.steps``.
        grouped: grouped step -> its outputs for the rows of the block.
        statistics: those of ``work.observes``; each looks at the block right before its step.

    Returns:
        The block after the last step, and what each statistic's `observe` returned.
    """
    partials: dict[int, Any] = {}
    for step in sorted({*work.steps, *work.observes}):
        if step in work.observes and statistics is not None:
            partials[step] = statistics[step].observe(block)
        if step not in work.steps:
            continue
        if step in work.grouped:
            block = block.with_columns((grouped or {})[step])
        else:
            block = plan.codes[step].transform(block, state_of(plan, step, states))
    return block, partials


def state_of(plan: Plan, step: int, states: Mapping[int, State]) -> State | None:
    """What a step learnt; None for one that learns nothing.

    Raises:
        ConfigError: it was not fitted yet.
    """
    if plan.codes[step].is_fitted and step not in states:
        kind = type(plan.spec.steps[step]).__name__
        raise ConfigError(f"steps[{step}] {kind}: is not fitted yet, expected a fitted workflow")
    return states.get(step)
