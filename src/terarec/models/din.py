# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.models.columns import check_history, join, missing_key, mlp, without_keys
from terarec.nn import MLP
from terarec.nn.attention import TargetAttention
from terarec.nn.initializers import dense_distributions
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec, DINSpec, FeatureSpec


class DIN(nn.Module):
    """Histories pooled by attention to a target, and an MLP over them and all other columns.

    A history shares its target's table, and so its ids. Every history has an attention of its own. The columns that are
    no history are pooled as in the other models.

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A column that is not there, a target of several keys a sample, or a history of other ids.
    """

    def __init__(self, spec: DINSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__()
        for index, pair in enumerate(spec.sequences):
            check_history("din", f"sequences[{index}]", pair.target, pair.history, dataset)
        columns = {column.name: column for column in dataset.categorical}
        table_of = {pair.history: pair.target for pair in spec.sequences}
        plain = [column for column in dataset.categorical if column.name not in table_of]
        self.embedding = EmbeddingCollection(
            [spec.tables.table(column.name, rows=column.rows, width=spec.width) for column in plain],
            [
                *(FeatureSpec(name=column.name, table=column.name, pooling=spec.pooling) for column in plain),
                *(FeatureSpec(name=name, table=table, pooling="none") for name, table in table_of.items()),
            ],
            seed=seed,
        )
        names = [column.name for column in plain]
        self._places = [(pair.history, names.index(pair.target)) for pair in spec.sequences]
        # A missing value has an id of its own, to which attention should give no weight.
        self._missing = {name: missing_key(columns[name]) for name in table_of} if spec.mask_missing else {}
        self.width = spec.width
        generator = torch.Generator().manual_seed(seed)
        self.attention = nn.ModuleList(
            TargetAttention(
                MLP(
                    4 * spec.width,
                    (*spec.attention, 1),
                    generator=generator,
                    initial=dense_distributions(spec.init),
                    activation=spec.attention_activation,
                ),
                softmax=spec.softmax,
            )
            for _ in spec.sequences
        )
        in_width = len(dataset.dense) + spec.width * (len(plain) + len(spec.sequences))
        outputs = num_outputs or len(dataset.labels)
        self.deep = mlp(spec, in_width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        pooled, sequences = self.embedding(without_keys(batch.sparse, self._missing))
        parts = [pooled]
        for module, (history, place) in zip(self.attention, self._places, strict=True):
            attention = cast(TargetAttention, module)
            # A view: pooled vectors lie side by side in the order of the plain columns.
            target = pooled[:, place * self.width : (place + 1) * self.width]
            vectors: Ragged[Tensor, Tensor] | PaddedSequences = sequences[history]
            if isinstance(vectors, PaddedSequences):  # in an exported program
                parts.append(attention.padded(target, vectors.values, vectors.mask))
            else:
                parts.append(attention(target, vectors.values, vectors.offsets))
        logits: Tensor = self.deep(join(batch.dense, torch.cat(parts, dim=1)))
        return logits
