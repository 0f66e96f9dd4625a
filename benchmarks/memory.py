# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of training steps: the growth of the process from before the tables exist to the peak.

The limit of a row is the memory that the tables must take (weights, optimizer state, and the index of dynamic ones)
plus twice the vectors of the batch's keys: for one key per bag, the pooled vectors and their gradient. Each case runs
in a process of its own.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from peer_sides.cell import Inputs, Shape, draw
from record import Row, append_rows

if TYPE_CHECKING:
    from peer_sides.terarec_tables import Tables

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tables, their optimizer and a batch."""

    shape: Shape
    rule: str
    batch: int
    keys: str
    is_dynamic: bool = False

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors of all keys of the batch."""
        return 4 * self.shape.tables * self.batch * self.shape.hotness * self.shape.width


WIDE = Shape(tables=26, rows=200_000, width=128, hotness=1)
MANY = Shape(tables=100, rows=8192, width=16, hotness=10)
CASES = (
    Case(shape=WIDE, rule="sgd", batch=16384, keys="uniform"),
    Case(shape=WIDE, rule="rowwise_adagrad", batch=16384, keys="zipf"),
    Case(shape=WIDE, rule="adagrad", batch=16384, keys="uniform"),
    Case(shape=MANY, rule="adagrad", batch=8192, keys="zipf"),
    Case(shape=WIDE, rule="sgd", batch=16384, keys="uniform", is_dynamic=True),
    Case(shape=MANY, rule="adagrad", batch=8192, keys="zipf", is_dynamic=True),
)


def grown_bytes(case: Case) -> tuple[int, int]:
    """Return the growth of this process at its peak, and the bytes of weights, state and index."""
    import torch
    from peer_sides.terarec_tables import Tables, names_of

    from terarec.batch import one_hot

    tiny = Shape(tables=2, rows=10, width=case.shape.width, hotness=1)
    warm = Tables(tiny, case.rule, is_dynamic=case.is_dynamic)
    run_steps(warm, draw(tiny, 2, "uniform"))  # does the one-time initialization of the process
    inputs = draw(case.shape, case.batch, case.keys)
    names = names_of(case.shape)
    samples = min(case.batch, case.shape.rows)
    first_batches = one_hot(names, torch.zeros(len(names), samples, dtype=torch.int64))
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    tables = Tables(case.shape, case.rule, is_dynamic=case.is_dynamic)
    if case.is_dynamic:
        tables.meet_all(first_batches)
    run_steps(tables, replace(inputs, grad=inputs.grad.copy()))
    return _status_bytes("VmHWM") - before, tables.collection.memory_bytes()


def run_steps(tables: Tables, inputs: Inputs) -> None:
    tables.prepare(inputs)
    for _ in range(STEPS):
        tables.step()


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def main() -> None:
    fresh = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with fresh as pool:
        for case, (grown, held) in zip(CASES, pool.map(grown_bytes, CASES), strict=True):
            name = f"{case.shape.name}, batch {case.batch}, {case.keys}, {case.rule}{', dynamic' * case.is_dynamic}"
            limit = (held + 2 * case.vector_bytes) / 2**20
            append_rows("memory", [Row(case=name, metric="peak", value=grown / 2**20, unit="MiB", limit=limit)])


if __name__ == "__main__":
    main()
