# SPDX-License-Identifier: Apache-2.0
"""Compiled modules train as eager ones do, and are held whole by the graphs of evaluation."""

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import terarec
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.embedding.weight_lookup import GRAPHS_HOLD_UPDATES
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, DynamicTableSpec, FeatureSpec, SGDSpec, TableSpec
from tests.embedding.plain import random_jagged
from tests.params import in_every_run

ROWS, WIDTH = 23, 5


def inputs_of(kind: str, size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(size)
    keys = torch.randint(ROWS, (2 * size,), generator=generator)
    offsets = torch.randint(2 * size, (size,), generator=generator).sort().values
    offsets[0] = 0
    return {"EmbeddingBag": (keys, offsets), "Embedding": (keys.reshape(size, 2),)}[kind]


class Model(nn.Module):
    """A module and a dense layer after it."""

    def __init__(self, kind: str, **arguments) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = getattr(terarec, kind)(ROWS, WIDTH, **arguments)
        self.dense = nn.Linear(WIDTH, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.dense(self.table(*inputs)).tanh()


@pytest.mark.skipif(not GRAPHS_HOLD_UPDATES, reason="this torch loses updates in compiled backward passes")
@pytest.mark.parametrize("kind", in_every_run(["EmbeddingBag"], ["EmbeddingBag", "Embedding"]))
def test_a_drop_in_trains_in_one_graph_for_every_size(kind):
    eager = Model(kind)
    twin = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, backend=counter, fullgraph=True)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (eager, twin)]
    for size in (4, 6, 9, 31):
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(*inputs_of(kind, size)).square().sum().backward()
            optimizer.step()
        assert torch.equal(eager.table.weight, twin.table.weight)
    assert counter.frame_count == 2  # the first size alone, then any


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    in_every_run(
        [("EmbeddingBag", "sparse")],
        itertools.product(["EmbeddingBag", "Embedding"], ["sparse", "rows", "padding"]),
    ),
)
def test_parts_that_no_graph_holds_run_outside_of_it(kind, how):
    arguments = {"sparse": {"sparse": True}, "rows": {}, "padding": {"padding_idx": 3}}[how]
    eager = Model(kind, **arguments)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, backend="aot_eager")
    optimizers = [
        RowOptimizer(model, SGDSpec(lr=0.1)) if how == "rows" else torch.optim.SGD(model.table.parameters(), lr=0.1)
        for model in (eager, twin)
    ]
    for size in (4, 6):
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(*inputs_of(kind, size)).square().sum().backward()
            optimizer.step()
        assert torch.equal(eager.table.weight, twin.table.weight)


class WithCollection(nn.Module):
    """A collection of two widths, one table of them dynamic, and a dense layer after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingCollection(
            [TableSpec(name="a", rows=7, width=4), DynamicTableSpec(name="b", width=6)],
            [FeatureSpec(name="f", table="a"), FeatureSpec(name="g", table="b", pooling="mean")],
        )
        self.dense = nn.Linear(10, 1)

    def forward(self, jagged) -> Tensor:
        return self.dense(self.tables(jagged).pooled).sigmoid()


@pytest.mark.parametrize(
    ("backend", "tolerance"), in_every_run([("aot_eager", 0.0)], [("aot_eager", 0.0), ("inductor", 1e-6)])
)
def test_a_collection_trains_with_the_dense_part_compiled(backend, tolerance):
    eager, twin = WithCollection(), WithCollection()
    twin.load_state_dict(eager.state_dict())
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(twin, backend=counter)
    optimizers = [
        (RowOptimizer(model, AdaGradSpec(lr=0.1)), torch.optim.Adam(model.parameters(), lr=0.1))
        for model in (eager, twin)
    ]
    before = eager.tables.table("a").clone()
    for size in (5, 9):
        for model, (rows, dense) in zip((eager, compiled), optimizers, strict=True):
            dense.zero_grad()
            model(random_jagged(("f", "g"), (7, 11), size, seed=size)).square().sum().backward()
            dense.step()
            rows.step()
        torch.testing.assert_close(eager.state_dict(), twin.state_dict(), rtol=tolerance, atol=tolerance)
    assert not torch.equal(eager.tables.table("a"), before)
    assert counter.frame_count > 0


class OnTensors(nn.Module):
    """A collection over plain tensors, which an exported program takes."""

    def __init__(self, pooling: str, is_quantized: bool) -> None:
        super().__init__()
        self.tables: nn.Module = EmbeddingCollection(
            [TableSpec(name="a", rows=7, width=4), TableSpec(name="b", rows=11, width=4)],
            [FeatureSpec(name="f", table="a", pooling=pooling), FeatureSpec(name="g", table="b", pooling=pooling)],
        ).eval()
        if is_quantized:
            self.tables = self.tables.quantized()

    def forward(self, keys: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        jagged = Jagged(names=("f", "g"), keys=keys, offsets=offsets, weights=weights)
        return self.tables(jagged).pooled.tanh()


def weighted_bags(size: int) -> tuple[Tensor, Tensor, Tensor]:
    jagged = random_jagged(("f", "g"), (7, 11), size, seed=size)
    return jagged.keys, jagged.offsets, torch.linspace(0.5, 1.5, jagged.keys.numel())


@pytest.mark.parametrize(
    ("pooling", "is_quantized"),
    in_every_run([("mean", False), ("max", True)], itertools.product(["mean", "max"], [False, True])),
)
def test_in_evaluation_one_graph_takes_weights_of_keys_for_every_size(pooling, is_quantized):
    torch.compiler.reset()  # compiled code of other cases counts against the most that there may be
    model = OnTensors(pooling, is_quantized)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in (3, 4, 9, 30):
        with torch.no_grad():
            assert torch.equal(compiled(*weighted_bags(size)), model(*weighted_bags(size)))
    assert counter.frame_count <= 2  # the first size alone, then any


@pytest.mark.parametrize(("pooling", "is_quantized"), [("mean", False), ("sqrtn", True), ("max", True)])
def test_an_exported_collection_takes_weights_of_keys(pooling, is_quantized):
    model = OnTensors(pooling, is_quantized)
    any_size = {0: torch.export.Dim.AUTO}
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, weighted_bags(5), dynamic_shapes=(any_size,) * 3), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (5, 2, 30):
        assert torch.equal(loaded(*weighted_bags(size)), model(*weighted_bags(size)))
