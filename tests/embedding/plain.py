# SPDX-License-Identifier: Apache-2.0
"""The reference of a collection: one `nn.EmbeddingBag` per table, trained by `torch.optim`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.spec import FeatureSpec


def random_jagged(
    names: Sequence[str], rows: Sequence[int], batch_size: int, *, most: int = 4, seed: int = 0
) -> Jagged:
    """Bags of 0 to `most` keys, with many repeats."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(names) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    keys = [
        torch.randint(0, count, (int(part.sum()),), generator=generator)
        for count, part in zip(rows, lengths.view(len(names), batch_size), strict=True)
    ]
    return Jagged(names=tuple(names), keys=torch.cat(keys), offsets=offsets)


class PlainCollection(nn.Module):
    """Tables and features of a collection on torch's own layers, with dense gradients."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.features = collection.features
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(table.weights.clone()) for name, table in collection.tables.items()}
        )

    def bags(self, jagged: Jagged, feature: FeatureSpec) -> tuple[Tensor, Tensor]:
        """Return keys int64[n] and offsets int64[B + 1] of one feature."""
        position, size = jagged.names.index(feature.name), jagged.batch_size
        offsets = jagged.offsets[position * size : (position + 1) * size + 1]
        return jagged.keys[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]

    def forward(self, jagged: Jagged) -> tuple[Tensor, dict[str, Tensor]]:
        """Pooled columns in feature order, and the unpooled vectors."""
        columns, sequences = [], {}
        for feature in self.features:
            keys, offsets = self.bags(jagged, feature)
            weight = self.weights[feature.table]
            if feature.pooling == "none":
                sequences[feature.name] = weight[keys]
                continue
            mode = "sum" if feature.pooling == "sqrtn" else feature.pooling
            column = embedding_bag(keys, weight, offsets, mode=mode, include_last_offset=True)
            if feature.pooling == "sqrtn":
                column = column / offsets.diff().clamp(min=1).sqrt()[:, None]
            columns.append(column)
        return torch.cat(columns, dim=1) if columns else torch.empty(jagged.batch_size, 0), sequences
