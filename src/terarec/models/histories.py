# SPDX-License-Identifier: Apache-2.0
"""Models of targets and the histories that share their tables: their common part, DIN and BST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.models.columns import check_history, join, missing_key, mlp, own_tables, owner, without_keys
from terarec.nn import MLP
from terarec.nn.attention import HistoryPooling, TargetAttention
from terarec.nn.history_pooling import HistoryTransformer
from terarec.nn.initializers import dense_distributions
from terarec.ragged import Ragged
from terarec.spec import BSTSpec, DatasetSpec, DINSpec, FeatureSpec
from terarec.spec.histories import HistoriesSpec


class TargetVectors(NamedTuple):
    """Vectors of a target and its history.

    Attributes:
        target: float[B, D].
        history: The vectors of the histories, padded in an exported program.
    """

    target: Tensor
    history: Ragged[Tensor, Tensor] | PaddedSequences


class HistoryModel(nn.Module):
    """Histories, each reduced to a vector by a module of its own that sees its target, and an MLP over all columns.

    A history shares its target's table, and so its ids. The columns that are no history are pooled as in the other
    models.

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        new_pooling: Function that makes the module of a history, with initial weights from a generator.
        kind: Kind of the model.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A column that is not there, a target of several keys a sample, or a history of other ids.
    """

    def __init__(
        self,
        spec: HistoriesSpec,
        dataset: DatasetSpec,
        new_pooling: Callable[[torch.Generator], HistoryPooling],
        *,
        kind: str,
        num_outputs: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for index, pair in enumerate(spec.sequences):
            check_history(kind, f"sequences[{index}]", pair.target, pair.history, dataset)
        columns = {column.name: column for column in dataset.categorical}
        target_of = {pair.history: pair.target for pair in spec.sequences}
        plain = [column for column in dataset.categorical if column.name not in target_of]
        self.embedding = EmbeddingCollection(
            own_tables(plain, spec.tables, width=spec.width),
            [
                *(FeatureSpec(name=c.name, table=owner(c.name, spec.tables), pooling=spec.pooling) for c in plain),
                *(
                    FeatureSpec(name=name, table=owner(target, spec.tables), pooling="none")
                    for name, target in target_of.items()
                ),
            ],
            seed=seed,
        )
        names = [column.name for column in plain]
        self._places = [(pair.history, names.index(pair.target)) for pair in spec.sequences]
        # A missing value has an id of its own, to which attention should give no weight.
        self._missing = {name: missing_key(columns[name]) for name in target_of} if spec.mask_missing else {}
        self.width = spec.width
        generator = torch.Generator().manual_seed(seed)
        poolings = [new_pooling(generator) for _ in spec.sequences]
        self.attention = nn.ModuleList(poolings)
        in_width = len(dataset.dense) + spec.width * len(plain) + sum(pooling.out_width for pooling in poolings)
        outputs = num_outputs or len(dataset.labels)
        self.deep = mlp(spec, in_width, spec.hidden, outputs, generator)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float[B, C]."""
        pooled, histories = self.look_up(batch)
        parts = []
        for pooling, (target, vectors) in zip(self.attention, histories, strict=True):
            assert isinstance(pooling, HistoryPooling)
            if isinstance(vectors, PaddedSequences):  # in an exported program
                parts.append(pooling.padded(target, vectors.values, vectors.mask))
            else:
                parts.append(pooling(target, vectors.values, vectors.offsets))
        return self.logits(batch, pooled, parts)

    def look_up(self, batch: Batch) -> tuple[Tensor, list[TargetVectors]]:
        """Return the pooled vectors float[B, S * D] of the plain columns, and those of targets and histories."""
        pooled, sequences = self.embedding(self.without_missing(batch))
        # Views: pooled vectors lie side by side in the order of the plain columns.
        targets = [pooled[:, place * self.width : (place + 1) * self.width] for _, place in self._places]
        names = [history for history, _ in self._places]
        return pooled, [TargetVectors(target, sequences[name]) for target, name in zip(targets, names, strict=True)]

    def without_missing(self, batch: Batch) -> Jagged:
        """Return the keys of a batch without those that count as padding."""
        return cast(Jagged, without_keys(batch.sparse, self._missing))

    def logits(self, batch: Batch, pooled: Tensor, histories: Sequence[Tensor]) -> Tensor:
        """Return the logits float[B, C] for the plain columns and the reduced histories float[B, out_width]."""
        logits: Tensor = self.deep(join(batch.dense, torch.cat([pooled, *histories], dim=1)))
        return logits


class DIN(HistoryModel):
    """Histories pooled by attention to a target, and an MLP over them and all other columns.

    Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978).

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`.
    """

    def __init__(self, spec: DINSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_attention(generator: torch.Generator) -> TargetAttention:
            mlp = MLP(
                4 * spec.width,
                (*spec.attention, 1),
                generator=generator,
                initial=dense_distributions(spec.init),
                activation=spec.attention_activation,
            )
            return TargetAttention(mlp, spec.width, softmax=spec.softmax)

        super().__init__(spec, dataset, new_attention, kind=spec.kind, num_outputs=num_outputs, seed=seed)


class BST(HistoryModel):
    """A transformer over each history with its target behind it, and an MLP over its output and all other columns.

    Behavior Sequence Transformer (Chen et al. 2019, arXiv 1905.06874).

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`.
    """

    def __init__(self, spec: BSTSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        def new_transformer(generator: torch.Generator) -> HistoryTransformer:
            return HistoryTransformer(
                spec.max_length,
                spec.width,
                layers=spec.layers,
                heads=spec.heads,
                inner=spec.inner,
                output=spec.output,
                rate=spec.dropout,
                generator=generator,
            )

        super().__init__(spec, dataset, new_transformer, kind=spec.kind, num_outputs=num_outputs, seed=seed)
