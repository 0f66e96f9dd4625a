"""A model outside of the package, as a run names it."""

import torch
from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.spec import FeatureSpec, TableSpec


class Own(nn.Module):
    """A linear layer over the vectors of all columns."""

    def __init__(self, dataset, *, num_outputs, seed, width):
        super().__init__()
        columns = dataset.categorical
        self.tables = EmbeddingCollection(
            [TableSpec(name=column.name, rows=column.rows, width=width) for column in columns],
            [FeatureSpec(name=column.name, table=column.name) for column in columns],
            seed=seed,
        )
        self.layer = nn.Linear(width * len(columns), num_outputs)
        with torch.no_grad():
            self.layer.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(seed))
            self.layer.bias.zero_()

    def forward(self, batch):
        return self.layer(self.tables(batch.sparse).pooled)


def make(dataset, *, num_outputs, seed, width):
    return Own(dataset, num_outputs=num_outputs, seed=seed, width=width)
