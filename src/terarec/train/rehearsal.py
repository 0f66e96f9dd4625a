# SPDX-License-Identifier: Apache-2.0
"""What a training takes besides its model and data, measured by a tiny one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from terarec.formats import write_dataset
from terarec.formats.block import ColumnBlock
from terarec.formats.shard import create_shard, shard_path
from terarec.kernels import memory
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTablesSpec,
    LabelColumn,
    RunSpec,
    TrainingSpec,
)
from terarec.train.loggers import TensorBoardLogger, has_tensorboard
from terarec.train.report import write_report
from terarec.train.run import build

_ROWS = 64


def program_bytes() -> int:
    """Return the bytes that the program and its libraries take in host memory in a training.

    Libraries load parts of themselves when they are first used: the first optimizer of torch alone takes 80 MB, and a
    step reads as much from the files of libraries. So a tiny run with two tables is trained once a process.
    """
    _rehearse()
    return memory.peak_bytes()


@cache
def _rehearse() -> None:
    with tempfile.TemporaryDirectory(prefix="terarec-rehearsal-") as scratch:
        directory = Path(scratch)
        _write_data(directory / "data")
        run = directory / "run"
        spec = RunSpec(
            data=str(directory / "data"),
            model=DLRMSpec(width=4, bottom=(4,), top=(4,), tables=DynamicTablesSpec()),
            training=TrainingSpec(batch_size=_ROWS // 2, device="cpu"),
        )
        loggers = [TensorBoardLogger(run / "tensorboard", "valid")] if has_tensorboard() else []
        build(spec, run, callbacks=loggers).fit()
        write_report(run)


def _write_data(directory: Path) -> None:
    numbers = np.arange(_ROWS)
    block = ColumnBlock(
        label=(numbers % 2).astype(np.float32)[:, None],
        dense=numbers.astype(np.float32)[:, None],
        keys=(numbers, numbers),
    )
    described = DatasetSpec(
        name="rehearsal",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="number"),),
        categorical=tuple(CategoricalColumn(name=name, rows=_ROWS) for name in ("user", "item")),
    )
    splits = {}
    for split in ("train", "valid"):
        with create_shard(described, shard_path(directory, described, split, 0)) as writer:
            writer.write_block(block)
            splits[split] = (writer.close(),)
    write_dataset(replace(described, splits=splits), directory)
