# SPDX-License-Identifier: Apache-2.0
"""A training that saves bases and deltas until it is killed, and goes on from the newest checkpoint."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from terarec.batch import one_hot
from terarec.checkpoint import TrainState, complete_checkpoints, follow_changes, latest, load, save
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, TableSpec, Tiers, lru

NUM_KEYS, KEYS_A_STEP = 3000, 60
TABLES = [
    TableSpec(name="fixed", rows=NUM_KEYS, width=8),
    DynamicTableSpec(name="growing", width=8, max_rows=700, evict=lru()),
]
FEATURES = [FeatureSpec(name="f", table="fixed"), FeatureSpec(name="g", table="growing")]
BASE_EVERY, DELTA_EVERY = 12, 2


class KilledTraining:
    """Two tables and their optimizer, in memory or in files below a directory."""

    def __init__(self, files: Path | None) -> None:
        tiers = None if files is None else Tiers(host="40KiB", file=str(files))
        self.embedding = EmbeddingCollection([replace(table, tiers=tiers) for table in TABLES], FEATURES, seed=1)
        self.optimizer = RowOptimizer(self.embedding, AdamSpec(lr=0.05))
        self.step = 0

    def train(self, until: int) -> None:
        """Do the steps up to number `until`."""
        while self.step < until:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            keys = torch.randint(0, NUM_KEYS, (2, KEYS_A_STEP), generator=generator)
            self.embedding(one_hot(["f", "g"], keys)).pooled.square().sum().backward()
            self.optimizer.step()

    def load(self, path: Path) -> None:
        """Take over a checkpoint."""
        opened = load(path)
        opened.load_tables(self.embedding.tables, with_state=True)
        self.optimizer.load_step_state(opened.progress["rows"])
        self.step = opened.step

    def save(self, directory: Path) -> None:
        """Save a base or a delta."""
        state = TrainState(
            step=self.step,
            dense={},
            tables=self.embedding.tables,
            optimizer={"state": {}, "param_groups": []},
            rng=torch.get_rng_state(),
            progress={"rows": self.optimizer.step_state()},
        )
        save(directory, state, keep=2, kind="delta" if self.step % BASE_EVERY else "base")


def main(directory: Path) -> None:
    """Train for ever, and tell of each checkpoint."""
    torch.set_num_threads(1)
    training = KilledTraining(directory / "files")
    if complete_checkpoints(directory / "run"):
        newest = latest(directory / "run")
        training.load(newest)
        follow_changes(training.embedding.tables, newest)
    while True:
        training.train(training.step + DELTA_EVERY)
        training.save(directory / "run")
        print(training.step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
