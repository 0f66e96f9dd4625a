# SPDX-License-Identifier: Apache-2.0
"""Deep Interest Evolution Network (Zhou et al. 2019, arXiv 1809.03672)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from terarec.batch import Batch, Jagged, select
from terarec.embedding import PaddedSequences
from terarec.models.columns import one_key_bags, samples_of_keys
from terarec.models.histories import HistoryModel
from terarec.nn.history_pooling import InterestEvolution
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.nn.sequences import last_positions
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec, DIENSpec
from terarec.spec.dataset import FIRST_ID


class Interests(NamedTuple):
    """Output of the model in training.

    Attributes:
        logits: float[B, C].
        auxiliary: float32[B], the auxiliary loss of each sample.
    """

    logits: Tensor
    auxiliary: Tensor


class DIEN(HistoryModel):
    """Two recurrent layers over each history, the second gated by the target, and an MLP over all columns.

    In training each state of the first layer predicts the next item of its history by its dot with the item's vector
    (eq. 3 and 4 of the paper).

    Args:
        spec: Widths and layers, targets and their histories.
        dataset: Columns.
        num_outputs: Number of outputs C; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: See `HistoryModel`; or negatives that the columns cannot give.
    """

    def __init__(self, spec: DIENSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        super().__init__(
            spec,
            dataset,
            lambda generator: InterestEvolution(spec.max_length, spec.width, generator=generator),
            kind=spec.kind,
            num_outputs=num_outputs,
            seed=seed,
        )
        self.spec = spec
        self.histories = [pair.history for pair in spec.sequences]
        columns = {column.name: column for column in dataset.categorical}
        self._columns = [(pair.target, columns[pair.history]) for pair in spec.sequences]
        self.samplers = nn.ModuleList()
        if spec.auxiliary:
            self.samplers.extend(
                Sampler(spec.negatives, FIRST_ID, column.rows, where=f"{spec.kind}: negatives")
                for _, column in self._columns
            )

    def forward(self, batch: Batch) -> Tensor | Interests:  # type: ignore[override]
        """Return the logits float[B, C], in training with the auxiliary loss."""
        if not self.training or not self.samplers or torch.compiler.is_exporting():
            return super().forward(batch)
        spec, jagged = self.spec, self.without_missing(batch)
        pooled, histories = self.look_up(batch)
        reduced, losses = [], batch.label.new_zeros(batch.batch_size)
        for place, (target, vectors) in enumerate(histories):
            assert not isinstance(vectors, PaddedSequences)
            pooling = self.attention[place]
            assert isinstance(pooling, InterestEvolution)
            recent = Ragged(*last_positions(vectors.values, vectors.offsets, spec.max_length))
            states = pooling.states(*recent)
            reduced.append(pooling.evolved(target, states, recent.offsets))
            losses = losses + self._next_items(place, jagged, recent, states)
        return Interests(self.logits(batch, pooled, reduced), losses)

    def output_logits(self, output: Tensor | Interests) -> Tensor:
        """Return the logits float[B, C]."""
        return output.logits if isinstance(output, Interests) else output

    def auxiliary_loss(self, output: Tensor | Interests, batch: Batch) -> Tensor:
        """Return `auxiliary` times the mean over the samples, a scalar; 0 in evaluation."""
        if not isinstance(output, Interests):
            return torch.zeros((), device=output.device)
        losses = output.auxiliary if batch.weight is None else output.auxiliary * batch.weight
        return losses.mean() * self.spec.auxiliary

    def _next_items(self, place: int, jagged: Jagged, vectors: Ragged[Tensor, Tensor], states: Tensor) -> Tensor:
        """Return for each sample the mean over the positions of its history that have a next one: float32[B]."""
        values, offsets = vectors.values, vectors.offsets
        size, total = jagged.batch_size, values.shape[0]
        samples = torch.repeat_interleave(offsets.diff(), output_size=total)
        is_last = torch.zeros(total + 1, dtype=torch.bool, device=values.device)
        is_last[offsets[1:] - 1] = True  # of an empty history that of the one before, or no position
        before = (~is_last[:total]).nonzero().flatten()
        of_next, owners = states[before].float(), samples[before]
        negatives, is_valid = self._drawn(place, jagged, owners, of_next)
        own = (of_next * values[before + 1].float()).sum(1)
        others = (of_next.unsqueeze(1) * negatives.float()).sum(2)
        losses = softplus(-own) + (softplus(others) * is_valid).sum(1) / is_valid.sum(1).clamp_min(1)
        counts = torch.zeros(size, device=losses.device).index_add(0, owners, torch.ones_like(losses))
        return torch.zeros_like(counts).index_add(0, owners, losses) / counts.clamp_min(1)

    def _drawn(self, place: int, jagged: Jagged, owners: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors float[n, count, D] of items that the samples `owners` do not have, and which of them count."""
        sampler, (target, column) = self.samplers[place], self._columns[place]
        assert isinstance(sampler, Sampler)
        pair = select(jagged, (column.name, target))
        keys = pair.keys
        items = keys[: len(keys) - jagged.batch_size]
        distinct, stride = None, column.rows
        if stride is None:
            # Any keys are numbered, as samplers draw among numbers.
            distinct, keys = torch.unique(keys, return_inverse=True)
            items, stride = keys[: len(items)], len(distinct)
        sampler.observe(items)
        count = self.spec.negatives.count
        many = owners.repeat_interleave(count)

        def score(keys: Tensor) -> Tensor:
            vectors = self._vectors_of(column.name, jagged, keys.flatten()).view(*keys.shape, self.width)
            return (states.repeat_interleave(count, dim=0).unsqueeze(1) * vectors).sum(2)

        drawn, is_valid = sampler.draw(
            many,
            [Owned(samples_of_keys(pair), keys, stride)],
            Candidates(batch=items, score=score),
        )
        if distinct is not None:
            drawn = distinct[drawn]
        values = self._vectors_of(column.name, jagged, drawn).view(len(owners), count, self.width)
        return values, is_valid.view(len(owners), count)

    def _vectors_of(self, history: str, jagged: Jagged, keys: Tensor) -> Tensor:
        """Look keys up in the table of a history: int64[n] -> float[n, D]."""
        values: Tensor = self.embedding(one_key_bags(jagged.names, history, keys)).sequences[history].values
        return values
