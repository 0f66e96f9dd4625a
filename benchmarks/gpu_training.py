# SPDX-License-Identifier: Apache-2.0
"""`Trainer` on a device: steps and fits of DLRM over tables of Criteo's sizes, against plain PyTorch and the limit."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from gpu_clock import seconds
from numpy.typing import NDArray
from record import Row
from step_sides import NUM_DENSE, Workload, floor_step, plain_mlp
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from terarec.batch import Batch, to_device
from terarec.data import InMemorySource, Reader
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.models import DLRM
from terarec.nn.precision import Precision
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    LabelColumn,
    SGDSpec,
    ShardSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer

WIDTH, BOTTOM, TOP = 128, (512, 256, 128), (1024, 1024, 512, 256)
CARDINALITIES = (
    *(39_884_406, 39_043, 17_289, 7420, 20_263, 3, 7120, 1543, 63, 38_532_951, 2_953_546, 403_346, 10, 2208),
    *(11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36),
)
"""Ids of the 26 columns of Criteo 1TB, cut to 40 M a column as MLPerf does it."""
_LR = 0.01
_SHARD = "train/part-00000.parquet"
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Random samples with power-law keys: few ids have most of the samples, as in logs.

    Attributes:
        spec: Columns with the rows of their tables.
        label: float32[n, 1].
        dense: float32[n, 13].
        keys: int64[n] a column.
    """

    spec: DatasetSpec
    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: Sequence[NDArray[np.int64]]

    @property
    def rows(self) -> list[int]:
        """Rows of each table."""
        return [column.rows or 0 for column in self.spec.categorical]

    @property
    def size(self) -> str:
        """The tables in words."""
        return f"26 tables, {sum(self.rows) / 1e6:.3g} M x {WIDTH} ({sum(self.rows) * WIDTH * 4 / 1e9:.3g} GB)"


def make_samples(gigabytes: float, count: int) -> Samples:
    """Make `count` samples over tables of Criteo's sizes, the largest cut so that all have `gigabytes` together."""
    rows = _cut(CARDINALITIES, int(gigabytes * 1e9 / (4 * WIDTH)))
    rng = np.random.default_rng(0)
    return Samples(
        spec=DatasetSpec(
            name="criteo-sized",
            storage="parquet",
            labels=(LabelColumn(name="label"),),
            dense=tuple(DenseColumn(name=f"I{index}") for index in range(1, NUM_DENSE + 1)),
            categorical=tuple(CategoricalColumn(name=f"C{index}", rows=each) for index, each in enumerate(rows, 1)),
            splits={"train": (ShardSpec(file=_SHARD, rows=count),)},
        ),
        label=(rng.random((count, 1)) < 0.25).astype(np.float32),
        dense=rng.random((count, NUM_DENSE), dtype=np.float32),
        keys=[(each * rng.random(count) ** 4).astype(np.int64) for each in rows],
    )


def _cut(rows: Sequence[int], most: int) -> list[int]:
    """`rows` cut to the highest limit with which they are at most `most` together, at least 1 each."""
    low, high = 1, max(rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(each, middle) for each in rows) <= most else (low, middle - 1)
    return [min(each, low) for each in rows]


class PlainDLRM(nn.Module):
    """The model on torch.nn: one merged table, which takes one launch where 26 tables take 26."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        super().__init__()
        with device:
            self.bags = nn.EmbeddingBag(sum(rows), WIDTH, mode="sum", sparse=True, include_last_offset=True)
            self.bottom = plain_mlp((NUM_DENSE, *BOTTOM), relu_last=True)
            vectors = len(rows) + 1
            self.top = plain_mlp((WIDTH + vectors * (vectors - 1) // 2, *TOP, 1), relu_last=False)
            self.lower = torch.tril_indices(vectors, vectors, offset=-1)
            self.base = torch.tensor(list(accumulate(rows[:-1], initial=0))).unsqueeze(1)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [B, 1]."""
        keys = batch.sparse.keys.view(len(self.base), -1) + self.base
        first = self.bottom(batch.dense)
        vectors = self.bags(keys.flatten(), batch.sparse.offsets).view(*keys.shape, WIDTH).transpose(0, 1)
        stacked = torch.cat([first.unsqueeze(1), vectors.to(first.dtype)], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        logits: Tensor = self.top(torch.cat([first, dots], dim=1))
        return logits


def plain_step(samples: Samples, batch: Batch, precision: Precision, *, is_compiled: bool) -> Step:
    """Sparse gradients and ``optim.SGD``, fused for the layers."""
    device = batch.dense.device
    plain = PlainDLRM(samples.rows, device)
    layers = [*plain.bottom.parameters(), *plain.top.parameters()]
    optimizers = [torch.optim.SGD(plain.bags.parameters(), lr=_LR), torch.optim.SGD(layers, lr=_LR, fused=True)]
    model = torch.compile(plain) if is_compiled else plain

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(batch)
        binary_cross_entropy_with_logits(logits.float(), batch.label).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def make_trainer(samples: Samples, device: torch.device, precision: Precision, *, is_compiled: bool = False) -> Trainer:
    """The side that runs what `terarec train` does, without a RUN directory."""
    model = DLRM(DLRMSpec(width=WIDTH, bottom=BOTTOM, top=TOP), samples.spec).to(device)
    rule = SGDSpec(lr=_LR)
    training = TrainingSpec(precision=precision, compile=is_compiled)
    return Trainer(model, training, Optimizers.of(model, rule, rule))


def steps(samples: Samples, device: torch.device, batch_size: int, precision: Precision, copy: float) -> Iterator[Row]:
    """Time steps on a batch that is there already. Each side is made, timed and dropped before the next.

    Args:
        samples: Data.
        device: Device of the training.
        batch_size: Samples a step.
        precision: Precision of the layers.
        copy: Bytes a second that a large copy moves, with which the limit reads and writes rows.
    """
    batch = to_device(_first_batch(samples, batch_size), device)
    limit = seconds(partial(floor_step(_workload(batch_size), precision, device), batch), device)
    limit += 3 * batch.sparse.keys.numel() * WIDTH * 4 / copy  # read by the lookup, read and written by the update
    plain: dict[str, float] = {}
    for is_compiled in _ways(device):
        name = "nn.EmbeddingBag" + ", torch.compile" * is_compiled
        plain[name] = seconds(plain_step(samples, batch, precision, is_compiled=is_compiled), device, repeats=5)
        _free(device)
    fastest = min(plain, key=lambda name: plain[name])
    for is_compiled in _ways(device):
        trainer = make_trainer(samples, device, precision, is_compiled=is_compiled)
        yield Row(
            case=_case(samples, batch_size, precision) + ", torch.compile" * is_compiled,
            metric="training step",
            value=seconds(partial(trainer.train_step, batch), device) * 1e3,
            unit="ms",
            peer=fastest,
            peer_value=plain[fastest] * 1e3,
            limit=limit * 1e3,
        )
        del trainer
        _free(device)


def fits(samples: Samples, device: torch.device, batch_size: int, precision: Precision, threads: int) -> Iterator[Row]:
    """`Trainer.fit`, reading and shuffling included, with the bare step as the limit.

    Args:
        samples: Data.
        device: Device of the training.
        batch_size: Samples a step.
        precision: Precision of the layers.
        threads: Threads of the reader.
    """
    batch = to_device(_first_batch(samples, batch_size), device)
    trainer = make_trainer(samples, device, precision)
    bare = batch_size / seconds(partial(trainer.train_step, batch), device)
    options = {"batch_size": batch_size, "shuffle": True, "drop_last": True, "threads": threads}
    in_memory = InMemorySource(samples.spec, samples.label, samples.dense, samples.keys)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with ParquetShardWriter(directory / _SHARD, samples.spec) as writer:
            writer.write(samples.label, samples.dense, samples.keys)
            writer.close()
        write_dataset(samples.spec, directory)
        for name, source in (("memory", in_memory), ("Parquet", directory)):
            reader = Reader(source, **options)
            for _ in range(2):  # the first one fills caches and starts threads
                report = Trainer(trainer.model, trainer.spec, trainer.optimizers).fit(reader)
            yield Row(
                case=_case(samples, batch_size, precision),
                metric=f"fit from {name}, {threads} threads",
                value=report.samples_per_second,
                unit="samples/s",
                limit=bare,
            )
    del trainer
    _free(device)


def _case(samples: Samples, batch_size: int, precision: str) -> str:
    return f"DLRM, {samples.size}, batch {batch_size}, SGD, {precision}"


def _ways(device: torch.device) -> tuple[bool, ...]:
    """Return whether sides are compiled: on a GPU they are tried both ways."""
    return (False, True) if device.type == "cuda" else (False,)


def _first_batch(samples: Samples, batch_size: int) -> Batch:
    source = InMemorySource(samples.spec, samples.label, samples.dense, samples.keys)
    return next(iter(Reader(source, batch_size=batch_size, prefetch=0)))


def _workload(batch_size: int) -> Workload:
    return Workload(
        features=26, rows=1, width=WIDTH, hotness=1, bottom=BOTTOM, top=TOP, batch=batch_size, optimizer="sgd"
    )


def _free(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
