# SPDX-License-Identifier: Apache-2.0
"""The result of a collection's lookup, and padded keys and sequences for exported programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged, first_keys, known_ends, select
from terarec.embedding.tables import LookupGroup
from terarec.ragged import Ragged
from terarec.spec import FeatureSpec


class EmbeddingOutput(NamedTuple):
    """The result of a lookup.

    Attributes:
        pooled: float32[B, sum(D)], the pooled features side by side in feature order.
        sequences: Unpooled feature -> the vectors float32[n, D] of its n keys, as B lists with offsets int64[B + 1].
    """

    pooled: Tensor
    sequences: Mapping[str, Ragged[Tensor, Tensor]]


def bags_of(jagged: Jagged, group: LookupGroup) -> Jagged:
    """Return the bags of the features of `group`, truncated to `max_keys` where a feature has it."""
    part = select(jagged, group.layout.feature_names)
    return part if group.max_keys is None else first_keys(part, group.max_keys)


def assemble(
    features: Sequence[FeatureSpec],
    looked_up: Sequence[tuple[LookupGroup, Jagged, Tensor]],
    jagged: Jagged,
) -> EmbeddingOutput:
    """Assemble the output from the vectors of all groups.

    Args:
        features: Features, in the order of the output's columns.
        looked_up: Groups, each with its bags and the result of `terarec.ops.bag_lookup`.
        jagged: Keys that were looked up; they define the size and the device of the output where no feature is pooled.
    """
    # Most models have one group, whose vectors are the output without a copy.
    if len(looked_up) == 1 and looked_up[0][0].layout.is_pooled:
        return EmbeddingOutput(looked_up[0][2], {})
    pooled: dict[tuple[str, ...], Tensor] = {}
    sequences: dict[str, Ragged[Tensor, Tensor]] = {}
    for group, part, vectors in looked_up:
        if group.layout.is_pooled:
            pooled[group.layout.feature_names] = vectors
        else:
            sequences.update(_split_sequences(part, vectors))
    nothing = torch.empty(jagged.batch_size, 0, device=jagged.keys.device)
    return EmbeddingOutput(pooled=_in_feature_order(features, pooled) if pooled else nothing, sequences=sequences)


def cast(output: EmbeddingOutput, dtype: torch.dtype) -> EmbeddingOutput:
    """Return `output` with vectors of type `dtype`."""
    sequences = {
        name: Ragged(sequence.values.to(dtype), sequence.offsets) for name, sequence in output.sequences.items()
    }
    return EmbeddingOutput(output.pooled.to(dtype), sequences)


def _in_feature_order(features: Sequence[FeatureSpec], pooled: Mapping[tuple[str, ...], Tensor]) -> Tensor:
    """Return the columns of all groups in feature order; those of a single group are in order."""
    if len(pooled) == 1:
        return next(iter(pooled.values()))
    columns: dict[str, Tensor] = {}
    for names, vectors in pooled.items():
        columns.update(zip(names, torch.split(vectors, vectors.shape[1] // len(names), dim=1), strict=True))
    return torch.cat([columns[feature.name] for feature in features if feature.name in columns], dim=1)


def _split_sequences(part: Jagged, vectors: Tensor) -> dict[str, Ragged[Tensor, Tensor]]:
    """Cut ``vectors float32[N, D]`` of several features into the lists of each."""
    batch_size = part.batch_size
    # Of an empty batch the only offset, 0, for each feature.
    starts = part.offsets[::batch_size] if batch_size else part.offsets.expand(len(part.names) + 1)
    ends = known_ends(part)
    # Lengths in host memory: where they are not known, this waits for a GPU.
    values = torch.split(vectors, starts.diff().tolist() if ends is None else [b - a for a, b in pairwise(ends)])
    return {
        name: Ragged(values[index], part.offsets[index * batch_size : (index + 1) * batch_size + 1] - starts[index])
        for index, name in enumerate(part.names)
    }


class PaddedSequences(NamedTuple):
    """The unpooled vectors of one feature.

    Attributes:
        values: float32[B, K, D], zeros where there is no vector.
        mask: bool[B, K], the positions that have a vector.
    """

    values: Tensor
    mask: Tensor


class PaddedKeys:
    """The keys of a batch in an exported program; replaces a `terarec.batch.Jagged`.

    A model that removes keys before the lookup calls `without` on these.

    Args:
        keys: Column -> its keys int64[B, K].
        masks: Column -> the positions bool[B, K] that have a key.
    """

    def __init__(self, keys: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        self.keys = keys
        self.masks = masks

    def without(self, dropped: Mapping[str, int]) -> PaddedKeys:
        """Return the keys without one key of each column of `dropped`."""
        masks = {column: self.masks[column] & (self.keys[column] != key) for column, key in dropped.items()}
        return PaddedKeys(self.keys, {**self.masks, **masks})


def pad_sequences(sequences: Ragged[Tensor, Tensor], length: int | None = None) -> PaddedSequences:
    """Pad the sequences of a feature with zeros to one length.

    Args:
        sequences: Vectors [n, D] of one feature, as B lists.
        length: Length K, at least that of the longest sequence; None for the longest of the batch, at least 1.
    """
    values, lengths = sequences.values, sequences.offsets.diff()
    batch_size, width = lengths.shape[0], values.shape[1]
    most = max(1, int(lengths.max()) if batch_size else 0) if length is None else length
    mask = torch.arange(most, device=values.device) < lengths.unsqueeze(1)
    if values.shape[0] == batch_size * most:  # no bag has more, so each has this many
        return PaddedSequences(values.reshape(batch_size, most, width), mask)
    # The distance from a vector to its place: row b begins at b * K instead of at its offset.
    starts = torch.arange(batch_size, device=values.device) * most - sequences.offsets[:-1]
    places = torch.arange(values.shape[0], device=values.device) + starts.repeat_interleave(lengths)
    padded = values.new_zeros(batch_size * most, width).index_copy(0, places, values)
    return PaddedSequences(padded.view(batch_size, most, width), mask)
