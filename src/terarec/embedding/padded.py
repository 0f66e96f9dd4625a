"""Keys and sequences with as many places for every sample: what exported programs have in the place of jagged ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.embedding.output import Sequences


class PaddedSequences(NamedTuple):
    """The unpooled vectors of one feature.

    Attributes:
        values: float32[B, K, D], zeros where there is no vector.
        mask: bool[B, K], the places that hold a vector.
    """

    values: Tensor
    mask: Tensor


class PaddedKeys:
    """The keys of a batch in an exported program; stands in the place of a `terarec.batch.Jagged`.

    A model that changes keys before it looks them up does it by `without` where it gets these.

    Args:
        keys: Column to its keys int64[B, K].
        masks: Column to the places bool[B, K] that hold a key.
    """

    def __init__(self, keys: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        self.keys = keys
        self.masks = masks

    def without(self, dropped: Mapping[str, int]) -> PaddedKeys:
        """These keys but for one of each column that `dropped` names."""
        masks = {column: self.masks[column] & (self.keys[column] != key) for column, key in dropped.items()}
        return PaddedKeys(self.keys, {**self.masks, **masks})


def pad_sequences(sequences: Sequences, length: int | None = None) -> PaddedSequences:
    """`sequences` with zeros behind the vectors of each sample.

    Args:
        sequences: of one feature.
        length: number K of places, at least the longest sequence; None takes the longest of the batch, at least 1.
    """
    values, lengths = sequences.values, sequences.offsets.diff()
    batch_size, width = lengths.shape[0], values.shape[1]
    most = max(1, int(lengths.max()) if batch_size else 0) if length is None else length
    mask = torch.arange(most, device=values.device) < lengths.unsqueeze(1)
    if values.shape[0] == batch_size * most:  # no bag holds more, so each holds as many
        return PaddedSequences(values.reshape(batch_size, most, width), mask)
    starts = torch.arange(batch_size, device=values.device) * most - sequences.offsets[:-1]
    places = torch.arange(values.shape[0], device=values.device) + starts.repeat_interleave(lengths)
    padded = values.new_zeros(batch_size * most, width).index_copy(0, places, values)
    return PaddedSequences(padded.view(batch_size, most, width), mask)
