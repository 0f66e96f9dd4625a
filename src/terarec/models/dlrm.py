"""DLRM (Naumov et al. 2019, arXiv 1906.00091)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.nn import MLP, DotInteraction
from terarec.spec import DatasetSpec, DLRMSpec, FeatureSpec


class DLRM(nn.Module):
    """Bottom MLP over the dense columns, one table a categorical column, pairwise dots, top MLP.

    Args:
        spec: widths.
        dataset: columns; each categorical one gets a table of its name and rows, summed over the sample's keys.
        seed: of the first weights.

    Raises:
        ConfigError: a data set without dense or without categorical columns.
    """

    def __init__(self, spec: DLRMSpec, dataset: DatasetSpec, *, seed: int = 0) -> None:
        super().__init__()
        if not dataset.dense or not dataset.categorical:
            missing = "categorical" if dataset.dense else "dense"
            raise ConfigError(f"DLRM: data set {dataset.name!r} has no {missing} column, expected at least one")
        generator = torch.Generator().manual_seed(seed)
        self.bottom = MLP(len(dataset.dense), spec.bottom, generator=generator, relus=(True,) * len(spec.bottom))
        self.embedding = EmbeddingCollection(
            [spec.tables.table(column.name, rows=column.rows, width=spec.width) for column in dataset.categorical],
            [FeatureSpec(name=column.name, table=column.name) for column in dataset.categorical],
            seed=seed,
        )
        self.interaction = DotInteraction(len(dataset.categorical) + 1, spec.width)
        self.top = MLP(self.interaction.out_width, (*spec.top, len(dataset.labels)), generator=generator)

    def forward(self, batch: Batch) -> Tensor:
        """Logits float[B, L]."""
        pooled = self.embedding(batch.sparse).pooled
        logits: Tensor = self.top(self.interaction(self.bottom(batch.dense), pooled))
        return logits
