"""Labels made of certain values: one of these has to occur where the model is to learn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import numpy as np

from terarec.errors import ConfigError
from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.etl.engine.passes import Beside, Passes, ReadRows
from terarec.etl.engine.steps import Steps
from terarec.formats import ColumnBlock
from terarec.spec import LabelSpec

SHOWN = 5
"""Values of a label that a message shows."""


class PositiveRows:
    """Looks for a positive row of the training part for each of `labels` that has `positives`."""

    def __init__(self, labels: Sequence[LabelSpec]) -> None:
        self._absent = {place: label for place, label in enumerate(labels) if label.positives}

    def look(self, split: str, block: ColumnBlock) -> None:
        """Take in rows of a split."""
        if self._absent and split == SPLIT_NAMES[TRAIN]:
            self._absent = {place: label for place, label in self._absent.items() if not block.label[:, place].any()}

    @property
    def absent(self) -> LabelSpec | None:
        """A label without such a row; None if there is none."""
        return next(iter(self._absent.values()), None)


def training_values(passes: Passes, steps: Steps, column: str, beside: Beside | None) -> list[str]:
    """The first different values of `column` in the training part, one more than `SHOWN` at most."""
    work = steps.plan.transform_pass()

    def values(rows: ReadRows) -> list[str]:
        run = partial(steps.run, work, joined=rows.joined)
        done = rows.refusals.leave_out(run, steps.enter(work, rows))[0]
        found = done.columns[column].take(np.flatnonzero(done.split == TRAIN))
        return list(dict.fromkeys(map(str, found.values.tolist())))

    seen: dict[str, None] = {}
    with closing(passes.map(values, beside=beside)) as results:
        for found in results:
            seen.update(dict.fromkeys(found))
            if len(seen) > SHOWN:
                break
    return list(seen)[: SHOWN + 1]


def no_positives(label: LabelSpec, values: Sequence[str]) -> ConfigError:
    """The error that no training row of `label` has one of its `positives`, but such `values`."""
    shown = ", ".join(map(repr, values[:SHOWN])) + (", ..." if len(values) > SHOWN else "")
    wanted = " or ".join(map(repr, label.positives))
    return ConfigError(f"label {label.source!r}: no row of the training part holds {wanted}; it holds {shown}")
