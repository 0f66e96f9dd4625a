# SPDX-License-Identifier: Apache-2.0
"""Factories that tests name in `PythonModelSpec`."""

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.models.columns import collection
from terarec.spec import DatasetSpec, StaticTablesSpec


class SmallModel(nn.Module):
    """A linear layer over all vectors."""

    def __init__(self, dataset: DatasetSpec, *, num_outputs: int, seed: int, width: int) -> None:
        super().__init__()
        self.embedding = collection(dataset.categorical, StaticTablesSpec(), width=width, pooling="sum", seed=seed)
        torch.manual_seed(seed)
        self.output = nn.Linear(width * len(dataset.categorical), num_outputs)

    def forward(self, batch: Batch) -> Tensor:
        return self.output(self.embedding(batch.sparse).pooled)


def small_model(dataset: DatasetSpec, *, num_outputs: int, seed: int, width: int = 2) -> nn.Module:
    return SmallModel(dataset, num_outputs=num_outputs, seed=seed, width=width)


class SampledRanker(nn.Module):
    """Dots of a user and an item; in training also those of the user and the items of the two samples before."""

    def __init__(self, dataset: DatasetSpec, *, num_outputs: int, seed: int) -> None:
        super().__init__()
        columns = dataset.categorical[:2]
        tables = StaticTablesSpec(initializer="normal", init_scale=0.1)
        self.embedding = collection(columns, tables, width=4, pooling="sum", seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        users, items = self.embedding(batch.sparse).pooled.chunk(2, dim=1)
        candidates = [items.roll(shift, 0) for shift in range(3 if self.training else 1)]
        return torch.stack([(users * each).sum(1) for each in candidates], dim=1)


def no_model(dataset: DatasetSpec, *, num_outputs: int, seed: int) -> str:
    return "no module"
