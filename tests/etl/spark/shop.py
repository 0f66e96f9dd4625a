# SPDX-License-Identifier: Apache-2.0
"""A small log with every kind of column, and a workflow with every operator."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from terarec.etl.ops import (
    Bucketize,
    Categorify,
    Clip,
    Cross,
    DateParts,
    DifferenceLag,
    DropLowCardinality,
    Explode,
    FillMissing,
    GivenIds,
    HashBucket,
    History,
    JoinGroupby,
    JoinTable,
    KeepRows,
    LambdaOp,
    ListSlice,
    LogOp,
    Normalize,
    NormalizeMinMax,
    Pad,
    Rename,
    SplitText,
    TargetEncoding,
)
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, SplitByHash, WorkflowSpec

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="bought", type="integer"),
        SourceColumn(name="time", type="time", format="%Y-%m-%d %H:%M"),
        SourceColumn(name="user", type="text"),
        SourceColumn(name="item", type="hex32"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="stock", type="integer"),
        SourceColumn(name="tags", type="text", separator="|"),
        SourceColumn(name="place", type="text"),
        SourceColumn(name="shown", type="integer", separator=" "),
    ),
    missing=("", "?"),
)
USERS = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="user", type="text"),
        SourceColumn(name="age", type="number"),
        SourceColumn(name="likes", type="hex32", separator=","),
    ),
)


def write_log(directory: Path, rows: int = 500, seed: int = 0) -> list[Path]:
    """Three files of rows, one of them compressed, with empty lines and both line ends."""
    choose = random.Random(seed)
    lines = [_line(choose) for _ in range(rows)]
    paths = [directory / "a b.tsv", directory / "[c].tsv", directory / "d.tsv.gz"]
    bounds = [0, rows // 2, rows // 2 + 1, rows]
    for path, first, last in zip(paths, bounds, bounds[1:], strict=False):
        ends = [b"\r\n" if row % 7 == 0 else b"\n\n" if row % 50 == 0 else b"\n" for row in range(first, last)]
        text = b"".join(line.encode() + end for line, end in zip(lines[first:last], ends, strict=True))
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return paths


def _line(choose: random.Random) -> str:
    def or_missing(value: str) -> str:
        return choose.choice(["", "?"]) if choose.random() < 0.1 else value

    item = choose.choice([choose.randint(0, 30), choose.randrange(2**32)])
    words = ["".join(choose.choice("abé") for _ in range(choose.randint(1, 2))) for _ in range(choose.randint(0, 5))]
    fields = [
        str(choose.randint(0, 1)),
        f"2024-0{choose.randint(1, 9)}-{choose.randint(1, 28):02d} {choose.randint(0, 23):02d}:30",
        or_missing(f"u{choose.randint(0, 20)}"),
        or_missing(f"{item:x}".upper()),
        or_missing(repr(round(choose.gauss(3, 100), 3))),
        or_missing(str(choose.randint(-3, 1000))),
        "|".join(words),
        or_missing(f"{choose.choice('xyz')}:{or_missing(str(choose.randint(0, 9)))}".replace("?", "")),
        " ".join(str(choose.randint(0, 5)) for _ in range(choose.randint(0, 3))),
    ]
    return "\t".join(fields)


def write_users(path: Path) -> Path:
    """The side table: some users, some without an age."""
    rows = [f"u{user}\t{20 + user if user % 5 else ''}\t{','.join('abc'[: user % 4])}\n" for user in range(1, 20, 2)]
    path.write_text("".join(rows))
    return path


def every_operator() -> WorkflowSpec:
    """All operators but `Explode`."""
    figures = tuple(f"{column}_price_{name}" for column in ("user", "item_id") for name in ("mean", "std", "sum"))
    return WorkflowSpec(
        name="shop",
        source=SOURCE,
        tables={"users": USERS},
        steps=(
            KeepRows(column="stock", at_least=0.0),
            SplitText(columns=("place",), separator=":", outputs=("town", "street"), types=("text", "integer")),
            Cross(columns=("town", "item", "street"), output="where"),
            HashBucket(columns=("user", "tags"), outputs=("user_hash", "tag_hash"), buckets=17, seed=7),
            GivenIds(columns=("shown",), outputs=("shown_id",), rows=(6,), max_length=3),
            DateParts(columns=("time",), parts=("hour",)),
            History(columns=("town", "item"), outputs=("towns", "items"), group="user", order="time", max_length=3),
            DifferenceLag(columns=("price", "stock"), outputs=("price_step", "stock_step"), group="user", order="time"),
            LambdaOp(
                columns=("price", "stock"),
                outputs=("worth",),
                function="tests.etl.spark.functions:worth",
                output_type="number",
            ),
            FillMissing(columns=("price", "worth"), value=1.5, indicator=True),
            Normalize(columns=("price",), outputs=("price_normal",)),
            NormalizeMinMax(columns=("price",), outputs=("price_share",)),
            FillMissing(columns=("price_step", "stock_step"), median=True),
            Bucketize(columns=("stock", "shown"), outputs=("stock_bucket", "shown_bucket"), intervals=4),
            Bucketize(columns=("price",), outputs=("price_bucket",), boundaries=(0.0, 1.5, 50.0)),
            LogOp(columns=("stock",), shift=None),
            Clip(columns=("price_step",), low=-100.0, high=100.0),
            ListSlice(columns=("tags", "tag_hash", "shown_bucket"), start=-3),
            Categorify(columns=("tags", "where"), min_count=2, hash_buckets=3),
            Categorify(columns=("item", "items"), outputs=("item_id", "items"), joint=True, max_size=20),
            Pad(columns=("tags",), length=4, value=0),
            JoinGroupby(columns=("user", "item_id"), values=("price",), statistics=("count", "mean", "std", "sum")),
            TargetEncoding(columns=("user", "item_id"), outputs=("user_rate", "item_rate"), target="bought"),
            Categorify(columns=("towns",)),
            DropLowCardinality(columns=("price_bucket", "where")),
            JoinTable(table="users", on="user", columns=("age", "likes")),
            FillMissing(columns=("age", *figures), value=-1.0),
            ListSlice(columns=("likes",), stop=2),
            Categorify(columns=("likes",)),
            Rename(names={"price_normal": "normal"}),
        ),
        split=SplitByHash(valid=0.2, test=0.1),
        labels=(LabelSpec(name="label", column="bought"), LabelSpec(name="late", column="stock_step", at_least=0.0)),
        dense=(
            *("price", "price_missing", "worth", "normal", "price_share", "price_step", "stock", "age"),
            *("user_rate", "item_rate", "user_count", "item_id_count", *figures),
        ),
        categorical=(
            *("user_hash", "tag_hash", "stock_bucket", "shown_bucket", "price_bucket", "tags", "where", "item_id"),
            *("items", "towns", "likes", "shown_id"),
        ),
        keys=("time",),
    )


def one_of_each() -> WorkflowSpec:
    """All operators but `Explode`, each for as few columns as there can be, fitted in one phase."""
    figures = ("user_price_mean", "user_price_std")
    return WorkflowSpec(
        name="shop",
        source=SOURCE,
        tables={"users": USERS},
        steps=(
            KeepRows(column="stock", at_least=0.0),
            SplitText(columns=("place",), separator=":", outputs=("town", "street"), types=("text", "integer")),
            GivenIds(columns=("shown",), outputs=("shown_id",), rows=(6,), max_length=3),
            DateParts(columns=("time",), parts=("hour",)),
            Cross(columns=("town", "street"), output="where"),
            HashBucket(columns=("tags",), outputs=("tag_hash",), buckets=17, seed=7),
            History(columns=("item",), outputs=("items",), group="user", order="time", max_length=3),
            DifferenceLag(columns=("price",), outputs=("price_step",), group="user", order="time"),
            LambdaOp(
                columns=("price", "stock"),
                outputs=("worth",),
                function="tests.etl.spark.functions:worth",
                output_type="number",
            ),
            FillMissing(columns=("price", "worth"), value=1.5, indicator=True),
            Normalize(columns=("price",), outputs=("normal",)),
            NormalizeMinMax(columns=("price",), outputs=("price_share",)),
            FillMissing(columns=("price_step",), median=True),
            Bucketize(columns=("stock",), outputs=("stock_bucket",), intervals=4),
            Bucketize(columns=("price",), outputs=("price_bucket",), boundaries=(0.0, 1.5, 50.0)),
            LogOp(columns=("stock",), shift=None),
            Clip(columns=("worth",), low=-100.0, high=100.0),
            ListSlice(columns=("tag_hash",), start=-3),
            Pad(columns=("tag_hash",), length=4, value=0),
            Categorify(columns=("where", "item", "items"), min_count=2, hash_buckets=3),
            JoinGroupby(columns=("user",), values=("price",), statistics=("count", "mean", "std")),
            TargetEncoding(columns=("user",), outputs=("user_rate",), target="bought"),
            DropLowCardinality(columns=("price_bucket",)),
            JoinTable(table="users", on="user", columns=("age",)),
            FillMissing(columns=("age", *figures), value=-1.0),
            Rename(names={"normal": "price_normal"}),
        ),
        split=SplitByHash(valid=0.2, test=0.1),
        labels=(LabelSpec(name="label", column="bought"),),
        dense=(
            *("price", "price_missing", "worth", "price_normal", "price_share", "price_step", "stock", "age"),
            *("user_rate", "user_count", *figures),
        ),
        categorical=("shown_id", "tag_hash", "stock_bucket", "price_bucket", "where", "item", "items"),
        keys=("time",),
    )


def exploded(split: object) -> WorkflowSpec:
    """A row for each item shown."""
    return WorkflowSpec(
        name="shown",
        source=SOURCE,
        steps=(
            Explode(columns=("shown",)),
            FillMissing(columns=("stock",), value=0.0),
            Categorify(columns=("shown", "user")),
        ),
        split=split,  # type: ignore[arg-type]
        labels=(LabelSpec(name="label", column="bought"),),
        dense=("stock",),
        categorical=("shown", "user"),
    )
