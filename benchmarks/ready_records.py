# SPDX-License-Identifier: Apache-2.0
"""Raw records for the presets, as a server would get them for the rows of a log."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.apps.synthetic import adult, amazon, avazu, mind, movielens, rees46
from terarec.etl import fit
from terarec.etl.columns import Rows, concatenate_rows
from terarec.etl.ops.values import each, values_of_array
from terarec.etl.ready import PRESETS
from terarec.etl.source.source import open_source
from terarec.etl.workflow import Workflow
from terarec.ragged import Ragged
from terarec.spec import PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Log:
    """A generator of a log, and which of its files the preset of the same name reads."""

    generator: ModuleType
    sources: tuple[str, ...]
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


LOGS = {
    "avazu": Log(generator=avazu, sources=("train.csv",)),
    "rees46": Log(generator=rees46, sources=("2019-Oct.csv",)),
    "mind": Log(
        generator=mind,
        sources=("train/behaviors.tsv", "valid/behaviors.tsv"),
        tables={"news": ("train/news.tsv",)},
    ),
    "movielens": Log(generator=movielens, sources=("ratings.csv",), tables={"movies": ("movies.csv",)}),
    "adult": Log(generator=adult, sources=("adult.data", "adult.test")),
    "amazon": Log(generator=amazon, sources=("reviews.json",), tables={"meta": ("meta.json",)}),
}
ROWS = 20_000


def fitted_with_records(name: str, directory: Path) -> tuple[Workflow, dict[str, list[Any]]]:
    """Return a preset that is fitted on a generated log of `ROWS` rows, and the raw records of all its samples."""
    log, raw = LOGS[name], directory / name
    log.generator.generate(raw, rows=ROWS)
    files = [raw / file for file in log.sources]
    tables = {table: tuple(str(raw / file) for file in found) for table, found in log.tables.items()}
    options = PrepareOptions(tables=tables, bad_input="skip")
    workflow = fit(Workflow.of(PRESETS[name]()), files, options=options)
    rows = concatenate_rows(list(open_source(workflow.spec.source, files, "skip").blocks()))
    return workflow, served_records(workflow, rows)


def served_records(workflow: Workflow, block: Rows) -> dict[str, list[Any]]:
    """Return the raw values of ``workflow.record_columns`` for the rows of a whole log that the workflow keeps."""
    brought: dict[str, pa.Array | None] = {name: block.columns.get(name) for name in workflow.record_columns}
    for step, code in enumerate(workflow.plan.operators):
        block = code.transform(block, workflow.states.get(step))
        made = code.writes if code.stage == "grouped" else brought if code.stage == "rows" else ()
        brought.update({name: block.columns[name] for name in made if name in brought and name in block.columns})
    return {name: _as_lists(column) for name, column in brought.items() if column is not None}


def _as_lists(column: pa.Array) -> list[Any]:
    values = values_of_array(column)
    if isinstance(values, Ragged):
        return each(values)
    return values.tolist() if isinstance(values, np.ndarray) else values
