"""Lookup and row update against FBGEMM, torch and TensorFlow: `make peers`, then ``python benchmarks/peers.py``.

Every side runs in a process of its own, in the interpreter that has its libraries, on the same keys, threads and
allocator settings. Sides take turns; where two sides' tables exceed the memory, each is started anew for its turn.
Before a peer is timed it must compute what terarec computes. The limit of a forward pass is the time in which the
probe of ``row_probe.cpp`` reads the same rows of terarec's tables, right after terarec's turn; that of a step is this
and the times of reading and writing each distinct row once and of reading the gradient while the result is written. A
whole run takes most of an hour: options choose parts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from peer_processes import OURS, SIDES, Turns
from peer_sides.cell import Shape
from record import Row, append_rows

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
    """What is timed of a shape and rule."""

    batch: int
    keys: str
    what: str  # "forward" or "step"


@dataclass(frozen=True, kw_only=True)
class PeerRow(Row):
    """A row with the best runs, the number of runs, the peer's versions and the machine's random-row bandwidth."""

    minimum: float
    runs: int
    peer_minimum: float | None
    peer_runs: int
    peer_version: str
    gather_gb_s: float


def check(peer: str, rule: str) -> None:
    """End the program unless both sides give the same vectors and, after two steps, the same tables."""
    sides = Turns(peer, rule, CHECKED)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}.npz" for name in sides.names]
        for name, path in zip(sides.names, paths, strict=True):
            sides[name].ask("check", batch=64, keys="zipf", steps=2, path=path)
        sides.close()
        ours, theirs = (np.load(path) for path in paths)
        for what in ("pooled", "tables"):
            if not np.allclose(ours[what], theirs[what], rtol=1e-4, atol=1e-5):
                worst = np.abs(ours[what] - theirs[what]).max()
                raise SystemExit(f"peers: {what} of {OURS} and {peer} differ by {worst} under {rule}")


def in_turns(sides: Turns, cells: Sequence[Cell], rounds: int) -> Iterator[tuple[Cell, str]]:
    """Who times what, in order: sides alternate as often as starting them allows."""
    if sides.fit_together:
        yield from ((cell, side) for cell in cells for _ in range(rounds) for side in sides.names)
    else:
        yield from ((cell, side) for _ in range(max(1, rounds // 2)) for side in sides.names for cell in cells)


def compare(peer: str, rule: str, shape: Shape, cells: Sequence[Cell], options: argparse.Namespace) -> list[PeerRow]:
    """The rows of one peer, rule and shape. A peer that cannot be held is not run; its row says what it needs."""
    fits = SIDES[peer].fits(rule, shape)
    if fits:
        check(peer, rule)
    sides = Turns(peer, rule, shape)
    seconds: dict[tuple[Cell, str], list[float]] = defaultdict(list)
    for cell, side in in_turns(sides, cells, options.rounds):
        if side == OURS or fits:
            asked = {"batch": cell.batch, "keys": cell.keys, "what": cell.what}
            seconds[cell, side] += sides[side].ask("time", **asked, budget=options.seconds, most=options.runs)
        if side == OURS:
            for visit in LIMITS[cell.what]:
                asked = {"batch": cell.batch, "keys": cell.keys, "what": visit}
                seconds[cell, visit] += sides[side].ask("time", **asked, budget=options.seconds / 4, most=options.runs)
    sides.close()
    peer_row = {"peer_version": sides.versions.get(peer, ""), "peer": SIDES[peer].title}
    if not fits:
        gib = SIDES[peer].needed_bytes(rule, shape) / 2**30
        peer_row["peer"] += f": not run, its tables and dense gradients need {gib:.1f} GiB"
    return [
        PeerRow(
            case=f"{shape.name}, batch {cell.batch}, {cell.keys}",
            metric="forward" if cell.what == "forward" else f"forward, backward and {rule} update",
            unit="ms",
            **peer_row,
            **_times(seconds[cell, OURS], seconds[cell, peer]),
            **_limits(cell, shape, seconds),
        )
        for cell in cells
    ]


def _times(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "value": 1e3 * statistics.median(ours),
        "minimum": 1e3 * min(ours),
        "runs": len(ours),
        "peer_value": 1e3 * statistics.median(theirs) if theirs else None,
        "peer_minimum": 1e3 * min(theirs) if theirs else None,
        "peer_runs": len(theirs),
    }


def _limits(cell: Cell, shape: Shape, seconds: Mapping[tuple[Cell, str], list[float]]) -> dict[str, float]:
    medians = {visit: statistics.median(seconds[cell, visit]) for visit in LIMITS[cell.what]}
    row_bytes = 4 * shape.tables * cell.batch * shape.hotness * shape.width
    return {"limit": 1e3 * sum(medians.values()), "gather_gb_s": row_bytes / medians["read"] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rule", nargs="+", choices=list(SIDES[OURS].copies), default=list(SIDES[OURS].copies))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--keys", nargs="+", choices=KEYS, default=list(KEYS))
    parser.add_argument("--what", nargs="+", choices=("forward", "step"), default=["forward", "step"])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side; half as many where memory is short")
    parser.add_argument("--seconds", type=float, default=0.4, help="a turn ends after this time, or after --runs")
    parser.add_argument("--runs", type=int, default=20, help="of a turn at most")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    cells = [Cell(*parts) for parts in product(options.batch, options.keys, options.what)]
    for shape, peer, rule in product(options.shape, options.peer, options.rule):
        if rule not in SIDES[peer].copies:
            continue
        if SIDES[OURS].fits(rule, SHAPES[shape]):
            append_rows("peers", compare(peer, rule, SHAPES[shape], cells, options), dry=options.dry)
        else:
            print(f"{SHAPES[shape].name}, {rule}: not run, the weights and their state alone exceed the memory")


if __name__ == "__main__":
    main()
