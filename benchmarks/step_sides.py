# SPDX-License-Identifier: Apache-2.0
"""Run one training step of a workload: by terarec, by plain PyTorch, and the parts that no implementation can avoid.

As a program it is a worker: it prints "ready", then runs a step and prints its seconds for each line that it reads.
Each side has a process of its own, so that the allocator settings of one side do not affect the other.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection
from terarec.kernels.registry import Op, choose
from terarec.models import DLRM
from terarec.nn import MLP, DotInteraction
from terarec.nn.precision import Precision
from terarec.ops.pair_dots import pair_dots, supports_pair_dots
from terarec.spec import (
    AdaGradSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    FeatureSpec,
    LabelColumn,
    SGDSpec,
    TableSpec,
    TrainingSpec,
)
from terarec.train import Optimizers, Trainer
from terarec.train.devices import keep_freed_memory

NUM_DENSE = 13
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch. Without `bottom`, the top MLP reads the concatenated vectors alone."""

    features: int
    rows: int
    width: int
    hotness: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    optimizer: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(f"C{index}" for index in range(self.features))

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows that a step's keys look up."""
        return self.batch * self.features * self.hotness * self.width * 4


WORKLOADS = {
    "gemm": Workload(features=26, rows=10_000_000 // 26, width=64, hotness=1, bottom=(512, 256, 64),
                     top=(1024, 1024, 512, 256), batch=8192, optimizer="sgd"),
    "embedding": Workload(features=100, rows=8192, width=16, hotness=10, bottom=(), top=(256, 128), batch=8192,
                          optimizer="adagrad"),
}  # fmt: skip


def batches(workload: Workload) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    num_keys = workload.features * workload.batch * workload.hotness
    return [
        Batch(
            dense=torch.randn(workload.batch, NUM_DENSE, generator=generator),
            label=torch.randint(0, 2, (workload.batch, 1), generator=generator).float(),
            sparse=Jagged(
                names=workload.names,
                keys=torch.randint(0, workload.rows, (num_keys,), generator=generator),
                offsets=torch.arange(0, num_keys + 1, workload.hotness),
            ),
        )
        for _ in range(NUM_BATCHES)
    ]


class Deep(nn.Module):
    """An MLP over the concatenated vectors, in terarec's parts."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        names, width = workload.names, workload.width
        self.embedding = EmbeddingCollection(
            [TableSpec(name=name, rows=workload.rows, width=width) for name in names],
            [FeatureSpec(name=name, table=name) for name in names],
        )
        generator = torch.Generator().manual_seed(0)
        self.top = MLP(self.embedding.output_width, (*workload.top, 1), generator=generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [B, 1]."""
        return self.top(self.embedding(batch.sparse).pooled)


def terarec_model(workload: Workload) -> nn.Module:
    if not workload.bottom:
        return Deep(workload)
    dataset = DatasetSpec(
        name="synthetic",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=tuple(DenseColumn(name=f"I{index}") for index in range(NUM_DENSE)),
        categorical=tuple(CategoricalColumn(name=name, rows=workload.rows) for name in workload.names),
    )
    return DLRM(DLRMSpec(width=workload.width, bottom=workload.bottom, top=workload.top), dataset)


class PlainModel(nn.Module):
    """The model on torch.nn alone."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(workload.rows, workload.width, mode="sum", sparse=True, include_last_offset=True)
            for _ in range(workload.features)
        )
        num_vectors = workload.features + 1
        self.bottom = plain_mlp((NUM_DENSE, *workload.bottom), relu_last=True) if workload.bottom else None
        pairs = num_vectors * (num_vectors - 1) // 2
        in_width = workload.width + pairs if self.bottom else workload.features * workload.width
        self.top = plain_mlp((in_width, *workload.top, 1), relu_last=False)
        self.rows, self.columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)

    def forward(self, dense: Tensor, keys: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        """Return the logits [B, 1]; keys and offsets are lists by feature."""
        vectors = [bag(key, offset) for bag, key, offset in zip(self.bags, keys, offsets, strict=True)]
        if self.bottom is None:
            return self.top(torch.cat(vectors, dim=1))
        first = self.bottom(dense)
        stacked = torch.stack([first, *vectors], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([first, dots], dim=1))


def plain_mlp(sizes: Sequence[int], *, relu_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


def terarec_step(workload: Workload, precision: Precision, *, is_compiled: bool = False) -> Callable[[Batch], object]:
    """Return a function that runs `Trainer.train_step`."""
    keep_freed_memory()
    model = terarec_model(workload)
    spec = SGDSpec(lr=0.1) if workload.optimizer == "sgd" else AdaGradSpec(lr=0.01)
    training = TrainingSpec(precision=precision, compile=is_compiled)
    return Trainer(model, training, Optimizers.of(model, spec, spec)).train_step


def plain_step(workload: Workload, precision: Precision, *, is_compiled: bool = False) -> Callable[[Batch], object]:
    """Return a function that runs a step of the plain model with torch's optimizers."""
    plain = PlainModel(workload)
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01)}
    optimizer = kinds[workload.optimizer](plain.parameters())
    model = torch.compile(plain) if is_compiled else plain
    offsets = torch.arange(0, workload.batch * workload.hotness + 1, workload.hotness)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        keys = batch.sparse.keys.view(workload.features, -1).unbind()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(batch.dense, keys, [offsets] * workload.features)
        binary_cross_entropy_with_logits(logits.float(), batch.label).backward()
        optimizer.step()

    return step


def floor_step(
    workload: Workload, precision: Precision, device: torch.device | None = None
) -> Callable[[Batch], object]:
    """Return a function that computes only the matrix products of a step, into allocated memory; it leaves out rows."""
    keep_freed_memory()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    products = [product for shape in _layers(workload) for product in _layer_products(workload.batch, *shape)]
    # The product of a transposed gradient reads it transposed, so the views are passed without a copy.
    products = [tuple(tensor.to(device, dtype) for tensor in product) for product in products]
    multiply = [_fastest(_choices(*product)) for product in products]
    if workload.bottom:
        multiply += [_fastest(choices) for choices in _interactions(workload, dtype, device)]

    def step(_: Batch) -> None:
        for one in multiply:
            one()

    return step


def _fastest(choices: list[Callable[[], object]]) -> Callable[[], object]:
    def seconds(choice: Callable[[], object]) -> float:
        choice()
        start = time.perf_counter()
        choice()
        return time.perf_counter() - start

    with torch.no_grad():
        return min(choices, key=lambda choice: min(seconds(choice) for _ in range(5)))


def _choices(left: Tensor, right: Tensor, out: Tensor) -> list[Callable[[], object]]:
    """Return the product by torch's library and by oneDNN, which takes matrices in their layout, or copies them."""
    by_torch = partial(torch.matmul, left, right, out=out)
    if left.device.type != "cpu":
        return [by_torch]

    def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return [
        by_torch,
        lambda: by_onednn(left, right.T),
        lambda: by_onednn(left.contiguous(), right.T.contiguous()),
        lambda: by_onednn(right.T.contiguous(), left.contiguous()),
    ]


def _interactions(
    workload: Workload, dtype: torch.dtype, device: torch.device | None
) -> list[list[Callable[[], object]]]:
    """Return the dot products of all pairs and their gradients, by torch's matrix product or by terarec's op."""
    count, width = workload.features + 1, workload.width
    vectors = torch.randn(workload.batch, count, width).to(device, dtype)
    dots = torch.randn(workload.batch, count, count).to(device, dtype)
    by_torch: list[list[Callable[[], object]]] = [
        [partial(torch.matmul, vectors, vectors.transpose(1, 2), out=torch.empty_like(dots))],
        [partial(torch.matmul, dots, vectors, out=torch.empty_like(vectors))],
    ]
    first, others = vectors[:, 0].contiguous(), vectors[:, 1:].flatten(1).float()
    if supports_pair_dots(first, others):
        out_width = DotInteraction(count, width).out_width
        grad = torch.randn(workload.batch, out_width).to(dtype)
        by_torch[0].append(partial(pair_dots, first, others, out_width))
        by_torch[1].append(partial(choose(Op.PAIR_GRADIENTS, first.device), grad, first, others))
    return by_torch


def _layers(workload: Workload) -> list[tuple[int, int, bool]]:
    """Return (in, out, whether the input needs a gradient) of each linear layer."""
    vectors = workload.features + 1
    in_width = workload.width + vectors * (vectors - 1) // 2 if workload.bottom else workload.features * workload.width
    bottom, top = (NUM_DENSE, *workload.bottom), (in_width, *workload.top, 1)
    sizes = [*pairwise(bottom), *pairwise(top)]
    return [(fan_in, fan_out, fan_in != NUM_DENSE) for fan_in, fan_out in sizes]


def _layer_products(batch: int, fan_in: int, fan_out: int, needs_gradient: bool) -> list[tuple[Tensor, ...]]:
    x, y, weight = torch.randn(batch, fan_in), torch.randn(batch, fan_out), torch.randn(fan_out, fan_in)
    products = [(x, weight.T, torch.empty_like(y)), (y.T, x, torch.empty_like(weight))]
    return [*products, (y, weight, torch.empty_like(x))] if needs_gradient else products


SIDES = {
    "terarec": terarec_step,
    "terarec_compiled": partial(terarec_step, is_compiled=True),
    "plain": plain_step,
    "plain_compiled": partial(plain_step, is_compiled=True),
    "floor": floor_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("precision", choices=("fp32", "bf16"))
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    step = SIDES[options.side](workload, options.precision)
    samples = batches(workload)
    step(samples[-1])
    print("ready", flush=True)
    for count, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        step(samples[count % NUM_BATCHES])
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
