# SPDX-License-Identifier: Apache-2.0
"""Compare a step of `Trainer` with plain PyTorch, both eager and under ``torch.compile``, and with its limit.

The limit is the sum of two times from the same run: the step's matrix products alone, each by the fastest library or
kernel, and its rows at the bandwidth that ``row_probe.cpp`` measures, read once for the lookup and read and written
once for the update.
"""

import argparse
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO

import torch
from record import Row, append_rows, measure, measure_in_turns
from row_probe import MODIFY, READ, row_visitor
from step_sides import SIDES, WORKLOADS, Workload

from terarec.kernels.rows import allocate_rows
from terarec.ops.linear import linear

PEER = "torch.nn and torch.optim"
COMPILED = "torch.compile"
TITLES = {
    "gemm": "DLRM 26 x 384,615 x 64, batch 8192, SGD",
    "embedding": "MLP 256-128-1 on 100 x 8192 x 16, 10 keys, batch 8192, AdaGrad",
}


class Worker:
    """One side of a workload in a process of its own."""

    def __init__(self, side: str, workload: str, precision: str) -> None:
        script = Path(__file__).with_name("step_sides.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), side, workload, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def step(self) -> float:
        """Return the seconds of one step."""
        commands = self._pipe(self._process.stdin)
        commands.write("step\n")
        commands.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._pipe(self._process.stdin).close()
        self._process.wait()

    def _answer(self) -> str:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"benchmark worker failed: {self._process.args}")
        return line

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def medians(workload: str, precision: str, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of each side, the sides taking turns."""
    workers = {side: Worker(side, workload, precision) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side, worker in workers.items():
            seconds[side].append(worker.step())
    for worker in workers.values():
        worker.close()
    return {side: statistics.median(values) for side, values in seconds.items()}


def seconds_of_rows(workload: Workload, repeats: int) -> float:
    """Return the seconds to read as many random rows as a step does, plus the seconds to read and write them."""
    table = torch.from_numpy(allocate_rows(((1 << 28) // workload.width, workload.width)))
    rows = torch.randperm(table.shape[0])[: workload.row_bytes // (4 * workload.width)]
    visits = {str(access): row_visitor(access, table, rows) for access in (READ, MODIFY)}
    return sum(timing.median for timing in measure_in_turns(visits, repeats).values())


def run(name: str, precision: str, repeats: int) -> list[Row]:
    """Return the rows of one workload, eager and compiled; only a workload larger than the caches has a limit."""
    seconds = medians(name, precision, repeats)
    workload = WORKLOADS[name]
    limit = seconds["floor"] + seconds_of_rows(workload, repeats) if name == "gemm" else None
    return [
        Row(
            case=f"{TITLES[name]}, {precision}{ours}",
            metric="training step",
            value=seconds[f"terarec{side}"] * 1e3,
            unit="ms",
            peer=peer,
            peer_value=seconds[f"plain{side}"] * 1e3,
            limit=None if limit is None else limit * 1e3,
        )
        for side, ours, peer in (("", "", PEER), ("_compiled", f", {COMPILED}", f"{PEER}, {COMPILED}"))
    ]


def gemm_rates(repeats: int = 5) -> Row:
    """Return the rates of a layer of the top MLP in bf16 and fp32: the most that bf16 can gain on this machine."""
    flops = 2 * 8192 * 1024 * 1024
    left, right = torch.randn(8192, 1024), torch.randn(1024, 1024)
    rates = {
        dtype: flops / measure(partial(linear, left.to(dtype), right.to(dtype)), repeats).median / 1e9
        for dtype in (torch.float32, torch.bfloat16)
    }
    return Row(
        case="linear layer, 8192 x 1024 x 1024",
        metric="bf16 rate",
        value=rates[torch.bfloat16],
        unit="GFLOP/s",
        peer="fp32",
        peer_value=rates[torch.float32],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    rates = gemm_rates()
    append_rows("dlrm_step", [rates], dry=options.dry)
    has_bf16 = rates.value > (rates.peer_value or 0.0)
    if not has_bf16:
        print("bf16 steps are left out: the processor has no bf16 unit, and multiplies faster in fp32")
    for name in options.workload:
        precisions = [each for each in options.precision if each == "fp32" or (has_bf16 and name == "gemm")]
        for precision in precisions:
            append_rows("dlrm_step", run(name, precision, options.repeats), dry=options.dry)


if __name__ == "__main__":
    main()
