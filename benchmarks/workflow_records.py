# SPDX-License-Identifier: Apache-2.0
"""Measure the time of a fitted workflow for raw records that a server has as lists.

A record has Criteo's 39 fields: 13 numbers go through FillMissing, Clip and LogOp with a fitted shift, 26 hexadecimal
categories through Categorify. The goal is at most 100 us for a single record, and 15 us per record for 1,000 records.
The other presets follow.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ready_records import LOGS, fitted_with_records
from record import Row, append_rows, measure

from terarec.etl.columns import Rows, array_of, numpy_values
from terarec.etl.ops import Categorify, Clip, FillMissing, LogOp
from terarec.etl.ops.states import SpillOptions
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.transform import run_steps
from terarec.spec import LabelSpec, SourceColumn, SourceSpec

NUMBERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
TRAINING_ROWS = 200_000
DISTINCT = 50_000


def criteo() -> Workflow:
    columns = (
        SourceColumn(name="label", type="integer"),
        *(SourceColumn(name=name, type="integer") for name in NUMBERS),
        *(SourceColumn(name=name, type="hex32") for name in CATEGORIES),
    )
    return Workflow(
        [
            FillMissing(columns=NUMBERS, value=0.0),
            Clip(columns=NUMBERS, high=1e9),
            LogOp(columns=NUMBERS, shift=None),
            Categorify(columns=CATEGORIES, min_count=2),
        ],
        source=SourceSpec(format="delimited", columns=columns),
        labels=[LabelSpec(name="label")],
        dense=NUMBERS,
        categorical=CATEGORIES,
    )


def training_block(generator: np.random.Generator) -> Rows:
    columns = {"label": array_of(generator.integers(0, 2, TRAINING_ROWS))}
    for name in NUMBERS:
        columns[name] = array_of(generator.integers(-2, 10_000, TRAINING_ROWS))
    for name in CATEGORIES:
        ranks = np.minimum(generator.zipf(1.2, TRAINING_ROWS), DISTINCT).astype(np.uint64)
        columns[name] = array_of((ranks * np.uint64(2654435761)).astype(np.uint32))
    return Rows(columns, np.arange(TRAINING_ROWS))


def fitted(workflow: Workflow, block: Rows) -> Workflow:
    """Return `workflow`, fitted on one block in memory."""
    plan = workflow.plan
    with tempfile.TemporaryDirectory() as directory:
        for phase, steps in enumerate(plan.fit_phases):
            memory = SpillOptions(directory=Path(directory))
            statistics = {step: plan.operators[step].statistic(plan.types[step], memory) for step in steps}
            _, partials = run_steps(plan, plan.fit_pass(phase), block, workflow.states, statistics=statistics)
            for step, statistic in statistics.items():
                statistic.merge(partials[step])
                workflow.states[step] = statistic.finish()
    return workflow


def records(block: Rows, first: int, count: int) -> dict[str, list[Any]]:
    """Return raw values as in a request, one in ten missing."""
    rows = slice(first, first + count)
    raw: dict[str, list[Any]] = {name: numpy_values(block.columns[name])[rows].tolist() for name in NUMBERS}
    for name in CATEGORIES:
        raw[name] = [f"{value:08x}" for value in numpy_values(block.columns[name])[rows].tolist()]
    for place, values in enumerate(raw.values()):
        for row in range(place % 10, count, 10):
            values[row] = None
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    arguments = parser.parse_args()
    block = training_block(np.random.default_rng(0))
    workflow = fitted(criteo(), block)
    rows = []
    for count in (1, 32, 1000):
        case = f"a workflow's {count} raw records of 39 fields, from lists"
        rows.append(row_of(case, workflow, records(block, 0, max(count, 64)), count, arguments.repeats))
    with tempfile.TemporaryDirectory() as directory:
        for name in LOGS:
            ready, columns = fitted_with_records(name, Path(directory))
            for count in (1, 1000):
                case = f"{count} raw records of the ready workflow {name}, from lists"
                rows.append(row_of(case, ready, columns, count, arguments.repeats))
    append_rows("workflow_records", rows, dry=arguments.dry)


def row_of(case: str, workflow: Workflow, columns: dict[str, list[Any]], count: int, repeats: int) -> Row:
    """Measure the time to encode `count` records of `columns` at once, with other records in each call."""
    calls = max(1, 64 // count)
    requests = [
        {name: values[first : first + count] for name, values in columns.items()}
        for first in range(0, calls * count, count)
    ]
    timing = measure(lambda: [workflow.encode(request) for request in requests], repeats)
    size = sum(len(next(iter(request.values()))) for request in requests)
    return Row(case=case, metric="time a record", value=timing.median / size * 1e6, unit="us")


if __name__ == "__main__":
    main()
