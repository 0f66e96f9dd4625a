# SPDX-License-Identifier: Apache-2.0
"""DLRM (Naumov et al. 2019, arXiv 1906.00091), and DLRM-DCNv2 of the MLPerf training benchmark."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.models.columns import embeddings, join, mlp, multi_cross
from terarec.nn import DotInteraction
from terarec.spec import DatasetSpec, DLRMDCNV2Spec, DLRMSpec


class DLRM(nn.Module):
    """Bottom MLP over the dense columns, one table a categorical column, interaction, top MLP.

    Without dense columns there is no bottom MLP, and the vectors of the categorical ones interact alone; without
    categorical columns the top MLP reads the bottom one. Dropout is in the top MLP.

    Args:
        spec: Widths and layers.
        dataset: Columns; each categorical one gets a table of its name.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: One vector alone for the interaction "dot".
    """

    def __init__(self, spec: DLRMSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        outputs, num_keys, num_dense = num_outputs or len(dataset.labels), len(dataset.categorical), len(dataset.dense)
        num_vectors = num_keys + bool(num_dense)
        is_dot = spec.interaction == "dot" and num_keys > 0
        if is_dot and num_vectors < 2:
            raise ConfigError(
                "dlrm",
                f"data set {dataset.name!r} has one categorical and no dense column, whose vector has no pair, "
                "expected two columns, or interaction 'cat'",
            )
        generator = torch.Generator().manual_seed(seed)
        self.bottom = mlp(spec, num_dense, spec.bottom, None, generator) if num_dense else None
        if self.bottom is not None:
            # `mlp` gives the spec's dropout to every MLP, and it is meant for the top one.
            self.bottom.dropout = 0.0
        self.embedding = embeddings(spec, dataset, seed=seed)
        self.interaction = DotInteraction(num_vectors, spec.width) if is_dot else None
        width = num_vectors * spec.width if self.interaction is None else self.interaction.out_width
        # The interaction puts its first vector before the dots; without a bottom MLP that is a column like others.
        if self.interaction is not None and self.bottom is None:
            width -= spec.width
        self.width = spec.width
        self.top = mlp(spec, width, spec.top, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        logits: Tensor = self.top(self._interact(batch))
        return logits

    def _interact(self, batch: Batch) -> Tensor:
        first: Tensor | None = None if self.bottom is None else self.bottom(batch.dense)
        if self.embedding is None:
            assert first is not None  # a data set has columns
            return first
        pooled: Tensor = self.embedding(batch.sparse).pooled
        if self.interaction is None:
            return pooled if first is None else torch.cat([first.to(pooled.dtype), pooled], dim=1)
        if first is not None:
            interacted: Tensor = self.interaction(first, pooled)
            return interacted
        dots: Tensor = self.interaction(pooled[:, : self.width], pooled[:, self.width :])
        return dots[:, self.width :]  # without the first vector itself, which represents no dense columns here


class DLRMDCNV2(nn.Module):
    """Bottom MLP over the dense columns, low-rank cross layers over its output and all vectors, top MLP.

    The interaction is that of DCN V2 (Wang et al. 2021, arXiv 2008.13535). Without dense columns there is no bottom
    MLP. Dropout is in the top MLP.

    Args:
        spec: Widths and layers.
        dataset: Columns; each categorical one gets a table of its name.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.
    """

    def __init__(
        self, spec: DLRMDCNV2Spec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        outputs, num_dense = num_outputs or len(dataset.labels), len(dataset.dense)
        generator = torch.Generator().manual_seed(seed)
        self.bottom = mlp(spec, num_dense, spec.bottom, None, generator) if num_dense else None
        if self.bottom is not None:
            # `mlp` gives the spec's dropout to every MLP, and it is meant for the top one.
            self.bottom.dropout = 0.0
        self.embedding = embeddings(spec, dataset, seed=seed)
        width = spec.width * (len(dataset.categorical) + bool(num_dense))
        self.cross = multi_cross(spec, width, spec.cross_layers, spec.rank, generator)
        self.top = mlp(spec, width, spec.top, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        x = batch.dense if self.bottom is None else self.bottom(batch.dense)
        if self.embedding is not None:
            x = join(x, self.embedding(batch.sparse).pooled)
        logits: Tensor = self.top(self.cross(x))
        return logits
