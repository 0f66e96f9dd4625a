# SPDX-License-Identifier: Apache-2.0
"""A small data set whose click probabilities are known: a dense part, effects of keys, and a product of two keys."""

import dataclasses
from pathlib import Path

import numpy as np

from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.metrics import AUC
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, ShardSpec

ROWS = {"user": 300, "item": 120, "tags": 40}
COLUMNS = DatasetSpec(
    name="planted",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="age"), DenseColumn(name="hour")),
    categorical=tuple(CategoricalColumn(name=n, rows=r, hotness=3 if n == "tags" else 1) for n, r in ROWS.items()),
)


def make_planted(directory: Path, *, train: int, valid: int, rows_per_group: int = 1024) -> DatasetSpec:
    """Write the data set, splits "train" and "valid"; its ``best_auc`` is that of the planted model on "valid"."""
    rng = np.random.default_rng(0)
    effects = {name: rng.normal(0, 1.0, rows) for name, rows in ROWS.items()}
    factors = {name: rng.normal(0, 0.6, (ROWS[name], 2)) for name in ("user", "item")}
    splits, best_auc = {}, None
    for split, rows in (("train", train), ("valid", valid)):
        dense = rng.normal(size=(rows, 2)).astype(np.float32)
        keys = {name: (ROWS[name] * rng.random(rows) ** 1.5).astype(np.int64) for name in ("user", "item")}
        lengths = rng.integers(0, 4, rows)
        offsets = np.concatenate([[0], lengths.cumsum()])
        tags = rng.integers(0, ROWS["tags"], offsets[-1])
        logits = dense @ np.array([0.8, -0.5]) - 0.7 + effects["user"][keys["user"]] + effects["item"][keys["item"]]
        logits += (factors["user"][keys["user"]] * factors["item"][keys["item"]]).sum(axis=1)
        np.add.at(logits, np.repeat(np.arange(rows), lengths), 0.5 * effects["tags"][tags])
        label = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        best_auc = AUC().update(logits, label).compute()
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(directory / file, COLUMNS, rows_per_group=rows_per_group)
        writer.write(label[:, None], dense, [keys["user"], keys["item"], Ragged(tags, offsets)])
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=rows),)
    spec = dataclasses.replace(COLUMNS, splits=splits, best_auc=best_auc)
    write_dataset(spec, directory)
    return spec


def make_labelled(directory: Path, labels: dict[str, dict[str, np.ndarray]]) -> DatasetSpec:
    """Write a data set of one dense column and one key, with these labels: split -> name -> values."""
    names = next(iter(labels.values()))
    columns = dataclasses.replace(
        COLUMNS,
        name="labelled",
        labels=tuple(LabelColumn(name=name) for name in names),
        dense=COLUMNS.dense[:1],
        categorical=COLUMNS.categorical[:1],
    )
    rng, splits = np.random.default_rng(1), {}
    for split, of_split in labels.items():
        values = np.stack(list(of_split.values()), axis=1).astype(np.float32)
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(directory / file, columns, rows_per_group=100)
        dense = (values[:, :1] + rng.normal(size=(len(values), 1))).astype(np.float32)
        writer.write(values, dense, [rng.integers(0, ROWS["user"], len(values))])
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=len(values)),)
    spec = dataclasses.replace(columns, splits=splits)
    write_dataset(spec, directory)
    return spec
