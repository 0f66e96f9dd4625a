# SPDX-License-Identifier: Apache-2.0
"""Run one side of a comparison: ``python -m peer_sides.worker <side> <rule> <tables> <rows> <width> <hotness>``.

It prints one JSON line with the versions when its tables are ready, then answers each JSON line with one line.
"""

from __future__ import annotations

import importlib
import sys
import time

import numpy as np
from json_answers import open_answers, serve

from peer_sides.cell import Shape, Side, draw

SIDES = {
    "terarec": ("terarec_tables", "Tables"),
    "torch-sparse": ("torch_bags", "SparseBags"),
    "torch-dense": ("torch_bags", "DenseBags"),
    "fbgemm": ("fbgemm", "TableBatched"),
    "tensorflow": ("tensorflow", "SparseLookups"),
}
_SLOW_SECONDS = 0.5  # runs of at least this time need no warm-up run in every turn


class Worker:
    """Answers commands about one side."""

    def __init__(self, side: Side, shape: Shape) -> None:
        self.side = side
        self.shape = shape
        self.batch: tuple[int, str] | None = None
        self.last_seconds: dict[tuple[int, str, str], float] = {}

    def time(self, *, batch: int, keys: str, what: str, budget: float, least: int, most: int) -> list[float]:
        """Return the seconds of runs of "forward" or "step": `least` or more, until `budget` seconds or `most` runs."""
        if self.batch != (batch, keys):
            self.side.prepare(draw(self.shape, batch, keys))
            self.batch = (batch, keys)
        run = getattr(self.side, what)
        if self.last_seconds.get((batch, keys, what), 0.0) < _SLOW_SECONDS:
            run()
        seconds: list[float] = []
        while len(seconds) < least or (sum(seconds) < budget and len(seconds) < most):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        self.last_seconds[batch, keys, what] = seconds[-1]
        return seconds

    def check(self, *, batch: int, keys: str, steps: int, path: str) -> str:
        """Write the pooled vectors, and the tables after some steps, from weights that depend only on the shape."""
        shape = self.shape
        first = np.random.default_rng(1).standard_normal((shape.tables, shape.rows, shape.width), dtype=np.float32)
        self.side.load(first)
        self.side.prepare(draw(shape, batch, keys))
        pooled = self.side.pooled().copy()
        for _ in range(steps):
            self.side.step()
        np.savez(path, pooled=pooled, tables=self.side.tables())
        return path


def main() -> None:
    answers = open_answers()
    side_name, rule, *numbers = sys.argv[1:]
    tables, rows, width, hotness = map(int, numbers)
    shape = Shape(tables=tables, rows=rows, width=width, hotness=hotness)
    module, name = SIDES[side_name]
    side = getattr(importlib.import_module(f"peer_sides.{module}"), name)(shape, rule)
    serve(Worker(side, shape), side.version, answers)


if __name__ == "__main__":
    main()
