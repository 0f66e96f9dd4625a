"""The steps of a workflow on the blocks of an engine's passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from terarec.etl.columns import TRAIN, Block, Column
from terarec.etl.engine.splits import Assign
from terarec.etl.operators import State, Statistic
from terarec.etl.workflow import Pass, Plan, run_row_steps, run_steps


@dataclass(frozen=True, slots=True)
class Steps:
    """Runs what a pass needs.

    Attributes:
        plan: of the workflow.
        states: position of a step -> what it learnt, as far as phases have gone.
        assign: gives the rows their splits.
    """

    plan: Plan
    states: dict[int, State]
    assign: Assign

    def enter(self, work: Pass, block: Block) -> Block:
        """The rows that take part, with their splits."""
        block = run_row_steps(self.plan, work, block, self.states)
        return block.with_split(self.assign(block))

    def observe(
        self, work: Pass, block: Block, joined: Block | None, statistics: Mapping[int, Statistic]
    ) -> dict[int, Any]:
        """What `statistics` see in the training rows of a block that has entered; `joined` as for `run`."""
        training = block.training()
        if joined is not None:
            assert block.split is not None
            joined = joined.keep(block.split == TRAIN)
        grouped = self._grouped(work, training, joined)
        return run_steps(self.plan, work, training, self.states, grouped=grouped, statistics=statistics)[1]

    def run(self, work: Pass, block: Block, joined: Block | None) -> Block:
        """All steps of a pass on a block that has entered.

        Args:
            work: the pass.
            block: the rows.
            joined: what grouped steps gave for these rows, see `terarec.etl.engine.grouped`; None where none is needed.
        """
        return run_steps(self.plan, work, block, self.states, grouped=self._grouped(work, block, joined))[0]

    def _grouped(self, work: Pass, block: Block, joined: Block | None) -> dict[int, dict[str, Column]]:
        if joined is None:
            return {}
        assert np.array_equal(joined.rows, block.rows), "grouped rows are not those of the block"
        return {
            step: {name: joined.columns[stored_name(step, name)] for name in self.plan.codes[step].writes}
            for step in work.grouped
        }


def stored_name(step: int, name: str) -> str:
    """The output `name` of a grouped step among those of all of them."""
    return f"{step}\x1f{name}"
