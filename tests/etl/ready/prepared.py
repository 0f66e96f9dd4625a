# SPDX-License-Identifier: Apache-2.0
"""Small logs of every layout, prepared by their ready workflows, and what a test reads of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from terarec.apps.synthetic import adult, amazon, avazu, mind, movielens, rees46
from terarec.etl import prepare
from terarec.etl.engine.report import PrepareReport
from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set: its generator, and the files that its workflow takes."""

    generator: ModuleType
    workflow: str
    sources: Sequence[str]
    tables: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "avazu": Case(generator=avazu, workflow="avazu", sources=["train.csv"]),
    "rees46": Case(generator=rees46, workflow="rees46", sources=["2019-Oct.csv"]),
    "mind": Case(
        generator=mind,
        workflow="mind",
        sources=["train/behaviors.tsv", "valid/behaviors.tsv"],
        tables={"news": "train/news.tsv"},
    ),
    "movielens": Case(
        generator=movielens, workflow="movielens", sources=["ratings.csv"], tables={"movies": "movies.csv"}
    ),
    "movielens-1m": Case(
        generator=movielens,
        workflow="movielens",
        sources=["ratings.dat"],
        tables={"movies": "movies.dat", "users": "users.dat"},
        layout="1m",
    ),
    "adult": Case(
        generator=adult, workflow="adult", sources=["adult.data", "adult.test"], options={"bad_input": "skip"}
    ),
    "amazon": Case(generator=amazon, workflow="amazon", sources=["reviews.json"], tables={"meta": "meta.json"}),
    "amazon-2023": Case(
        generator=amazon,
        workflow="amazon",
        sources=["reviews.jsonl"],
        tables={"meta": "meta.jsonl"},
        layout="2023",
    ),
}


@dataclass(frozen=True)
class Prepared:
    """A log and the data set made of it."""

    raw: Path
    out: Path
    report: PrepareReport

    def split(self, name: str) -> dict[str, list[Any]]:
        """The columns of a split, in the order of its rows."""
        shards = read_dataset(self.out).splits[name]
        table = pa.concat_tables([pq.read_table(self.out / shard.file) for shard in shards])
        return table.to_pydict()


def make(name: str, directory: Path, rows: int, **arguments: Any) -> Prepared:
    """Generate `rows` rows and prepare them; `arguments` go to the workflow."""
    case = CASES[name]
    layout = {} if case.layout is None else {"layout": case.layout}
    raw, out = directory / name / "raw", directory / name / "data"
    raw.parent.mkdir()
    case.generator.generate(raw, rows=rows, seed=3, **layout)
    options = PrepareOptions(
        tables={table: (str(raw / file),) for table, file in case.tables.items()}, threads=1, **case.options
    )
    workflow = Workflow.of(PRESETS[case.workflow](**layout, **arguments))
    return Prepared(raw, out, prepare(workflow, [raw / file for file in case.sources], out, options))


def vocabulary(train_values: Iterable[Any], min_count: int) -> dict[Any, int]:
    """Value -> id as docs/workflows.md has it: by falling count, ties by rising value, from 2 on."""
    counts = Counter(value for value in train_values if value not in {None, ""})
    kept = sorted((-count, value) for value, count in counts.items() if count >= min_count)
    return {value: number for number, (_, value) in enumerate(kept, 2)}


def ids(values: Iterable[Any], known: Mapping[Any, int]) -> list[int]:
    """0 for a missing value, 1 for one that is not in the vocabulary."""
    return [0 if value in {None, ""} else known.get(value, 1) for value in values]
