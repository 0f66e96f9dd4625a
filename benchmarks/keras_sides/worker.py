# SPDX-License-Identifier: Apache-2.0
"""Run one side for `json_process`: ``python -m keras_sides.worker SIDE MODEL MOST_ROWS DROPOUT MODE``."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable

from json_answers import open_answers, serve

from keras_sides.workload import Side, Workload, draw, initial_weights

SIDES = {"terarec": ("graph_model", "Graph"), "keras": ("keras_model", "KerasModel")}
_NUM_BATCHES = 6


class Worker:
    """Answers commands about one side."""

    def __init__(self, side: Side, workload: Workload) -> None:
        self.side, self.workload = side, workload
        self.batch = 0

    def time(self, *, batch: int, budget: float, most: int) -> list[float]:
        """Return the seconds of each step after a warm-up: at least two, until `budget` seconds or `most` steps."""
        if self.batch != batch:
            self.side.prepare(draw(self.workload, batch, _NUM_BATCHES))
            self.batch = batch
            float(self.side.step(0))
        numbers = itertools.cycle(range(_NUM_BATCHES))
        return _timed(lambda: float(self.side.step(next(numbers))), budget, most)

    def products(self, *, batch: int, budget: float, most: int) -> list[float]:
        """Return the seconds of the matrix products alone, as `time` does; only terarec's side has them."""
        run = self.side.products(batch)  # type: ignore[attr-defined]
        run()
        return _timed(run, budget, most)

    def losses(self, *, batch: int, steps: int) -> list[float]:
        """Return the loss of each of the first steps, from initial weights that depend only on the workload."""
        self.side.load(initial_weights(self.workload))
        self.side.prepare(draw(self.workload, batch, _NUM_BATCHES))
        return [float(self.side.step(number % _NUM_BATCHES)) for number in range(steps)]


def _timed(run: Callable[[], object], budget: float, most: int) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < 2 or (sum(seconds) < budget and len(seconds) < most):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    answers = open_answers()
    name, model, most_rows, dropout, mode = sys.argv[1:]
    workload = Workload(model=model, most_rows=int(most_rows), dropout=float(dropout))  # type: ignore[arg-type]
    module, kind = SIDES[name]
    side = getattr(importlib.import_module(f"keras_sides.{module}"), kind)(workload, mode)
    serve(Worker(side, workload), side.version, answers)


if __name__ == "__main__":
    main()
