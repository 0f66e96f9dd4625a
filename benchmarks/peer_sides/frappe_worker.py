# SPDX-License-Identifier: Apache-2.0
"""Run one side of frappe_peers.py: ``python -m peer_sides.frappe_worker <side> <job as JSON>``."""

from __future__ import annotations

import importlib
import json
import sys
import time

import torch
from json_answers import open_answers, serve

from peer_sides.frappe_job import FrappeJob, Side

SIDES = {
    "terarec": ("frappe_own", "Terarec"),
    "fuxictr": ("frappe_fuxictr", "FuxiCTR"),
    "deepctr": ("frappe_deepctr", "DeepCTRTorch"),
}


class Worker:
    """Answers commands about one side."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def train(self, *, seed: int, epochs: int) -> dict[str, float]:
        """Train a model; return its wall time in seconds, and its figures on the test split."""
        start = time.perf_counter()
        self.side.train(seed=seed, epochs=epochs)
        seconds = time.perf_counter() - start
        auc, logloss = self.side.test()
        return {"seconds": seconds, "auc": auc, "logloss": logloss}


def main() -> None:
    answers = open_answers()
    name, described = sys.argv[1:]
    job = FrappeJob(**json.loads(described))
    torch.set_num_threads(job.threads)
    module, kind = SIDES[name]
    side: Side = getattr(importlib.import_module(f"peer_sides.{module}"), kind)(job)
    serve(Worker(side), side.version, answers)


if __name__ == "__main__":
    main()
