# SPDX-License-Identifier: Apache-2.0
"""Compare lookup and row update with FBGEMM, torch and TensorFlow: `make peers`, then ``python benchmarks/peers.py``.

Every side runs in a process of its own, in the interpreter that has its libraries, on the same keys, threads and
allocator settings. Sides take turns; if their tables exceed the memory, each is started again for its turn. Before a
peer is timed, its results must equal terarec's. All runs time the same batch, so a small batch is in the caches for
every side. The limit of a forward pass is the time in which the probe of ``row_probe.cpp`` reads the same rows of
terarec's tables, right after terarec's turn. The limit of a step adds two times: reading and writing each distinct row
once, and reading the gradient while a result is written. Options select parts, and ``--resume`` continues an
interrupted run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from peer_processes import OURS, SIDES, Turns
from peer_sides.cell import Shape
from record import Row, append_rows, rows_of_this_commit

SHAPES = {
    "wide": Shape(tables=26, rows=1_000_000, width=128, hotness=1),
    "many16": Shape(tables=100, rows=8192, width=16, hotness=10),
    "many64": Shape(tables=100, rows=8192, width=64, hotness=10),
}
CHECKED = Shape(tables=3, rows=50, width=16, hotness=3)
BATCHES = (64, 1024, 8192, 16384)
KEYS = ("uniform", "zipf")
LIMITS = {"forward": ("read",), "step": ("read", "modify", "stream")}
PEERS = [name for name in SIDES if name != OURS]


@dataclass(frozen=True)
class Cell:
    """A timed case of a shape and rule."""

    shape: Shape
    rule: str
    batch: int
    keys: str
    what: str  # "forward" or "step"

    @property
    def case(self) -> str:
        """Case in the results."""
        return f"{self.shape.name}, batch {self.batch}, {self.keys}"

    @property
    def metric(self) -> str:
        """Metric in the results."""
        return "forward" if self.what == "forward" else f"forward, backward and {self.rule} update"


@dataclass(frozen=True, kw_only=True)
class PeerRow(Row):
    """A row with the best runs, the number of runs, the peer's versions and the rate at which the probe read rows."""

    minimum: float
    runs: int
    peer_minimum: float | None
    peer_runs: int
    peer_version: str
    gather_gb_s: float


@cache
def check(peer: str, rule: str) -> None:
    """Exit unless both sides give the same vectors and, after two steps, the same tables."""
    sides = Turns((OURS, peer), rule, CHECKED)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}.npz" for name in sides.names]
        for name, path in zip(sides.names, paths, strict=True):
            sides[name].request("check", batch=64, keys="zipf", steps=2, path=path)
        sides.close()
        ours, theirs = (np.load(path) for path in paths)
        for what in ("pooled", "tables"):
            if not np.allclose(ours[what], theirs[what], rtol=1e-4, atol=1e-5):
                worst = np.abs(ours[what] - theirs[what]).max()
                raise SystemExit(f"peers: {what} of {OURS} and {peer} differ by {worst} under {rule}")


Seconds = Mapping[tuple[Cell, str], Sequence[float]]
"""Seconds of all runs by the name of a side or of an access of the probe."""


def in_turns(sides: Turns, cells: Sequence[Cell], options: argparse.Namespace) -> Seconds:
    """Time the cells on all sides, in turns."""
    seconds: dict[tuple[Cell, str], list[float]] = defaultdict(list)
    for _, side, cell in product(range(options.rounds), sides.names, cells):
        settings = {"batch": cell.batch, "keys": cell.keys, "least": options.least, "most": options.runs}
        seconds[cell, side] += sides[side].request("time", what=cell.what, budget=options.seconds, **settings)
        for visit in LIMITS[cell.what] if side == OURS else ():
            seconds[cell, visit] += sides[side].request("time", what=visit, budget=options.seconds / 4, **settings)
    return seconds


def compare(cells: Sequence[Cell], peers: Sequence[str], options: argparse.Namespace) -> Iterator[PeerRow]:
    """Yield the rows of cells of one shape and rule. Peers that exceed the memory are not run; see `needed_bytes`."""
    shape, rule = cells[0].shape, cells[0].rule
    fitting = [peer for peer in peers if SIDES[peer].fits(rule, shape)]
    for peer in fitting:
        check(peer, rule)
    sides = Turns((OURS, *fitting), rule, shape)
    for part in [[cell] for cell in cells] if sides.fit_together else [cells]:
        seconds = in_turns(sides, part, options)
        yield from (row_of(cell, peer, seconds, sides.versions) for cell in part for peer in peers)
    sides.close()


def row_of(cell: Cell, peer: str, seconds: Seconds, versions: Mapping[str, str]) -> PeerRow:
    """Return the row of one cell and peer."""
    title = SIDES[peer].title
    if peer not in versions:
        gib = SIDES[peer].needed_bytes(cell.rule, cell.shape) / 2**30
        title += f": not run, its tables and dense gradients need {gib:.1f} GiB"
    return PeerRow(
        case=cell.case,
        metric=cell.metric,
        unit="ms",
        peer=title,
        peer_version=versions.get(peer, ""),
        **_times(seconds[cell, OURS], seconds.get((cell, peer), ())),
        **_limits(cell, seconds),
    )


def _times(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "value": 1e3 * statistics.median(ours),
        "minimum": 1e3 * min(ours),
        "runs": len(ours),
        "peer_value": 1e3 * statistics.median(theirs) if theirs else None,
        "peer_minimum": 1e3 * min(theirs) if theirs else None,
        "peer_runs": len(theirs),
    }


def _limits(cell: Cell, seconds: Seconds) -> dict[str, float]:
    medians = {visit: statistics.median(seconds[cell, visit]) for visit in LIMITS[cell.what]}
    shape = cell.shape
    row_bytes = 4 * shape.tables * cell.batch * shape.hotness * shape.width
    return {"limit": 1e3 * sum(medians.values()), "gather_gb_s": row_bytes / medians["read"] / 1e9}


Timed = set[tuple[str, str, str]]
"""Case, metric and peer."""


def timed_before() -> Timed:
    """Return the (case, metric, peer) of which this commit has rows."""
    return {(row["case"], row["metric"], row["peer"].split(":")[0]) for row in rows_of_this_commit("peers")}


def timed_of(cell: Cell, peers: Sequence[str]) -> Timed:
    """Return the (case, metric, peer) of a cell's rows."""
    return {(cell.case, cell.metric, SIDES[peer].title) for peer in peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rule", nargs="+", choices=list(SIDES[OURS].copies), default=list(SIDES[OURS].copies))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--keys", nargs="+", choices=KEYS, default=list(KEYS))
    parser.add_argument("--what", nargs="+", choices=("forward", "step"), default=["forward", "step"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="seconds after which a turn ends, if not after --runs"
    )
    parser.add_argument("--least", type=int, default=2, help="least runs of a turn")
    parser.add_argument("--runs", type=int, default=20, help="most runs of a turn")
    parser.add_argument("--resume", action="store_true", help="skip cells of which this commit has rows")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    timed = timed_before() if options.resume else set()
    for name, rule in product(options.shape, options.rule):
        shape, peers = SHAPES[name], [peer for peer in options.peer if rule in SIDES[peer].copies]
        if not SIDES[OURS].fits(rule, shape):
            print(f"{shape.name}, {rule}: not run, the weights and their state alone exceed the memory")
            continue
        cells = [Cell(shape, rule, *of) for of in product(options.batch, options.keys, options.what)]
        cells = [cell for cell in cells if timed_of(cell, peers) - timed]  # forward passes do not depend on the rule
        timed.update(*(timed_of(cell, peers) for cell in cells))
        if cells:
            append_rows("peers", compare(cells, peers, options), dry=options.dry)


if __name__ == "__main__":
    main()
