# SPDX-License-Identifier: Apache-2.0
"""Compare a whole `fit` from Parquet with the bare training step, and measure the memory that training takes.

The bare step is `Trainer.train_step` on batches that are in memory already; the fit reads, shuffles, logs and trains
the same number of batches. Both take turns on one model. The timing leaves checkpoints out, since the user chooses how
many there are; the memory figure includes them.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import Row, append_rows

from terarec.data import Reader
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.models import build_model
from terarec.models.artifact import tables
from terarec.spec import (
    AdaGradSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    LabelColumn,
    RunSpec,
    SGDSpec,
    ShardSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer, build
from terarec.train.devices import keep_freed_memory
from terarec.train.metrics_log import MetricsLog

NUM_DENSE, NUM_FEATURES = 13, 26


@dataclass(frozen=True, kw_only=True)
class Case:
    """DLRM on Criteo-shaped data; ``rows`` is the number of rows of one table."""

    name: str
    model: DLRMSpec
    rows: int
    batch: int
    steps: int


LARGE = Case(
    name="DLRM, 26 tables of 385 k rows, width 64, bottom 512-256-64, top 1024-1024-512-256, batch 8192, SGD",
    model=DLRMSpec(width=64, bottom=(512, 256, 64), top=(1024, 1024, 512, 256)),
    rows=385_000,
    batch=8192,
    steps=6,
)
SMALL = Case(
    name="DLRM, 26 tables of 50 k rows, width 16, bottom 512-256-16, top 512-256, batch 2048, SGD",
    model=DLRMSpec(),
    rows=50_000,
    batch=2048,
    steps=40,
)


def write_data(directory: Path, case: Case) -> DatasetSpec:
    """Write random samples with power-law keys, as many as the case's steps take."""
    num_rows = case.batch * case.steps
    spec = DatasetSpec(
        name="random",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{index}") for index in range(NUM_DENSE)),
        categorical=tuple(CategoricalColumn(name=f"C{index}", rows=case.rows) for index in range(NUM_FEATURES)),
        splits={"train": (ShardSpec(file="train/part-00000.parquet", rows=num_rows),)},
    )
    rng = np.random.default_rng(0)
    writer = ParquetShardWriter(directory / "train/part-00000.parquet", spec)
    label = (rng.random((num_rows, 1)) < 0.25).astype(np.float32)
    dense = rng.random((num_rows, NUM_DENSE), dtype=np.float32)
    writer.write(label, dense, [(case.rows * rng.random(num_rows) ** 4).astype(np.int64) for _ in range(NUM_FEATURES)])
    writer.close()
    write_dataset(spec, directory)
    return spec


def time_case(case: Case, repeats: int) -> Row:
    """Return the rate of the fit, with the bare step as its peer."""
    keep_freed_memory()  # as `Run.fit` does
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        spec = write_data(directory, case)
        model = build_model(case.model, spec)
        optimizers = Optimizers.of(model, SGDSpec(), SGDSpec())

        def trainer() -> Trainer:
            training = TrainingSpec(batch_size=case.batch)
            log = MetricsLog(directory / "metrics.jsonl", "valid")
            return Trainer(model, training, optimizers, callbacks=[log])

        reader = Reader(directory, batch_size=case.batch, shuffle=True)
        in_memory = list(Reader(directory, batch_size=case.batch, shuffle=True))
        step = trainer().train_step
        step(in_memory[0])
        fits, bares = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            for batch in in_memory:
                step(batch)
            bares.append(time.perf_counter() - start)
            fits.append(trainer().fit(reader).seconds)
    num_samples = case.batch * case.steps
    return Row(
        case=case.name,
        metric="fit from Parquet",
        value=num_samples / min(fits),
        unit="samples/s",
        peer="bare step",
        peer_value=num_samples / min(bares),
    )


def train_and_tell(folder: Path, case: Case) -> None:
    """Train a run with AdaGrad and a checkpoint, and print its bytes. It needs a process of its own."""
    spec = RunSpec(
        data=str(folder / "data"),
        model=case.model,
        sparse_optimizer=AdaGradSpec(),
        training=TrainingSpec(batch_size=case.batch),
    )
    run = build(spec, folder / "run")
    peak = run.fit().peak_memory_bytes
    print(json.dumps({"peak": peak, "tables": sum(table.memory_bytes for table in tables(run.model).values())}))


def measure_memory(case: Case) -> Row:
    """Measure the peak memory besides table weights and their optimizer state."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "data", case)
        command = [sys.executable, __file__, "--memory-of", folder]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    answered = json.loads(answer)
    return Row(
        case=f"{case.name.removesuffix('SGD')}AdaGrad, tables and state {answered['tables'] / 2**30:.2f} GiB",
        metric="peak memory beside tables and state",
        value=(answered["peak"] - answered["tables"]) / 2**30,
        unit="GiB",
        limit=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    memory_case = dataclasses.replace(LARGE, steps=3)
    if options.memory_of is not None:
        train_and_tell(options.memory_of, memory_case)
        return
    rows = [time_case(case, options.repeats) for case in (SMALL, LARGE)]
    append_rows("fit", [*rows, measure_memory(memory_case)])


if __name__ == "__main__":
    main()
