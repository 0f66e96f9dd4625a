# SPDX-License-Identifier: Apache-2.0
"""A shop's log: a workflow with many steps, and raw records for it."""

from typing import Any

import numpy as np

from terarec.etl.columns import Rows
from terarec.etl.ops import (
    Bucketize,
    Categorify,
    Cross,
    FillMissing,
    JoinGroupby,
    ListSlice,
    LogOp,
    Normalize,
    TargetEncoding,
)
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.etl.column_values import block_of

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="model", type="hex32"),
        SourceColumn(name="tags", type="text", separator=" "),
        SourceColumn(name="bought", type="integer"),
    ),
)
MODELS = ["a", "B", "0000000c", None]


def shop() -> Workflow:
    return Workflow(
        [
            FillMissing(columns=("price",), median=True),
            LogOp(columns=("price",), shift=None),
            Normalize(columns=("price",)),
            Bucketize(columns=("price",), intervals=4, outputs=("band",)),
            Cross(columns=("brand", "model"), output="kind"),
            ListSlice(columns=("tags",), stop=3),
            TargetEncoding(columns=("brand",), target="bought", outputs=("brand_rate",)),
            JoinGroupby(columns=("user",)),
            Categorify(columns=("brand", "kind", "user", "tags", "model"), min_count=2, hash_buckets=3),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        dense=["price", "brand_rate", "user_count"],
        categorical=["band", "brand", "kind", "user", "tags", "model"],
        name="shop",
    )


def raw(rows: int = 300) -> dict[str, list[Any]]:
    generator = np.random.default_rng(5)
    integers = generator.integers(0, 9, (5, rows)).tolist()
    return {
        "user": [None if u == 8 else u * 1000 for u in integers[0]],
        "price": [None if p == 0 else p * 1.5 for p in integers[1]],
        "brand": [["", "x", "\u00fc", "acme"][b % 4] for b in integers[2]],
        "model": [MODELS[m % 4] for m in integers[3]],
        "tags": [[f"t{t}" for t in range(n % 5)] for n in integers[4]],
    }


def rows_of(columns: dict[str, list[Any]]) -> Rows:
    kinds = {"user": "integer", "price": "number", "brand": "text", "tags": "text"}
    named = {name: (kind, columns[name]) for name, kind in kinds.items()}
    models = [None if model is None else int(model, 16) for model in columns["model"]]
    bought = [int(row % 3 == 0) for row in range(len(models))]
    return block_of(**named, model=("hex32", models), bought=("integer", bought))
