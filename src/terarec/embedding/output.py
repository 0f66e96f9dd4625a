"""What a lookup of a collection gives, and how it is put together from the lookups of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged, first_keys, select
from terarec.embedding.grouping import LookupGroup
from terarec.spec import FeatureSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The unpooled vectors of one feature: sample b holds ``values[offsets[b] : offsets[b + 1]]``.

    Attributes:
        values: float32[n, D] for the feature's n keys.
        offsets: int64[B + 1].
    """

    values: Tensor
    offsets: Tensor


class EmbeddingOutput(NamedTuple):
    """What a lookup gives.

    Attributes:
        pooled: float32[B, sum(D)], the pooled features side by side in feature order.
        sequences: unpooled feature -> its vectors.
    """

    pooled: Tensor
    sequences: Mapping[str, Sequences]


def bags_of(jagged: Jagged, group: LookupGroup) -> Jagged:
    """The bags of the features of `group`, those that are limited cut to their first keys."""
    part = select(jagged, group.layout.feature_names)
    return part if group.max_keys is None else first_keys(part, group.max_keys)


def assemble(
    features: Sequence[FeatureSpec],
    looked_up: Sequence[tuple[LookupGroup, Jagged, Tensor]],
    jagged: Jagged,
) -> EmbeddingOutput:
    """One output from the vectors of all groups.

    Args:
        features: in the order of the output's columns.
        looked_up: each group with its bags and what `terarec.ops.bag_lookup` gave for them.
        jagged: what was looked up; gives the size and the device of the output where no feature is pooled.
    """
    if len(looked_up) == 1 and looked_up[0][0].layout.is_pooled:
        return EmbeddingOutput(looked_up[0][2], {})
    pooled: dict[tuple[str, ...], Tensor] = {}
    sequences: dict[str, Sequences] = {}
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
        name: Sequences(values=held.values.to(dtype), offsets=held.offsets) for name, held in output.sequences.items()
    }
    return EmbeddingOutput(output.pooled.to(dtype), sequences)


def _in_feature_order(features: Sequence[FeatureSpec], pooled: Mapping[tuple[str, ...], Tensor]) -> Tensor:
    """The columns of several groups; of one, they are in order already."""
    if len(pooled) == 1:
        return next(iter(pooled.values()))
    columns: dict[str, Tensor] = {}
    for names, vectors in pooled.items():
        columns.update(zip(names, torch.split(vectors, vectors.shape[1] // len(names), dim=1), strict=True))
    return torch.cat([columns[feature.name] for feature in features if feature.name in columns], dim=1)


def _split_sequences(part: Jagged, vectors: Tensor) -> dict[str, Sequences]:
    """Cut ``vectors float32[N, D]`` of several features into one `Sequences` each."""
    batch_size = part.batch_size
    starts = part.offsets[::batch_size] if batch_size else part.offsets.expand(len(part.names) + 1)
    values = torch.split(vectors, starts.diff().tolist())
    return {
        name: Sequences(
            values=values[index],
            offsets=part.offsets[index * batch_size : (index + 1) * batch_size + 1] - starts[index],
        )
        for index, name in enumerate(part.names)
    }
