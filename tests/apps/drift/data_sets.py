# SPDX-License-Identifier: Apache-2.0
"""Small data sets of a workflow that was fitted on their training rows, and rows that have moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from terarec.etl.columns import Rows
from terarec.etl.ops import Categorify, FillMissing, ListSlice, Normalize, Rename
from terarec.etl.workflow import Workflow
from terarec.formats import write_dataset
from terarec.formats.shard import create_shard, shard_path
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.etl.column_values import block_of
from tests.etl.ops.fitting import fit

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="price", type="number"),
        SourceColumn(name="city", type="text"),
        SourceColumn(name="code", type="hex32"),
        SourceColumn(name="tags", type="text", separator=" "),
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="bought", type="integer"),
    ),
)


def workflow() -> Workflow:
    return Workflow(
        [
            FillMissing(columns=("price",), median=True),
            Normalize(columns=("price",)),
            Categorify(columns=("city", "code"), min_count=2, hash_buckets=3),
            ListSlice(columns=("tags",), stop=3),
            Categorify(columns=("tags",)),
            Rename(names={"code": "model"}),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        dense=["price"],
        categorical=["city", "model", "tags"],
        keys=["user"],
        name="shop",
    )


def rows(number: int, seed: int, *, moved: bool = False) -> Rows:
    """Rows of a shop; `moved`: dearer, another half of the cities, more of them missing."""
    generator = np.random.default_rng(seed)
    cities: list[Any] = [f"city {n % 12}" for n in (generator.pareto(1.0, number) * 3).astype(int)]
    if moved:
        cities = [None if n % 5 == 0 else f"new {n % 3}" if n % 2 else city for n, city in enumerate(cities)]
    return block_of(
        price=("number", (generator.lognormal(3.0, 1.0, number) * (2.0 if moved else 1.0)).tolist()),
        city=("text", cities),
        code=("hex32", (generator.integers(0, 6, number) * 977 + 5).tolist()),
        tags=("text", [[f"t{n}" for n in generator.integers(0, 5, size)] for size in generator.integers(0, 4, number)]),
        user=("integer", generator.integers(0, 50, number).tolist()),
        bought=("integer", generator.integers(0, 2, number).tolist()),
    )


def fitted(block: Rows) -> Workflow:
    """The workflow, fitted on all rows of `block`."""
    made = workflow()
    for step, code in enumerate(made.plan.operators):
        if code.stage == "fitted":
            made.states[step] = fit(code, [made.apply(block, upto=step)], types=made.plan.types[step])
    return made


def write(directory: Path, made: Workflow, **splits: Rows) -> Path:
    """A data set in `directory` of rows as a fitted workflow encodes them."""
    spec = made.dataset_spec()
    shards = {}
    for split, block in splits.items():
        encoded = made.encode_rows(made.apply(block))
        with create_shard(spec, shard_path(directory, spec, split, 0)) as writer:
            writer.write(encoded.label, encoded.dense, encoded.keys)
            shards[split] = (writer.close(),)
    made.save(directory / "workflow")
    write_dataset(replace(spec, splits=shards), directory)
    return directory
