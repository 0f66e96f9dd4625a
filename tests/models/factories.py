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


def no_model(dataset: DatasetSpec, *, num_outputs: int, seed: int) -> str:
    return "no module"
