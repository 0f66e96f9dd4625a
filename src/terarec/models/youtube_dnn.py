# SPDX-License-Identifier: Apache-2.0
"""YouTubeDNN (Covington et al. 2016, "Deep neural networks for YouTube recommendations", RecSys)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.models.columns import check_known, join, mlp, one_key_bags, own_tables, owner
from terarec.models.next_items import NextItemModel, NextItemVectors
from terarec.spec import DatasetSpec, FeatureSpec, YouTubeDNNSpec


class YouTubeDNN(NextItemModel):
    """An MLP over the mean of the history's vectors and further columns of the user.

    The history shares the item's table.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `NextItemModel`; or a column of the user that is not there.
    """

    _dense: Tensor

    def __init__(
        self, spec: YouTubeDNNSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(spec, dataset, num_outputs=num_outputs)
        check_known(spec.kind, "user", spec.user, dataset)
        self.spec = spec
        dense = [index for index, column in enumerate(dataset.dense) if column.name in spec.user]
        # Not persistent: the spec has the columns.
        self.register_buffer("_dense", torch.tensor(dense, dtype=torch.int64), persistent=False)
        of_item = owner(spec.item, spec.tables)
        others = [column for column in dataset.categorical if column.name in spec.user]
        self.embedding = EmbeddingCollection(
            own_tables(
                [column for column in dataset.categorical if column.name == spec.item or column in others],
                spec.tables,
                width=spec.width,
            ),
            [
                FeatureSpec(name=spec.item, table=of_item, pooling="sum"),
                FeatureSpec(name=spec.history, table=of_item, pooling="mean"),
                *(FeatureSpec(name=c.name, table=owner(c.name, spec.tables), pooling=spec.pooling) for c in others),
            ],
            seed=seed,
        )
        self.names = tuple(feature.name for feature in self.embedding.features)
        generator = torch.Generator().manual_seed(seed)
        self.mlp = mlp(spec, len(dense) + spec.width * (1 + len(others)), spec.hidden, spec.width, generator)

    def forward(self, batch: Batch) -> NextItemVectors:
        """Return the vectors of users, divided by the temperature, and of items."""
        pooled = self.embedding(self.without_missing(batch)).pooled
        width = self.spec.width
        user = self.mlp(join(batch.dense.index_select(1, self._dense), pooled[:, width:]))
        return NextItemVectors(self._scaled(user) / self.spec.temperature, self._scaled(pooled[:, :width]))

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        pooled = self.embedding(one_key_bags(self.names, self.item_key, keys)).pooled
        return self._scaled(pooled[:, : self.spec.width])

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=1) if self.spec.similarity == "cosine" else vectors
