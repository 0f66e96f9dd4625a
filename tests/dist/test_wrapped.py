# SPDX-License-Identifier: Apache-2.0
"""Layers that DistributedDataParallel or fully_shard of torch wraps, next to tables on ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from terarec.batch import Jagged
from terarec.dist import Ranks, RowWise, same_for_all, shard
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec
from tests.dist.launch import run_ranks

ROWS, WIDTH, BATCH, STEPS = 50, 8, 12, 4
WAYS = ("DistributedDataParallel", "fully_shard")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [TableSpec(name="t", rows=ROWS, width=WIDTH)]
        self.tables: nn.Module = EmbeddingCollection(tables, [FeatureSpec(name="t", table="t")], seed=3)
        torch.manual_seed(4)
        self.layers: nn.Module = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, keys: Tensor) -> Tensor:
        offsets = torch.arange(0, keys.numel() + 1, 3)
        out: Tensor = self.layers(self.tables(Jagged(names=("t",), keys=keys.flatten(), offsets=offsets)).pooled)
        return out


def train(ranks: Ranks, way: str) -> dict[str, list[float]]:
    """Train with each rank on as many samples, and return the weights."""
    model = Net()
    if ranks.size > 1:
        collection: Any = model.tables
        shard(model, same_for_all(collection.specs, RowWise(), ranks.size), ranks)
        if way == "DistributedDataParallel":
            model.layers = DistributedDataParallel(model.layers)
        else:
            fully_shard(model.layers, mesh=init_device_mesh("cpu", (ranks.size,)))
    rows = RowOptimizer(model, SGDSpec(lr=0.5))
    dense = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.5)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        keys = torch.randint(0, ROWS, (BATCH, 3), generator=generator)
        labels = torch.randn(BATCH, 1, generator=generator)
        mine = ranks.share(BATCH)
        # The mean of this rank; torch takes the mean of the layers' gradients over the ranks, rows are summed.
        loss = (model(keys[mine]) - labels[mine]).square().mean()
        dense.zero_grad()
        loss.backward()
        for group in rows.param_groups:
            group["lr"] = 0.5 / ranks.size
        rows.step()
        dense.step()
    found = {}
    for name, parameter in model.layers.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = full.detach().flatten().tolist()
    everything = torch.randint(0, ROWS, (BATCH, 3), generator=generator)
    with torch.no_grad():
        found["scores"] = model(everything).flatten().tolist()
    return found


def both(ranks: Ranks) -> list[dict[str, list[float]]]:
    return [train(ranks, way) for way in WAYS]


def test_layers_that_torch_wraps_train_next_to_tables_on_ranks() -> None:
    expected = train(Ranks(), "")
    for found in run_ranks(2, both):
        assert isinstance(found, list), found
        for way, state in zip(WAYS, found, strict=True):
            assert state.keys() == expected.keys()
            for name, wanted in expected.items():
                assert state[name] == pytest.approx(wanted, rel=1e-4, abs=1e-6), f"{way}: {name}"
