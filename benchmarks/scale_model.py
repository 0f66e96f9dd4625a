# SPDX-License-Identifier: Apache-2.0
"""Model the speed of many ranks: the work of one rank, and an alpha-beta model of the exchange.

The time of a step of R ranks is the sum of the work of B / R samples on each rank, a latency of ``alpha`` for each of
its collectives, and the bytes of each collective divided by the speed of the links. ``--case local`` measures the work
of one process and the links between two, and compares the model with measured steps of 1, 2 and 4 processes. Processes
that share a core share its time. ``--case plan`` predicts steps of 8 to 1,024 GPUs from the work and links stated
below, none of which was measured; it draws ``results/scale_model.png``. With ``--measured`` the work is that of the
last step of one GPU in ``results/gpu.csv``, and the links inside a machine those of its last probe, if it has one; the
picture stays as it is then.
"""

import argparse
import csv
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from record import RESULTS, Row, append_rows
from scale_out import Side
from step_sides import WORKLOADS, Workload, batches, terarec_model

from terarec.batch import slice_samples
from terarec.dist import RowWise, join, same_for_all, shard
from terarec.embedding import EmbeddingCollection
from terarec.embedding.tables import record_tables
from terarec.reports.page import BLUE, GREEN, MUTED, ORANGE, PURPLE, new_axes, plot_style
from terarec.spec import SGDSpec, TrainingSpec
from terarec.train import Optimizers, Trainer
from terarec.train.devices import keep_freed_memory

LOCAL = replace(WORKLOADS["gemm"], rows=40_000)
CASE = "DLRM 26 x 40,000 x 64, SGD, a thread each"
SIZES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Costs of a message.

    Attributes:
        alpha: Seconds of a collective.
        peer: Additional seconds for each other rank.
        near: Bytes per second that a rank sends to ranks of its machine.
        far: Bytes per second that a rank sends to other machines.
        per_node: Number of ranks of a machine.
    """

    alpha: float
    peer: float
    near: float
    far: float
    per_node: int

    def seconds(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-to-all of `size` ranks, each of which sends this many bytes in equal parts."""
        if size == 1:
            return 0.0
        node = min(size, self.per_node)
        near, far = num_bytes * (node - 1) / size, num_bytes * (size - node) / size
        return self.alpha + self.peer * (size - 1) + max(near / self.near, far / self.far)

    def sum_seconds(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-reduce of this many bytes: rings inside machines, then between machines."""
        if size == 1:
            return 0.0
        node = min(size, self.per_node)
        near = 2 * num_bytes * (node - 1) / node
        far = 2 * num_bytes * (size - node) / size / node  # each rank of a machine has a part of the sum
        return self.alpha + self.peer * (size - 1) + near / self.near + far / self.far


def distinct(rows: int, samples: float) -> float:
    """Return the expected distinct keys among this many uniform draws, the most that a batch can request."""
    return rows * -torch.expm1(samples * torch.log1p(torch.tensor(-1.0 / rows, dtype=torch.float64))).item()


def exchange(workload: Workload, samples: float, size: int, links: Links, *, wire: int = 4) -> float:
    """Return the seconds of the collectives of a step, with this many samples on each rank."""
    keys = workload.features * distinct(workload.rows, samples)
    vectors = links.seconds(wire * workload.width * keys, size)
    layers = links.sum_seconds(4 * _layer_numbers(workload), size)
    return links.seconds(0, size) + links.seconds(8 * keys, size) + 2 * vectors + layers


def _layer_numbers(workload: Workload) -> int:
    vectors = workload.features + 1
    in_width = workload.width + vectors * (vectors - 1) // 2
    sizes = [(13, *workload.bottom), (in_width, *workload.top, 1)]
    return sum((a + 1) * b for part in sizes for a, b in pairwise(part))


# The assumed GPU: A100 of 80 GB, 156 TFLOP/s of TF32 and 2.0 TB/s, of which training kernels reach these shares
# in published profiles; NVLink of 300 GB/s each way and a 200 Gbit/s port for each GPU.
FLOPS, MEMORY = 0.45 * 156e12, 0.6 * 2.0e12
LAUNCHES = 1.2e-3  # seconds of a step in which the device waits for the host, for any batch
GPU = Links(alpha=2e-5, peer=1e-6, near=0.7 * 300e9, far=0.8 * 25e9, per_node=8)
LARGE = replace(WORKLOADS["gemm"], features=26, width=128, rows=80_000_000)  # 1.07 TB of float32 weights
GPU_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
STRONG_BATCH, WEAK_BATCH = 65_536, 8_192
HUGECTR_STRONG = {1: 175.6, 2: 93.1, 4: 50.3, 8: 30.8}  # ms of an iteration of Wide & Deep, FP32, DGX A100
HUGECTR_WEAK = 1.17  # time on 8 GPUs over that on one (DIEN)
TORCHREC = {128: 3.4}  # ms of a step of DLRM-DCNv2 on 16 DGX H100 after its authors' tuning, 7.6 before


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and its links.

    Attributes:
        name: Name of the model.
        links: Links.
        step: Measured seconds of a step on one GPU, and its samples; None for `gpu_work`.
    """

    name: str
    links: Links
    step: tuple[float, int] | None = None

    def work(self, workload: Workload, samples: float) -> float:
        """Return the seconds of a rank's work."""
        if self.step is None:
            return gpu_work(workload, samples)
        seconds, count = self.step
        # In proportion to the samples, but for the time in which the device waits for the host.
        return LAUNCHES + max(0.0, seconds - LAUNCHES) * samples / count

    def both(self, workload: Workload, samples: float, size: int, *, wire: int = 4) -> tuple[float, float]:
        """Return the seconds of a rank's work, and of the exchange."""
        return self.work(workload, samples), exchange(workload, samples, size, self.links, wire=wire)


ASSUMED = Gpu(name="model of A100s", links=GPU)


def measured_gpu() -> Gpu:
    """Return the GPU of the last compiled step in float32, whose numbers the model counts, of ``results/gpu.csv``."""
    with (RESULTS / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["metric"] == "training step" and row["case"].endswith("fp32, torch.compile")]
    if not steps:
        raise SystemExit("results/gpu.csv has no step of DLRM in fp32 with torch.compile, expected one of gpu.py")
    step = steps[-1]
    samples = re.search(r"batch (\d+)", step["case"])
    assert samples is not None, "the case names its batch"
    speeds = [row for row in rows if row["metric"] == "probe of links: bytes to ranks of the machine"]
    links = replace(GPU, near=1e9 * float(speeds[-1]["value"])) if speeds else GPU
    name = f"work measured on one {step['gpu']}, links {'probed' if speeds else 'assumed'}"
    return Gpu(name=name, links=links, step=(float(step["value"]) / 1e3, int(samples[1])))


def gpu_work(workload: Workload, samples: float) -> float:
    """Return the seconds of a rank's work on a GPU: forward and backward products, row reads and row updates."""
    flops = 3 * 2 * _layer_numbers(workload) * samples
    keys = workload.features * distinct(workload.rows, samples)
    row_bytes = 4 * workload.width * (workload.features * samples * 2 + keys * 4)
    return LAUNCHES + flops / FLOPS + row_bytes / MEMORY


def work() -> None:
    """Run one process: it steps with a part of the batch, or times collectives."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ranks = join()
    with record_tables():
        model = terarec_model(LOCAL)
    specs = [s for held in model.modules() if isinstance(held, EmbeddingCollection) for s in held.specs]
    shard(model, same_for_all(specs, RowWise(), ranks.size), ranks)
    trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1)), ranks=ranks)
    held = batches(LOCAL)
    number = 0
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        answer = 0.0
        if word == "step":
            batch = held[number % len(held)]
            number += 1
            trainer.train_step(slice_samples(batch, 0, batch.batch_size // int(value)))
        elif word == "send":
            count = int(value) // (ranks.size - 1)
            sizes = [0 if rank == ranks.rank else count for rank in range(ranks.size)]
            values = torch.zeros(sum(sizes), dtype=torch.uint8)
            ranks.barrier("start")
            start = time.perf_counter()
            ranks.all_to_all("exchange", values, sizes, sizes)
            answer = time.perf_counter() - start
        print(answer, flush=True)
    ranks.close()


def local_rows(repeats: int) -> list[Row]:
    """Compare the measured seconds of 1, 2 and 4 processes with the model."""
    cores = len(os.sched_getaffinity(0))
    sides = {size: Side(size, script=__file__) for size in SIZES}
    # Independent processes, as many at once as will step together: they share the memory's bandwidth.
    alone = [sides[1], *(Side(1, script=__file__) for _ in range(min(cores, SIZES[-1]) - 1))]
    calls: dict[str, Callable[[], float]] = {
        f"work {size}": (lambda size=size: _seconds(alone[:size], f"step {size}")) for size in SIZES
    }
    calls |= {f"step {size}": (lambda size=size: _seconds([sides[size]], "step 1")) for size in SIZES[1:]}
    big = 1 << 24
    calls |= {f"send {count}": (lambda count=count: sides[2].request(f"send {count}")[0]) for count in (0, big)}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            seconds = call()
            if turn:
                found[name].append(seconds)
    for side in (*sides.values(), *alone[1:]):
        side.close()
    median = {name: statistics.median(values) for name, values in found.items()}
    alpha = median["send 0"]
    speed = big / (median[f"send {big}"] - alpha)
    links = Links(alpha=alpha, peer=0.0, near=speed, far=speed, per_node=1 << 20)
    rows = []
    for size in SIZES:
        shared = max(1.0, size / cores)  # processes on each core
        predicted = shared * (median[f"work {size}"] + exchange(LOCAL, LOCAL.batch / size, size, links))
        seen = median["work 1"] if size == 1 else median[f"step {size}"]
        rows.append(
            Row(
                case=f"{CASE}, batch {LOCAL.batch}, {size} processes on {cores} cores",
                metric="training step",
                value=seen * 1e3,
                unit="ms",
                peer=f"model (alpha {alpha * 1e3:.2g} ms, {speed / 1e9:.2f} GB/s)",
                peer_value=predicted * 1e3,
            )
        )
    return rows


def _seconds(sides: Sequence[Side], words: str) -> float:
    """Return the seconds in which all sides run a command concurrently."""
    start = time.perf_counter()
    for side in sides:
        side.send(words)
    for side in sides:
        side.receive()
    return time.perf_counter() - start


def planned_rows(gpu: Gpu = ASSUMED) -> list[Row]:
    """Predict the figures of 8 to 1,024 GPUs, and draw those of assumptions."""
    case = f"DLRM 26 x 80,000,000 x 128, 1.07 TB, {gpu.name}"
    rows = []
    weak, strong = {size: gpu.both(LARGE, WEAK_BATCH, size) for size in GPU_SIZES}, {}
    for size, (own, wire) in weak.items():
        rows.append(
            Row(case=f"{case}, {size} GPUs, batch {WEAK_BATCH} each", metric="step", value=1e3 * (own + wire),
                unit="ms", peer="of which exchange", peer_value=1e3 * wire)
        )  # fmt: skip
    for size in GPU_SIZES:
        each = STRONG_BATCH / size
        strong[size] = gpu.both(LARGE, each, size)
        rows.append(
            Row(case=f"{case}, {size} GPUs, batch {STRONG_BATCH} in all", metric="step", value=1e3 * sum(strong[size]),
                unit="ms", peer="of which exchange", peer_value=1e3 * strong[size][1])
        )  # fmt: skip
    for name, curve in (("batch 8,192 each", weak), ("batch 65,536 in all", strong)):
        limit = next((size for size, (own, wire) in curve.items() if wire > own), None)
        rows.append(
            Row(case=f"{case}, {name}", metric="GPUs from which the exchange takes more than the work",
                value=float(limit or 0), unit="GPUs")
        )  # fmt: skip
    ours = {size: sum(gpu.both(_small(), STRONG_BATCH / size, size)) for size in HUGECTR_STRONG}
    for size, milliseconds in HUGECTR_STRONG.items():
        rows.append(
            Row(case=f"strong scaling on {size} GPUs of a node, batch {STRONG_BATCH}, {gpu.name}", metric="speedup",
                value=ours[1] / ours[size], unit="x", peer="HugeCTR as published, Wide & Deep FP32",
                peer_value=HUGECTR_STRONG[1] / milliseconds)
        )  # fmt: skip
    one, eight = (sum(gpu.both(_small(), WEAK_BATCH, size)) for size in (1, 8))
    rows.append(
        Row(case=f"weak scaling on 8 GPUs of a node, batch 8192 each, {gpu.name}", metric="time over one GPU",
            value=eight / one, unit="x", peer="HugeCTR as published, DIEN", peer_value=HUGECTR_WEAK)
    )  # fmt: skip
    rows.append(
        Row(case=f"128 GPUs, batch {STRONG_BATCH} in all, {gpu.name}", metric="step",
            value=1e3 * sum(gpu.both(LARGE, STRONG_BATCH / 128, 128)), unit="ms",
            peer="TorchRec as published, DLRM-DCNv2 on H100", peer_value=TORCHREC[128])
    )  # fmt: skip
    if gpu is ASSUMED:
        draw(weak, strong)
    return rows


def _small() -> Workload:
    """Return a workload whose tables fit on one GPU, to compare with published scaling from one GPU."""
    return replace(LARGE, rows=1_000_000)


def draw(weak: dict[int, tuple[float, float]], strong: dict[int, tuple[float, float]]) -> None:
    """Draw the work and the exchange of a step by the number of GPUs."""
    halved = {size: ASSUMED.both(LARGE, WEAK_BATCH, size, wire=2) for size in weak}
    with plot_style():
        figure, axes = new_axes(3.2)
        sizes = list(weak)
        axes.plot(sizes, [1e3 * own for own, _ in weak.values()], color=BLUE, label="work, 8,192 samples each")
        axes.plot(sizes, [1e3 * wire for _, wire in weak.values()], color=ORANGE, label="exchange, 8,192 each")
        axes.plot(sizes, [1e3 * wire for _, wire in halved.values()], color=PURPLE, label="exchange, bf16 on the wire")
        axes.plot(sizes, [1e3 * own for own, _ in strong.values()], "--", color=BLUE, label="work, 65,536 in all")
        axes.plot(
            sizes, [1e3 * wire for _, wire in strong.values()], "--", color=ORANGE, label="exchange, 65,536 in all"
        )
        axes.plot([*TORCHREC], [*TORCHREC.values()], "o", color=GREEN, label="step of TorchRec as published")
        axes.axvline(GPU.per_node, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("ms of a step")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(RESULTS / "scale_model.png", dpi=150, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("local", "plan"), default="local")
    parser.add_argument("--measured", action="store_true", help="plan from what gpu.py has measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return
    if options.case == "local":
        rows = local_rows(options.repeats)
    else:
        rows = planned_rows(measured_gpu() if options.measured else ASSUMED)
    append_rows("scale_model", rows, dry=options.dry)


if __name__ == "__main__":
    main()
