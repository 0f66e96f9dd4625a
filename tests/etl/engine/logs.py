# SPDX-License-Identifier: Apache-2.0
"""Logs of a small shop, and workflows for them."""

from pathlib import Path

import numpy as np

from terarec.etl.ops import Categorify, FillMissing, History, LogOp, TargetEncoding
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFraction

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="bought", type="integer"),
        SourceColumn(name="time", type="integer"),
        SourceColumn(name="user", type="text"),
        SourceColumn(name="item", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="tags", type="text", separator=" "),
    ),
)


def shop_lines(rows: int, seed: int = 0) -> list[str]:
    """Lines with missing values and equal times."""
    generator = np.random.default_rng(seed)
    users, items, times = (generator.integers(0, most, rows).tolist() for most in (60, 200, rows // 2))
    prices = generator.lognormal(2, 1, rows).round(2).tolist()
    kept = generator.random((rows, 3)) > 0.1
    return [
        "\t".join(
            (
                str(int(items[row] % 3 == 0)),
                str(1_600_000_000 + times[row]),
                f"u{users[row]}" if kept[row, 0] else "",
                str(items[row]) if kept[row, 1] else "",
                str(prices[row]) if kept[row, 2] else "",
                " ".join(f"t{(items[row] + step) % 30}" for step in range(items[row] % 4)),
            )
        )
        for row in range(rows)
    ]


def shop_files(directory: Path, rows: int = 600, files: int = 2) -> list[Path]:
    """The lines in several files."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = shop_lines(rows)
    paths = [directory / f"day_{number}.tsv" for number in range(files)]
    for number, path in enumerate(paths):
        part = lines[number * rows // files : (number + 1) * rows // files]
        path.write_text("".join(line + "\n" for line in part))
    return paths


_SPLIT = SplitByFraction(valid=0.1, test=0.05)


def shop_workflow(split: Split | None = _SPLIT, *, min_count: int = 2) -> Workflow:
    """Two fit phases and a grouped step."""
    return Workflow(
        [
            History(columns=("item",), group="user", order="time", max_length=4, outputs=("seen",)),
            FillMissing(columns=("price",), value=1.0),
            LogOp(columns=("price",), shift=None),
            Categorify(columns=("item", "seen"), min_count=min_count, joint=True),
            Categorify(columns=("user",), min_count=min_count),
            TargetEncoding(columns=("item",), target="bought", outputs=("item_rate",)),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        dense=["price", "item_rate"],
        categorical=["user", "item", "seen"],
        split=split,
        name="shop",
    )
