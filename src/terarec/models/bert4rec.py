# SPDX-License-Identifier: Apache-2.0
"""BERT4Rec (Sun et al. 2019, arXiv 1904.06690)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from terarec.batch import Jagged
from terarec.models.sequences import PaddedEncoder, SequenceModel, SequenceVectors
from terarec.nn.initializers import normal
from terarec.nn.sequences import Transformer, append_last
from terarec.ragged import Ragged
from terarec.spec import BERT4RecSpec, DatasetSpec


class BERT4Rec(SequenceModel):
    """A bidirectional transformer over the history and a mask behind it, whose vector predicts the item.

    Training masks items of history and item at random, at least one in each sample, and predicts these from the rest.

    Arguments and errors are those of `SequenceModel`.
    """

    def __init__(
        self, spec: BERT4RecSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        encoder = Transformer(
            # The mask takes a position of its own.
            spec.max_length + 1,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            inner=spec.inner,
            causal=False,
            rate=spec.dropout,
            generator=generator,
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
        self.mask = nn.Parameter(torch.empty(spec.width))
        normal(0.02).fill_(self.mask, generator)
        self.mask_probability = spec.mask

    @override
    def vectors(self, history: Ragged[Tensor, Tensor], item: Tensor, jagged: Jagged) -> SequenceVectors:
        num_items = history.values.shape[0]
        lengths = history.offsets.diff()
        sequence, offsets = append_last(history.values, history.offsets, item)
        keys, _ = append_last(jagged.keys[:num_items], history.offsets, jagged.keys[num_items:])
        ends = offsets[1:] - 1
        owners = torch.repeat_interleave(offsets.diff(), output_size=sequence.shape[0])
        is_masked = self._masks(offsets, owners, ends)
        masked = torch.where(is_masked.unsqueeze(1), self.mask.to(sequence.dtype), sequence)
        hidden = self._scaled(self.encoder(masked, offsets).to(item.dtype)) / self.spec.temperature
        user = hidden.index_select(0, ends) * (lengths > 0).unsqueeze(1)
        chosen = is_masked.nonzero().flatten()
        positions, targets, of_positions, of_samples = (
            of_all.index_select(0, chosen) for of_all in (hidden, self._scaled(sequence), keys, owners)
        )
        return SequenceVectors(user, self._scaled(item), positions, targets, of_positions, of_samples)

    def _masks(self, offsets: Tensor, owners: Tensor, ends: Tensor) -> Tensor:
        """Return the masked positions: the last ones in evaluation, random ones in training."""
        is_end = torch.zeros(owners.shape[0], dtype=torch.bool, device=owners.device).index_fill(0, ends, True)
        if not self.training:
            return is_end
        is_drawn = torch.rand(owners.shape, device=owners.device) < self.mask_probability
        number = torch.zeros(len(ends), dtype=torch.int64, device=owners.device).index_add(0, owners, is_drawn.long())
        return is_drawn | (is_end & (number == 0)[owners])

    @override
    def last_padded(self, vectors: Tensor, lengths: Tensor, encode: PaddedEncoder) -> Tensor:
        longer = nn.functional.pad(vectors, (0, 0, 0, 1))
        is_end = torch.arange(longer.shape[1], device=lengths.device) == lengths.unsqueeze(1)
        masked = torch.where(is_end.unsqueeze(2), self.mask, longer)
        return super().last_padded(masked, lengths + 1, encode) * (lengths > 0).unsqueeze(1)
