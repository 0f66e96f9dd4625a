"""The steps of a workflow on the blocks of an engine's passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from terarec.etl.columns import Block, Column
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.splits import Assign
from terarec.etl.ops import State, Statistic
from terarec.etl.workflow import Pass, Plan, run_steps
from terarec.etl.workflow.execution import state_of
from terarec.etl.workflow.judge import judge
from terarec.etl.workflow.metadata import with_metadata


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

    def enter(self, work: Pass, rows: ReadRows) -> Block:
        """The rows that take part, with their splits: those that row steps keep, and of which nothing is refused."""
        block, is_exploded = with_metadata(rows.block, work.metadata), False
        for step in work.row_steps:
            do = partial(self.plan.codes[step].transform, state=state_of(self.plan, step, self.states))
            block = rows.refusals.leave_out(do, block, is_exploded=is_exploded)[0]
            is_exploded |= self.plan.codes[step].explodes
        block = rows.refusals.leave_out(partial(judge, self.plan), block)[1]
        return block.with_split(self.assign(block))

    def observe(
        self, work: Pass, block: Block, joined: Block | None, statistics: Mapping[int, Statistic]
    ) -> dict[int, Any]:
        """What `statistics` see in training rows; others as for `run`."""
        grouped = self._grouped(work, block, joined)
        return run_steps(self.plan, work, block, self.states, grouped=grouped, statistics=statistics)[1]

    def run(self, work: Pass, block: Block, joined: Block | None) -> Block:
        """All steps of a pass on a block that has entered.

        Args:
            work: the pass.
            block: the rows.
            joined: what grouped steps gave for these rows and perhaps for more, see `terarec.etl.engine.grouped`; None
                where none is needed.
        """
        return run_steps(self.plan, work, block, self.states, grouped=self._grouped(work, block, joined))[0]

    def _grouped(self, work: Pass, block: Block, joined: Block | None) -> dict[int, dict[str, Column]]:
        if joined is None:
            return {}
        if not np.array_equal(joined.rows, block.rows):
            joined = joined.keep(np.isin(joined.rows, block.rows))
        assert joined.num_rows == block.num_rows, "grouped rows are not those of the block"
        return {
            step: {name: joined.columns[stored_name(step, name)] for name in self.plan.codes[step].writes}
            for step in work.grouped
        }


def stored_name(step: int, name: str) -> str:
    """The output `name` of a grouped step among those of all of them."""
    return f"{step}\x1f{name}"
