# SPDX-License-Identifier: Apache-2.0
"""RecBole's side of accuracy_recbole.py: ``python -m peer_sides.recbole_worker <folder>`` with its files of ratings."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from json_answers import open_answers, serve
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_seed

NAME = "ratings"
METRICS = {"hit": "hr", "ndcg": "ndcg", "recall": "recall", "precision": "precision"}
"""RecBole's name of a metric -> its name in a recipe's figures."""


class RecBole:
    """Trains RecBole's models with its own loaders, samplers and trainer, and measures them with its own evaluation."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def train(self, *, model: str, seed: int, settings: Mapping[str, object]) -> dict[str, float]:
        """Train a model on ``train`` for all epochs; return its seconds, and the figures of the first 10 on ``test``.

        Args:
            model: RecBole's name of it.
            seed: Seed of all that is random.
            settings: Options of RecBole.
        """
        config = Config(model=model, dataset=NAME, config_dict={**self._fixed(seed), **settings})
        init_seed(seed, reproducibility=True)
        logging.getLogger().setLevel(logging.ERROR)
        train, _, test = data_preparation(config, create_dataset(config))
        init_seed(seed, reproducibility=True)
        trained = get_model(model)(config, train.dataset).to(config["device"])
        trainer = get_trainer(config["MODEL_TYPE"], model)(config, trained)
        start = time.perf_counter()
        # Without a validation split: all epochs, and the weights after the last one.
        trainer.fit(train, saved=False, show_progress=False, verbose=False)
        seconds = time.perf_counter() - start
        found = trainer.evaluate(test, load_best_model=False, show_progress=False)
        return {"seconds": seconds, **{ours: float(found[f"{theirs}@10"]) for theirs, ours in METRICS.items()}}

    def _fixed(self, seed: int) -> dict[str, object]:
        return {
            "data_path": str(Path(self.folder).parent),
            # Files in place of a split; the validation is never read.
            "benchmark_filename": ["train", "valid", "test"],
            "load_col": {"inter": ["user_id", "item_id"]},
            "eval_args": {"mode": "full", "order": "RO", "group_by": "user", "split": {"RS": [8, 1, 1]}},
            "metrics": list(METRICS),
            "topk": [10],
            "valid_metric": "NDCG@10",
            "metric_decimal_place": 6,
            "seed": seed,
            "use_gpu": False,
            "state": "ERROR",
            "checkpoint_dir": str(Path(self.folder) / "saved"),
        }


def main() -> None:
    answers = open_answers()
    torch.set_num_threads(1)
    folder = sys.argv.pop()  # RecBole reads the rest
    os.chdir(folder)  # it writes logs where it runs
    serve(RecBole(folder), f"RecBole {version('recbole')}, torch {torch.__version__}", answers)


if __name__ == "__main__":
    main()
