# SPDX-License-Identifier: Apache-2.0
"""DLRM and DLRM-DCNv2 on all GPUs of this machine and on fewer of them: time, phases and bytes of a step.

``gpu.py --parts ranks`` starts a worker on each GPU by torchrun, and prints the rows, of strong and weak scaling, next
to what one rank's work and the probed links give. It has not run on several GPUs yet. With ``--interpret`` two workers
step on the CPU at a tiny size, with ``--simulated`` on the device of `tests.simulated_device`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # terarec need not be installed

import torch  # noqa: E402
from record import Row  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import binary_cross_entropy_with_logits  # noqa: E402

from terarec.apps.sharding import probe_links  # noqa: E402
from terarec.batch import Batch, Jagged  # noqa: E402
from terarec.dist import Ranks, RowWise, join, same_for_all, shard, sum_gradients  # noqa: E402
from terarec.dist.costs import MachineCosts  # noqa: E402
from terarec.embedding import EmbeddingCollection  # noqa: E402
from terarec.embedding.tables import record_tables  # noqa: E402
from terarec.kernels.environment import launch  # noqa: E402
from terarec.models import build_model  # noqa: E402
from terarec.spec import (  # noqa: E402
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMDCNV2Spec,
    DLRMSpec,
    LabelColumn,
    SGDSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer  # noqa: E402
from terarec.train.devices import select_device  # noqa: E402

WIDTH = 128
WARM_UP, STEPS = 3, 20
_STEPS_TO_TRY = 2  # where no figure counts
_SECONDS = 300.0
_PROBE_SECONDS = 2.0
_OF_A_GPU = 0.5  # share of its memory that tables take where they are as large as the memory of all
_INTERPRETS = ("TRITON_INTERPRET", "TERAREC_KERNELS")
# MLPerf's DLRM-DCNv2: rows of Criteo's columns, at most 40 M, and the keys of a sample that its data draw.
_MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
_MLPERF_HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the keys of a sample.

    Attributes:
        name: Name of the model.
        rows: Rows of each table.
        hotness: Keys of a sample in each.
        crosses: Whether the model is DLRM-DCNv2, and not DLRM.
    """

    name: str
    rows: tuple[int, ...]
    hotness: tuple[int, ...]
    crosses: bool = False

    def described(self) -> str:
        """Return the shape as a part of the name of a case."""
        keys = sum(self.hotness) / len(self.hotness)
        return (
            f"{self.name}, {len(self.rows)} tables, {sum(self.rows) / 1e6:.4g} M x {WIDTH} by row, {keys:.3g} keys each"
        )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Steps of one shape on 1, 2, 4, ... ranks.

    Attributes:
        name: Name of the case.
        shape: Function that returns the shape for a number of ranks.
        is_weak: Whether the batch is that of each rank, and not of all.
        device: Type of the devices, or the library of the simulated one.
        batch: Samples.
        sizes: Numbers of ranks.
    """

    name: str
    shape: Callable[[int], Shape]
    is_weak: bool
    device: str
    batch: int
    sizes: Sequence[int]

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all numbers of ranks."""
        first: float | None = None
        for size in self.sizes:
            shape, whole = self.shape(size), self.batch * size if self.is_weak else self.batch
            measured = _measured(size, self.device, shape, whole)
            step = measured["milliseconds"]["step"]
            first = step if first is None else first
            case = f"{shape.described()}, {'weak' if self.is_weak else 'strong'} scaling, batch {whole:,}"
            case += f", {size} rank{'s' * (size > 1)}"
            # The same work for each rank, and of one batch the part of it, in no time for the exchange.
            limit = first if self.is_weak else first / size
            modelled = limit + _exchange_milliseconds(measured, size)
            for phase, milliseconds in measured["milliseconds"].items():
                is_step = phase == "step"
                yield Row(
                    case=case,
                    metric=f"time of {phase}",
                    value=milliseconds,
                    unit="ms",
                    peer="model: one rank's work and its bytes over the probed links" if is_step and size > 1 else "",
                    peer_value=modelled if is_step and size > 1 else None,
                    limit=limit if is_step else None,
                )
            for what, sent in measured["bytes"].items():
                yield Row(case=case, metric=f"bytes that a rank sends: {what}", value=sent / 2**20, unit="MiB")
            for what, speed in measured["links"].items():
                yield Row(case=case, metric=f"probe of links: {what}", value=speed, unit=_LINK_UNITS[what])


_LINK_UNITS = {"latency": "us", "bytes to ranks of the machine": "GB/s"}


def _exchange_milliseconds(measured: Mapping[str, Mapping[str, float]], size: int) -> float:
    """Return the time of a step's collectives by the links: the latency of each, and the bytes that a rank sends."""
    if size == 1:
        return 0.0
    latency, speed = (measured["links"][name] for name in _LINK_UNITS)
    sent = sum(measured["bytes"].values())
    return len(measured["bytes"]) * latency / 1e3 + 1e3 * sent / (1e9 * speed)


def scalings(device: torch.device, batch: int, library: Path | None = None) -> Iterator[Scaling]:
    """Yield the cases; without a GPU, tiny ones of two ranks on the CPU or on the simulated device of `library`."""
    is_gpu = device.type == "cuda"
    count = torch.cuda.device_count() if is_gpu else 2
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= count]
    most = int(_OF_A_GPU * torch.cuda.mem_get_info()[0]) // (4 * WIDTH) if is_gpu else 26 * 50  # rows of a GPU
    each = 1_500_000 if is_gpu else 50

    def plain(_: int) -> Shape:
        return Shape(name="DLRM", rows=(each,) * 26, hotness=(1,) * 26)

    def large(size: int) -> Shape:
        return Shape(name="DLRM", rows=(size * most // 26,) * 26, hotness=(1,) * 26)

    def mlperf(_: int) -> Shape:
        bound = max(_MLPERF_ROWS)
        while bound > 1 and sum(min(rows, bound) for rows in _MLPERF_ROWS) > most:
            bound = 9 * bound // 10
        rows = tuple(min(rows, bound) for rows in _MLPERF_ROWS)
        return Shape(name="DLRM-DCNv2 of MLPerf", rows=rows, hotness=_MLPERF_HOTNESS, crosses=True)

    where = str(library) if library is not None else device.type
    for name, shape, kinds in (
        ("DLRM", plain, (False, True)),
        ("DLRM-DCNv2", mlperf, (False, True)),
        # Only weak: one rank has no room for the tables of many.
        ("tables of all memory", large, (True,)),
    ):
        for is_weak in kinds:
            case = f"{name}, {'weak' if is_weak else 'strong'} scaling"
            yield Scaling(name=case, shape=shape, is_weak=is_weak, device=where, batch=batch, sizes=sizes)


def _measured(size: int, device: str, shape: Shape, batch: int) -> dict[str, dict[str, float]]:
    """Return what the workers of one start measure."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    worker = [__file__, "--device", device, "--shape", json.dumps(asdict(shape)), "--batch", str(batch)]
    # Not interpreted: on the CPU its own kernels show as well that the workers run.
    environment = {name: value for name, value in os.environ.items() if name not in _INTERPRETS}
    ended = subprocess.run(
        [*torchrun, *worker], env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{size} ranks: {ended.stderr[-2000:]}")
    result: dict[str, dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return result


def work(name: str, shape: Shape, batch: int) -> None:
    """Train on this rank; rank 0 prints milliseconds by phase, bytes by collective and the speed of links."""
    if name.endswith(".so"):
        from tests.dist.device_matrix import device_of

        device = device_of(Path(name))
    else:
        device = select_device(name, launch())
    ranks = join(device=device)
    model = _model(shape, is_recorded=ranks.size > 1)
    if ranks.size > 1:
        specs = [s for module in model.modules() if isinstance(module, EmbeddingCollection) for s in module.specs]
        shard(model, same_for_all(specs, RowWise(), ranks.size), ranks)
    model.to(device)
    spec = TrainingSpec(precision="bf16" if device.type == "cuda" else "fp32")
    optimizers = Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1))
    trainer = Trainer(model, spec, optimizers, ranks=ranks, check_loss=False)
    share = ranks.share(batch)
    own = [_batch(shape, share.stop - share.start, 100 * ranks.rank + number).to(device) for number in range(2)]

    def step(number: int) -> None:
        following = own[(number + 1) % len(own)]
        trainer.train_step(own[number % len(own)], following=following, totals=[batch])

    count = STEPS if device.type == "cuda" else _STEPS_TO_TRY
    milliseconds = {"step": _timed(step, ranks, device, count) / count}
    sent = Counter(ranks.sent_bytes)
    step(WARM_UP + count)
    sent = ranks.sent_bytes - sent
    milliseconds |= _phases(model, optimizers, ranks, own[0], batch, device)
    links: dict[str, float] = {}
    if ranks.size > 1:
        costs = probe_links(ranks, MachineCosts(), device=device, seconds=_PROBE_SECONDS)
        links = dict(zip(_LINK_UNITS, (1e6 * costs.latency, costs.local_bandwidth / 1e9), strict=True))
    if ranks.is_first:
        of_step = {what: sent[what] for what in sorted(sent)}
        print(json.dumps({"milliseconds": milliseconds, "bytes": of_step, "links": links}))
    ranks.close()


def _model(shape: Shape, *, is_recorded: bool) -> nn.Module:
    dataset = DatasetSpec(
        name="synthetic",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{number}") for number in range(13)),
        categorical=tuple(
            CategoricalColumn(name=f"C{number}", rows=rows, hotness=hotness)
            for number, (rows, hotness) in enumerate(zip(shape.rows, shape.hotness, strict=True))
        ),
    )
    bottom, top = (512, 256, WIDTH), (1024, 1024, 512, 256)
    spec = (DLRMDCNV2Spec if shape.crosses else DLRMSpec)(width=WIDTH, bottom=bottom, top=top)
    with record_tables() if is_recorded else nullcontext():
        return build_model(spec, dataset)


def _batch(shape: Shape, size: int, seed: int) -> Batch:
    """Return samples with uniform keys."""
    generator = torch.Generator().manual_seed(seed)
    keys = [
        torch.randint(0, rows, (size * hotness,), generator=generator)
        for rows, hotness in zip(shape.rows, shape.hotness, strict=True)
    ]
    lengths = torch.tensor(shape.hotness).repeat_interleave(size)
    return Batch(
        dense=torch.randn(size, 13, generator=generator),
        label=torch.randint(0, 2, (size, 1), generator=generator).float(),
        sparse=Jagged(
            names=tuple(f"C{number}" for number in range(len(shape.rows))),
            keys=torch.cat(keys),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        ),
    )


def _timed(step: Callable[[int], None], ranks: Ranks, device: torch.device, count: int) -> float:
    """Return the milliseconds of some steps of the slowest rank."""
    for number in range(WARM_UP):
        step(number)
    _finish(device)
    ranks.barrier("begin")
    begin = time.perf_counter()
    for number in range(count):
        step(WARM_UP + number)
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
    parser.add_argument("--shape", required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    read = {name: tuple(held) if isinstance(held, list) else held for name, held in json.loads(options.shape).items()}
    work(options.device, Shape(**read), options.batch)
