"""The last phase: one pass over all rows, encoded and handed to a sink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import SPLIT_NAMES, Block
from terarec.etl.engine.passes import Beside, Passes, ReadRows
from terarec.etl.engine.positive_rows import PositiveRows
from terarec.etl.engine.steps import Steps
from terarec.etl.sink import Sink
from terarec.etl.workflow.plan import Pass
from terarec.formats import ColumnBlock, merge

Part = tuple[str, NDArray[np.int64], ColumnBlock]
"""Split, row ids and rows."""


def write_rows(
    passes: Passes,
    steps: Steps,
    encode: Callable[[Block], ColumnBlock],
    *,
    sink: Sink,
    beside: Beside | None,
    positives: PositiveRows,
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Encode every row.

    Args:
        passes: the sources.
        steps: of the workflow, all of them fitted.
        encode: makes the columns of the data set of those that stand at the end.
        sink: takes the rows.
        beside: what the grouped steps gave.
        positives: is shown all rows.

    Returns:
        Split -> rows; column of the sources -> (missing values, all values).

    Raises:
        StorageError: the disk is full.
    """
    encoded = partial(_encoded, steps, steps.plan.transform_pass(), encode)
    rows: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    values: Counter[str] = Counter()
    with closing(passes.map(encoded, beside=beside)) as results:
        for parts, missing in results:
            for split, ids, block in parts:
                sink.write(split, ids, block)
                positives.look(split, block)
                rows[split] += len(ids)
            for name, (count, total) in missing.items():
                faults[name] += count
                values[name] += total
    return dict(rows), {name: (faults[name], values[name]) for name in values}


def _encoded(
    steps: Steps, work: Pass, encode: Callable[[Block], ColumnBlock], rows: ReadRows
) -> tuple[list[Part], dict[str, tuple[int, int]]]:
    """The parts of a block of the sources; and of each column how many values are missing, and of how many."""

    def parts(block: Block) -> list[Part]:
        if not block.num_rows:
            return []
        done = steps.run(work, block, rows.joined)
        return split_parts(done, encode(done))

    columns = rows.block.columns.items()
    missing = {name: (column.num_missing(), len(column.values)) for name, column in columns}
    return rows.refusals.leave_out(parts, steps.enter(work, rows))[0], missing


def split_parts(done: Block, encoded: ColumnBlock) -> list[Part]:
    """The rows of each split, in their order."""
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
