# SPDX-License-Identifier: Apache-2.0
"""Train tables of 10 TB on one machine: 26 features, 80 G rows of 32 floats, 2 GiB of host memory and a directory.

A row takes space only after a batch has trained it. The disk holds these touched rows with their optimizer state
(AdaGrad, 256 bytes a row), and at most 1.5 times that while old versions wait for compaction. The 2 GiB are for rows;
the indexes of touched keys, the layers and the batches take additional memory.

The keys follow a power law: feature f draws a rank r < R, one of its R = 80 G / 26 keys, with density ~ (r + 1)^-skew
(1.05 by default; sampled by the inverse distribution function at a uniform number, rounded down). The key is
mix(f * 2^40 + r) by the finalizer of SplitMix64, which is one to one on 64 bits, so keys are spread over all of int64
and no two ranks or features share one. A label is 1 with probability sigmoid(x_0 + 0.5 * (signs of the first four
keys)), which the model has to learn.

    python examples/ten_terabytes.py --steps 200 --dir rows
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from terarec.batch import Batch, one_hot
from terarec.models import DLRM
from terarec.reports.text import byte_text, number_text
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTablesSpec,
    LabelColumn,
    Tiers,
    TrainingSpec,
)
from terarec.train import Callback, Optimizers, Trainer

FEATURES, WIDTH, NUM_DENSE = 26, 32, 13
ROWS = -(-80_000_000_000 // FEATURES)
NAMES = tuple(f"C{number}" for number in range(1, FEATURES + 1))
DATASET = DatasetSpec(
    name="ten_terabytes",
    storage="parquet",
    labels=(LabelColumn(name="label"),),
    dense=tuple(DenseColumn(name=f"I{number}") for number in range(1, NUM_DENSE + 1)),
    categorical=tuple(CategoricalColumn(name=name, rows=ROWS) for name in NAMES),
)


def power_law_ranks(uniform: np.ndarray, skew: float) -> np.ndarray:
    """Return ranks int64 below `ROWS` with density ~ (rank + 1)^-skew at uniform numbers in [0, 1)."""
    if skew == 1.0:
        edge = (ROWS + 1.0) ** uniform
    else:
        edge = (1.0 + uniform * ((ROWS + 1.0) ** (1.0 - skew) - 1.0)) ** (1.0 / (1.0 - skew))
    return np.minimum(edge.astype(np.int64) - 1, ROWS - 1)


def mix(numbers: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer, a one-to-one function of 64 bits with random-looking results; int64 to int64."""
    bits = numbers.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


class PowerLawReader:
    """Batches of random samples in place of a reader of files: what one process needs of `terarec.data.BatchReader`."""

    repeat = False

    def __init__(self, steps: int, batch_size: int, skew: float, seed: int) -> None:
        self.steps, self.batch_size, self.skew, self.seed = steps, batch_size, skew, seed
        self.position = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.steps:
            batch = self.batch(self.position)
            self.position += 1
            yield batch

    def batch(self, number: int) -> Batch:
        """Return the batch of this number, always the same."""
        generator = np.random.default_rng((self.seed, number))
        ranks = power_law_ranks(generator.random((FEATURES, self.batch_size)), self.skew)
        keys = mix(ranks + (np.arange(FEATURES)[:, None] << 40))
        dense = generator.standard_normal((self.batch_size, NUM_DENSE), dtype=np.float32)
        logits = dense[:, :1] + 0.5 * np.sign(keys[:4]).sum(axis=0)[:, None]
        labels = generator.random((self.batch_size, 1)) < 1 / (1 + np.exp(-logits))
        return Batch(
            dense=torch.from_numpy(dense),
            label=torch.from_numpy(labels.astype(np.float32)),
            sparse=one_hot(NAMES, torch.from_numpy(keys)),
        )

    def state_dict(self) -> dict[str, int | bool]:
        """Return the number of the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position."""
        self.position = int(str(state["position"]))

    def close(self) -> None:
        """Do nothing: there are no threads."""


class Space(Callback):
    """A callback that prints throughput and space every few steps."""

    def __init__(self, directory: Path, out: TextIO, every: int) -> None:
        self.directory, self.out, self.every = directory, out, every

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self.tables = trainer.model.embedding.tables
        self.start, self.samples = time.perf_counter(), trainer.samples

    def on_step(self, trainer: Trainer) -> None:
        """Print a line if one is due."""
        if trainer.step % self.every:
            return
        seconds, samples = time.perf_counter() - self.start, trainer.samples - self.samples
        held = self.space()
        print(
            f"step {trainer.step:,}: {number_text(samples / seconds)} samples/s, loss {trainer.loss:.4f}, "
            f"{held['touched_rows']:,} rows touched ({byte_text(held['touched_bytes'])}), "
            f"{byte_text(held['file_bytes'])} on disk",
            file=self.out,
            flush=True,
        )
        self.start, self.samples = time.perf_counter(), trainer.samples

    def space(self) -> dict[str, int]:
        """Return the number of touched rows, their bytes including the optimizer state, and the bytes of the files."""
        rows = sum(len(table) for table in self.tables.values())
        return {
            "touched_rows": rows,
            "touched_bytes": sum(len(table) * table.row_bytes for table in self.tables.values()),
            "file_bytes": sum(
                path.stat().st_size for name in NAMES for path in (self.directory / f"{name}.rows").rglob("segment-*")
            ),
        }


def train(directory: Path, steps: int, batch_size: int, host: str, skew: float, seed: int, out: TextIO) -> dict:
    """Train and return the figures. The tables' files are removed with the model."""
    spec = DLRMSpec(
        width=WIDTH,
        bottom=(64, WIDTH),
        top=(128, 64),
        tables=DynamicTablesSpec(tiers=Tiers(host=host, file=str(directory))),
    )
    model = DLRM(spec, DATASET, seed=seed)
    space = Space(directory, out, every=max(1, min(100, steps // 10)))
    optimizers = Optimizers.of(model, AdamSpec(lr=0.001), AdaGradSpec(lr=0.05), seed=seed)
    trainer = Trainer(model, TrainingSpec(batch_size=batch_size, epochs=1, seed=seed), optimizers, callbacks=[space])
    report = trainer.fit(PowerLawReader(steps, batch_size, skew, seed))
    return {
        "logical_bytes": FEATURES * ROWS * WIDTH * 4,
        **space.space(),
        "table_memory_bytes": model.embedding.memory_bytes(),
        "peak_memory_bytes": report.peak_memory_bytes,
        "samples": report.samples,
        "samples_per_second": report.samples_per_second,
        "hit_rate": report.tiers.hit_rate,
        "rows_read": report.tiers.rows_read,
        "rows_written": report.tiers.rows_written,
        "loss": report.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument(
        "--dir", type=Path, help="directory for rows that exceed the host memory (default: a temporary one)"
    )
    parser.add_argument("--host", default="2GiB", help="host memory for rows (default: %(default)s)")
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of the power law (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    arguments = parser.parse_args()
    with ExitStack() as held:
        directory = arguments.dir or Path(held.enter_context(tempfile.TemporaryDirectory()))
        out = sys.stderr if arguments.json else sys.stdout
        figures = train(
            directory, arguments.steps, arguments.batch_size, arguments.host, arguments.skew, arguments.seed, out
        )
        gc.collect()  # the model goes before its directory
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20}{byte_text(value) if name.endswith('_bytes') else number_text(value)}")


if __name__ == "__main__":
    main()
