"""The write phase: one pass over all rows, transformed and handed to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import SPLIT_NAMES, TRAIN, Block
from terarec.etl.engine.passes import JoinedRows, Passes, Pipeline, ReadRows
from terarec.etl.sink import Sink
from terarec.formats import ColumnBlock, merge
from terarec.spec import LabelSpec

SHOWN = 5
"""Values of a label that a message shows."""
Part: TypeAlias = tuple[str, NDArray[np.int64], ColumnBlock]
"""Split, row ids and rows."""


def write_rows(
    passes: Passes,
    pipeline: Pipeline,
    encode: Callable[[Block], ColumnBlock],
    *,
    sink: Sink,
    joined: JoinedRows | None,
    positives: PositiveRows,
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Write every row.

    Args:
        passes: The sources.
        pipeline: Steps of the workflow, all of them fitted.
        encode: Function that makes the columns of the data set from those after the last step.
        sink: Files to write.
        joined: Outputs of the grouped steps.
        positives: Check that observes all rows.

    Returns:
        Split -> rows; column of the sources -> (missing values, all values).

    Raises:
        StorageError: The disk is full.
    """
    work = pipeline.plan.transform_pass()

    def transform(rows: ReadRows) -> tuple[list[Part], dict[str, tuple[int, int]]]:
        def parts(block: Block) -> list[Part]:
            if not block.num_rows:
                return []
            done = pipeline.run(work, block, rows.joined)[0]
            return split_parts(done, encode(done))

        columns = rows.block.columns.items()
        missing = {name: (column.num_missing(), len(column.values)) for name, column in columns}
        return rows.invalid.filter(parts, pipeline.preprocess(work, rows))[0], missing

    num_rows: Counter[str] = Counter()
    num_missing: Counter[str] = Counter()
    num_values: Counter[str] = Counter()
    with closing(passes.map(transform, joined=joined)) as results:
        for parts, missing in results:
            for split, ids, block in parts:
                sink.write(split, ids, block)
                positives.observe(split, block)
                num_rows[split] += len(ids)
            for name, (count, total) in missing.items():
                num_missing[name] += count
                num_values[name] += total
    return dict(num_rows), {name: (num_missing[name], num_values[name]) for name in num_values}


def split_parts(done: Block, encoded: ColumnBlock) -> list[Part]:
    """Return the rows of each split, in their order."""
    assert done.split is not None
    first = int(done.split[0])
    if (done.split == first).all():
        return [(SPLIT_NAMES[first], done.rows, encoded)]
    parts: list[Part] = []
    for number, name in enumerate(SPLIT_NAMES):
        positions = np.flatnonzero(done.split == number)
        if len(positions):
            parts.append((name, done.rows[positions], merge([encoded], positions)))
    return parts


class PositiveRows:
    """Checks that the training part holds a positive row for each label that names its positive values.

    Args:
        labels: Labels of the workflow; none where nothing is fitted.
    """

    def __init__(self, labels: Sequence[LabelSpec]) -> None:
        self._absent = {place: label for place, label in enumerate(labels) if label.positives}

    def observe(self, split: str, block: ColumnBlock) -> None:
        """Take rows of a split into account."""
        if self._absent and split == SPLIT_NAMES[TRAIN]:
            self._absent = {place: label for place, label in self._absent.items() if not block.label[:, place].any()}

    @property
    def absent(self) -> LabelSpec | None:
        """A label without a positive row; None if there is none."""
        return next(iter(self._absent.values()), None)


def training_values(passes: Passes, pipeline: Pipeline, column: str, joined: JoinedRows | None) -> list[str]:
    """Return the first different values of `column` in the training part, one more than `SHOWN` at most."""
    work = pipeline.plan.transform_pass()

    def values_of(rows: ReadRows) -> list[str]:
        run = partial(pipeline.run, work, joined=rows.joined)
        done = rows.invalid.filter(run, pipeline.preprocess(work, rows))[0][0]
        found = done.columns[column].take(np.flatnonzero(done.split == TRAIN))
        return list(dict.fromkeys(map(str, found.values.tolist())))

    seen: dict[str, None] = {}
    with closing(passes.map(values_of, joined=joined)) as results:
        for values in results:
            seen.update(dict.fromkeys(values))
            if len(seen) > SHOWN:
                break
    return list(seen)[: SHOWN + 1]


def no_positives(label: LabelSpec, values: Sequence[str]) -> ConfigError:
    """Return the error that no training row of `label` has one of its `positives`, but such `values`."""
    shown = ", ".join(map(repr, values[:SHOWN])) + (", ..." if len(values) > SHOWN else "")
    wanted = " or ".join(map(repr, label.positives))
    return ConfigError(f"label {label.source!r}: no row of the training part holds {wanted}; it holds {shown}")
