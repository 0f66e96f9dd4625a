# SPDX-License-Identifier: Apache-2.0
"""Compare a training step of Wide & Deep and DCN with Keras on TensorFlow; run `make peers` first.

This is the comparison that HugeCTR publishes of itself: two layers of 1024 with dropout, vectors of 16, Adam, the
tables of Criteo's Kaggle data, batches of 512 to 16384. Each side runs in a process of its own, one at a time, in the
interpreter that has its libraries, with the same threads, batches and allocator settings; a step of Keras is one
`tf.function`, compiled by XLA. Before the timing, both must give the same losses from the same weights.

Keras's Adam updates every row of the tables in every step. terarec's mode "global" does exactly that. "lazy_global"
applies all missed updates to a row when a batch next uses it (docs/optimizers.md); "local" never applies them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from json_process import MEMORY_BYTES, PEERS_PYTHON, JsonProcess
from keras_sides.workload import Workload
from record import Row, append_rows

BATCHES = (512, 1024, 2048, 4096, 8192, 16384)
MODES = ("global", "lazy_global", "local")
KERAS = "keras"
# Weights, two moments, and the tensors of the size of a table that Keras allocates in a step; terarec allocates none.
KERAS_COPIES = 6
PYTHONS = {"terarec": Path(sys.executable), KERAS: PEERS_PYTHON}


@dataclass(frozen=True, kw_only=True)
class KerasRow(Row):
    """A row with the fastest steps, the number of steps and the peer's versions; the limit is the products' time."""

    minimum: float
    runs: int
    peer_minimum: float
    peer_runs: int
    peer_version: str


def start(name: str, workload: Workload, mode: str) -> JsonProcess:
    arguments = [name, workload.model, str(workload.most_rows), str(workload.dropout), mode]
    return JsonProcess(PYTHONS[name], "keras_sides.worker", arguments)


def check(model: str) -> None:
    """End the program unless both sides have the same losses over some steps without dropout."""
    workload = Workload(model=model, most_rows=50, dropout=0.0)  # type: ignore[arg-type]
    losses = []
    for name in PYTHONS:
        side = start(name, workload, "global")
        losses.append(side.request("losses", batch=256, steps=8))
        side.close()
    if not all(math.isclose(ours, theirs, rel_tol=1e-3) for ours, theirs in zip(*losses, strict=True)):
        raise SystemExit(f"hugectr_keras: the losses of {model} differ: {losses[0]} and {losses[1]}")


Seconds = dict[tuple[str, int], list[float]]


def time_sides(workload: Workload, options: argparse.Namespace) -> tuple[Seconds, str]:
    """Return the seconds by (mode, batch), also of Keras and of a step's matrix products, and the versions of Keras."""
    seconds: Seconds = defaultdict(list)
    settings = {"budget": options.seconds, "most": options.runs}
    version = ""
    for _ in range(options.rounds):
        for mode in (*options.mode, KERAS):
            side = start(KERAS if mode == KERAS else "terarec", workload, mode)
            for batch in options.batch:
                seconds[mode, batch] += side.request("time", batch=batch, **settings)
                if mode == options.mode[0]:
                    seconds["products", batch] += side.request("products", batch=batch, **settings)
            version = side.version
            side.close()
    return seconds, version


def rows_of(workload: Workload, options: argparse.Namespace) -> Sequence[Row]:
    seconds, version = time_sides(workload, options)
    return [
        KerasRow(
            case=f"{workload.model}, {workload.num_weights / 1e6:.0f} M weights in tables, batch {batch}, {mode}",
            metric="training step",
            unit="ms",
            value=1e3 * statistics.median(seconds[mode, batch]),
            minimum=1e3 * min(seconds[mode, batch]),
            runs=len(seconds[mode, batch]),
            limit=1e3 * statistics.median(seconds["products", batch]),
            peer="Keras",
            peer_version=version,
            peer_value=1e3 * statistics.median(seconds[KERAS, batch]),
            peer_minimum=1e3 * min(seconds[KERAS, batch]),
            peer_runs=len(seconds[KERAS, batch]),
        )
        for batch, mode in product(options.batch, options.mode)
    ]


def most_rows_that_fit(model: str) -> int:
    """Return the published sizes if Keras can hold them in 0.7 of the memory, else smaller largest tables."""
    most = max(Workload(model=model, most_rows=sys.maxsize).slot_rows)  # type: ignore[arg-type]
    while KERAS_COPIES * 4 * Workload(model=model, most_rows=most).num_weights > 0.7 * MEMORY_BYTES:  # type: ignore[arg-type]
        most = most * 9 // 10
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=("wdl", "dcn"), default=["wdl", "dcn"])
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--most-rows", type=int, help="most rows of a table; larger ones are cut (default: what fits in memory)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds after which a turn of a figure ends, if not after --runs"
    )
    parser.add_argument("--runs", type=int, default=20, help="most steps of a turn")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    for model in options.model:
        check(model)
        workload = Workload(model=model, most_rows=options.most_rows or most_rows_that_fit(model))
        append_rows("hugectr_keras", rows_of(workload, options), dry=options.dry)


if __name__ == "__main__":
    main()
