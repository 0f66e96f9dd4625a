# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.models.columns import join, mlp
from terarec.nn import MLP
from terarec.nn.attention import TargetAttention
from terarec.nn.initializers import dense_distributions
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, DatasetSpec, DINSpec, FeatureSpec
from terarec.spec.checks import did_you_mean
from terarec.spec.dataset import MISSING_ID, MISSING_KEY


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
        _check_columns(spec, dataset)
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
        self._missing = {name: _missing(columns[name]) for name in table_of} if spec.mask_missing else {}
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
        pooled, sequences = self.embedding(_without(batch.sparse, self._missing))
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


def _check_columns(spec: DINSpec, dataset: DatasetSpec) -> None:
    columns = {column.name: column for column in dataset.categorical}
    for index, pair in enumerate(spec.sequences):
        for role, name in (("target", pair.target), ("history", pair.history)):
            if name not in columns:
                raise ConfigError(
                    "din",
                    f"sequences[{index}].{role}: data set {dataset.name!r} has no categorical column {name!r}"
                    f"{did_you_mean(name, columns)}, expected one of {', '.join(columns) or 'some'}",
                )
        target, history = columns[pair.target], columns[pair.history]
        if target.hotness > 1:
            raise ConfigError(
                "din",
                f"sequences[{index}].target: {pair.target!r} is a list of up to {target.hotness} keys, expected a "
                "column of one key a sample",
            )
        if target.rows != history.rows:
            raise ConfigError(
                "din",
                f"sequences[{index}]: {pair.target!r} has {_ids(target)}, {pair.history!r} has {_ids(history)}, "
                "expected both to have the same ids (one vocabulary for both columns)",
            )


def _ids(column: CategoricalColumn) -> str:
    return "any keys" if column.rows is None else f"{column.rows} ids"


def _missing(column: CategoricalColumn) -> int:
    return MISSING_KEY if column.rows is None else MISSING_ID


def _without(jagged: Jagged | PaddedKeys, missing: Mapping[str, int]) -> Jagged | PaddedKeys:
    """Return `jagged` without the keys `missing` of the features that it names."""
    if not missing:
        return jagged
    if isinstance(jagged, PaddedKeys):
        return jagged.without(missing)
    keys = jagged.keys
    # Bags are feature-major: the feature of each bag, then the one of each key.
    features = torch.arange(len(jagged.names), device=keys.device).repeat_interleave(jagged.batch_size)
    feature = features.repeat_interleave(jagged.offsets.diff())
    is_named = torch.tensor([name in missing for name in jagged.names], device=keys.device)
    # 0 for a feature that is not named only fills the place; `is_named` is False there.
    dropped_key = torch.tensor([missing.get(name, 0) for name in jagged.names], device=keys.device)
    kept = ~(is_named[feature] & (keys == dropped_key[feature]))
    # The number of kept keys before an old offset is the new one.
    ends = torch.cat([jagged.offsets[:1], kept.cumsum(0)])
    weights = None if jagged.weights is None else jagged.weights[kept]
    return dataclasses.replace(jagged, keys=keys[kept], offsets=ends[jagged.offsets], weights=weights, ends=None)
