"""Wide & Deep (Cheng et al. 2016, arXiv 1606.07792)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.nn import MLP
from terarec.spec import CategoricalColumn, DatasetSpec, FeatureSpec, TablesSpec, WideDeepSpec

WIDE_SUFFIX = ".wide"


class WideDeep(nn.Module):
    """The sum of a linear model over all columns and an MLP over their embeddings.

    Args:
        spec: widths.
        dataset: columns; a categorical column ``c`` gets a table ``c`` for the deep part and a table ``c.wide`` with
            one weight a key and label for the wide part, which starts at zero.
        seed: of the first weights.
    """

    def __init__(self, spec: WideDeepSpec, dataset: DatasetSpec, *, seed: int = 0) -> None:
        super().__init__()
        columns, num_labels, num_dense = dataset.categorical, len(dataset.labels), len(dataset.dense)
        generator = torch.Generator().manual_seed(seed)
        self.num_labels = num_labels
        self.wide = _wide_tables(columns, spec.tables, num_labels, seed) if columns else None
        self.embedding = _deep_tables(columns, spec.tables, spec.width, seed) if columns else None
        self.linear_weight = nn.Parameter(torch.zeros(num_labels, num_dense))
        self.linear_bias = nn.Parameter(torch.zeros(num_labels))
        in_width = num_dense + spec.width * len(columns)
        self.deep = MLP(in_width, (*spec.hidden, num_labels), generator=generator, dropout=spec.dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, L]."""
        logits = linear(batch.dense, self.linear_weight, self.linear_bias)
        deep_input = batch.dense
        if self.wide is not None and self.embedding is not None:
            weights = self.wide(batch.sparse).pooled.view(batch.batch_size, -1, self.num_labels)
            logits = logits + weights.sum(dim=1)
            deep_input = torch.cat([batch.dense, self.embedding(batch.sparse).pooled], dim=1)
        logits += self.deep(deep_input)
        return logits


def _wide_tables(
    columns: tuple[CategoricalColumn, ...], kind: TablesSpec, num_labels: int, seed: int
) -> EmbeddingCollection:
    tables = [
        kind.table(column.name + WIDE_SUFFIX, rows=column.rows, width=num_labels, initializer="zeros")
        for column in columns
    ]
    features = [FeatureSpec(name=column.name, table=column.name + WIDE_SUFFIX) for column in columns]
    return EmbeddingCollection(tables, features, seed=seed)


def _deep_tables(
    columns: tuple[CategoricalColumn, ...], kind: TablesSpec, width: int, seed: int
) -> EmbeddingCollection:
    tables = [kind.table(column.name, rows=column.rows, width=width) for column in columns]
    features = [FeatureSpec(name=column.name, table=column.name) for column in columns]
    return EmbeddingCollection(tables, features, seed=seed)
