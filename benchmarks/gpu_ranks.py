# SPDX-License-Identifier: Apache-2.0
"""DLRM on all GPUs of this machine and on fewer of them: time, phases and bytes of a step, by strong and weak scaling.

``gpu.py --parts ranks`` starts a worker on each GPU by torchrun, and prints the rows. It has not run on several GPUs
yet. With ``--interpret`` two workers step on the CPU at a tiny size.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # terarec need not be installed

import torch  # noqa: E402
from record import Row  # noqa: E402
from step_sides import Workload, batches, terarec_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import binary_cross_entropy_with_logits  # noqa: E402

from terarec.batch import Batch, slice_samples  # noqa: E402
from terarec.dist import Ranks, RowWise, join, same_for_all, shard, sum_gradients  # noqa: E402
from terarec.embedding import EmbeddingCollection  # noqa: E402
from terarec.embedding.tables import record_tables  # noqa: E402
from terarec.kernels.environment import launch  # noqa: E402
from terarec.spec import SGDSpec, TrainingSpec  # noqa: E402
from terarec.train import Optimizers, Trainer  # noqa: E402
from terarec.train.devices import select_device  # noqa: E402

ROWS, WIDTH = 1_500_000, 128
WARM_UP, STEPS = 3, 20
_SECONDS = 300.0
_INTERPRETS = ("TRITON_INTERPRET", "TERAREC_KERNELS")


def figures(device: torch.device, batch: int) -> Iterator[Row]:
    """Yield the rows of 1, 2, 4, ... ranks; the batch is that of all (strong scaling), then of each (weak scaling)."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    rows = ROWS if device.type == "cuda" else 50
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= count]
    for is_weak in (False, True):
        first: float | None = None
        for size in sizes:
            whole = batch * size if is_weak else batch
            measured = _measured(size, device.type, rows, whole)
            step = measured["milliseconds"]["step"]
            first = step if first is None else first
            case = f"DLRM 26 x {rows:,} x {WIDTH} by row, {'weak' if is_weak else 'strong'} scaling, batch {whole:,}"
            case += f", {size} rank{'s' * (size > 1)}"
            limit = first if is_weak else first / size
            for phase, milliseconds in measured["milliseconds"].items():
                of_phase = limit if phase == "step" else None
                yield Row(case=case, metric=f"time of {phase}", value=milliseconds, unit="ms", limit=of_phase)
            for what, sent in measured["bytes"].items():
                yield Row(case=case, metric=f"bytes that a rank sends: {what}", value=sent / 2**20, unit="MiB")


def _measured(size: int, device: str, rows: int, batch: int) -> dict[str, dict[str, float]]:
    """Return what the workers of one start measure."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    worker = [__file__, "--device", device, "--rows", str(rows), "--batch", str(batch)]
    # Not interpreted: on the CPU its own kernels show as well that the workers run.
    environment = {name: value for name, value in os.environ.items() if name not in _INTERPRETS}
    ended = subprocess.run(
        [*torchrun, *worker], env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{size} ranks: {ended.stderr[-2000:]}")
    result: dict[str, dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return result


def work(name: str, rows: int, batch: int) -> None:
    """Train on this rank; rank 0 prints milliseconds by phase and bytes by collective."""
    device = select_device(name, launch())
    ranks = join(device=device)
    workload = Workload(
        features=26, rows=rows, width=WIDTH, hotness=1, bottom=(512, 256, WIDTH), top=(1024, 1024, 512, 256),
        batch=batch, optimizer="sgd",
    )  # fmt: skip
    with record_tables() if ranks.size > 1 else nullcontext():
        model = terarec_model(workload)
    if ranks.size > 1:
        specs = [s for module in model.modules() if isinstance(module, EmbeddingCollection) for s in module.specs]
        shard(model, same_for_all(specs, RowWise(), ranks.size), ranks)
    model.to(device)
    spec = TrainingSpec(precision="bf16" if device.type == "cuda" else "fp32")
    optimizers = Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1))
    trainer = Trainer(model, spec, optimizers, ranks=ranks, check_loss=False)
    share = ranks.share(batch)
    own = [slice_samples(each, share.start, share.stop).to(device) for each in batches(workload)]

    def step(number: int) -> None:
        following = own[(number + 1) % len(own)]
        trainer.train_step(own[number % len(own)], following=following, totals=[batch])

    milliseconds = {"step": _timed(step, ranks, device, before=WARM_UP) / STEPS}
    sent = Counter(ranks.sent_bytes)
    step(WARM_UP + STEPS)
    sent = ranks.sent_bytes - sent
    milliseconds |= _phases(model, optimizers, ranks, own[0], batch, device)
    if ranks.is_first:
        print(json.dumps({"milliseconds": milliseconds, "bytes": {what: sent[what] for what in sorted(sent)}}))
    ranks.close()


def _timed(step: Callable[[int], None], ranks: Ranks, device: torch.device, *, before: int) -> float:
    """Return the milliseconds of the steps of the slowest rank."""
    for number in range(before):
        step(number)
    _finish(device)
    ranks.barrier("begin")
    begin = time.perf_counter()
    for number in range(STEPS):
        step(before + number)
    _finish(device)
    spent = torch.tensor([1e3 * (time.perf_counter() - begin)], dtype=torch.float64)
    return float(ranks.all_reduce_("time of steps", spent, "max"))


def _phases(
    model: nn.Module, optimizers: Optimizers, ranks: Ranks, batch: Batch, size: int, device: torch.device
) -> dict[str, float]:
    """Return the milliseconds of the phases of a step, each of which is waited for: their sum exceeds a step."""
    spent = dict.fromkeys(("forward pass with keys and vectors", "backward pass", "sum over ranks", "update"), 0.0)
    parameters = list(model.parameters())
    for _ in range(WARM_UP):
        marks = [_finish(device)]
        losses = binary_cross_entropy_with_logits(model(batch), batch.label, reduction="sum")
        marks.append(_finish(device))
        optimizers.zero_grad()
        (losses / size).backward()
        marks.append(_finish(device))
        sum_gradients(ranks, parameters)
        marks.append(_finish(device))
        for optimizer in optimizers:
            optimizer.step()
        marks.append(_finish(device))
        # The last time counts: the others warm up.
        spent = {name: 1e3 * (stop - first) for name, first, stop in zip(spent, marks, marks[1:], strict=False)}
    return spent


def _finish(device: torch.device) -> float:
    """Wait for the device and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    work(options.device, options.rows, options.batch)
