"""A fit phase: one pass over the training rows, in which all steps of the phase learn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, Block
from terarec.etl.engine.passes import Beside, Passes, ReadRows
from terarec.etl.engine.steps import Steps
from terarec.etl.ops import Statistic
from terarec.etl.source import RawBlock
from terarec.etl.workflow import Pass


def fit_phase(
    passes: Passes,
    steps: Steps,
    work: Pass,
    statistics: Mapping[int, Statistic],
    *,
    beside: Beside | None,
    blocks: Iterable[RawBlock],
) -> dict[str, int]:
    """Let the `statistics` of some steps see all training rows.

    Args:
        passes: the sources.
        steps: of the workflow, with the states of earlier phases.
        work: the pass of this phase.
        statistics: position of a step -> its statistic.
        beside: what the grouped steps gave.
        blocks: of the sources, those to look at.

    Returns:
        Split -> rows that were seen.
    """

    def observe(rows: ReadRows) -> tuple[dict[int, Any], NDArray[np.int64]]:
        def look(block: Block) -> dict[int, Any]:
            return steps.observe(work, block, rows.joined, statistics) if block.num_rows else {}

        entered = steps.enter(work, rows)
        assert entered.split is not None
        counts = np.bincount(entered.split, minlength=len(SPLIT_NAMES))
        return rows.refusals.leave_out(look, entered.training())[0], counts

    rows = np.zeros(len(SPLIT_NAMES), dtype=np.int64)
    with closing(passes.map(observe, beside=beside, blocks=blocks)) as results:
        for partials, counts in results:
            for step, partial in partials.items():
                statistics[step].merge(partial)
            rows += counts
    return dict(zip(SPLIT_NAMES, rows.tolist(), strict=True))


def check_training(rows: int) -> None:
    """Raise `FormatError` if there was no row for training."""
    if not rows:
        raise FormatError("the sources hold no row for training, expected at least one")
