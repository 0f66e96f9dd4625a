# SPDX-License-Identifier: Apache-2.0
"""Models that predict the next item of a history: their common part, GRU4Rec, SASRec and HSTU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, softplus
from typing_extensions import override

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.models.columns import (
    at_places,
    categorical_column,
    check_history,
    check_one_label,
    check_times,
    item_ids,
    own_tables,
    padded_keys_of,
    samples_of_keys,
    without_keys,
)
from terarec.models.retrieving import RetrievalModel
from terarec.nn import sequences
from terarec.nn.losses import dots, noise_contrastive_loss, sampled_softmax_loss
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.nn.sequences import RecurrentEncoder, SequenceEncoder, Transformer, last_positions, recent_padded
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec, FeatureSpec, GRU4RecSpec, HSTUSpec, SASRecSpec
from terarec.spec.sequences import SHARED_DRAWS, SequenceSpec


class SequenceVectors(NamedTuple):
    """Output of a sequence model for a batch.

    Attributes:
        user: float[B, D], vectors of the histories, divided by the temperature; zeros for an empty history.
        item: float[B, D], vectors of the items.
        positions: float[P, D], vectors that predict an item each, divided by the temperature.
        targets: float[P, D], vectors of these items.
        keys: int64[P], the items.
        samples: int64[P], the sample of each.
    """

    user: Tensor
    item: Tensor
    positions: Tensor
    targets: Tensor
    keys: Tensor
    samples: Tensor


PaddedEncoder: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Vectors float[B, K, D] of padded sequences, and their lengths int64[B], -> a vector for each position."""


class SequenceModel(RetrievalModel):
    """A vector of the history, whose dot with that of an item is the score of the item to come next.

    A sample has a history and the item that follows it; histories are lists, not padded. In training each position
    of a history predicts the next one, and the last one the item. Samples with a label above 0 have a loss. The other
    columns of a data set are not read.

    Args:
        spec: Columns, layers and loss.
        dataset: Columns, with one label.
        encoder: Encoder of the histories.
        num_outputs: Number of outputs, which is 1; None for one a label.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A column that is not there, several outputs, a history of other ids, a loss over items whose number
            is unknown, or no second item.
    """

    def __init__(
        self,
        spec: SequenceSpec,
        dataset: DatasetSpec,
        encoder: SequenceEncoder,
        *,
        kind: str,
        num_outputs: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_one_label(kind, dataset, num_outputs)
        check_history(kind, "", spec.item, spec.history, dataset)
        item = categorical_column(kind, "item", spec.item, dataset, one_key=True)
        self.first_item, self.num_items = item_ids(kind, item, dataset)
        self.item_key, self.history = spec.item, spec.history
        self.user_columns, self.item_columns = (spec.history,), (spec.item,)
        self.spec = spec
        self.encoder = encoder
        self.missing = dataset.missing_key(spec.history)
        self.sampler = Sampler(spec.negatives, self.first_item, self.num_items, where=f"{kind}: negatives")
        self.embedding = EmbeddingCollection(
            own_tables([item], spec.tables, width=spec.width),
            [FeatureSpec(name=name, table=item.name, pooling="none") for name in (spec.history, spec.item)],
            seed=seed,
        )

    def forward(self, batch: Batch) -> SequenceVectors:
        """Return the vectors of histories and items, and of the positions that the loss is over."""
        if isinstance(batch.sparse, PaddedKeys):  # in an exported program
            return self._padded(batch.sparse)
        jagged = self.recent(batch.sparse)
        sequences = self.embedding(jagged).sequences
        return self.vectors(sequences[self.history], sequences[self.item_key].values, jagged)

    def vectors(self, history: Ragged[Tensor, Tensor], item: Tensor, jagged: Jagged) -> SequenceVectors:
        """Return the output for the vectors of histories and items; `jagged` has their keys."""
        values, offsets = history
        # Under autocast an encoder may return 16 bits.
        hidden = self._scaled(self.encoded(values, offsets, jagged).to(item.dtype)) / self.spec.temperature
        has_end = offsets.diff() > 0
        ends = offsets[1:][has_end] - 1
        user = torch.zeros_like(item).index_copy(0, has_end.nonzero().flatten(), hidden.index_select(0, ends))
        keys = jagged.keys[: values.shape[0]]
        items = jagged.keys[values.shape[0] : values.shape[0] + item.shape[0]]
        samples = torch.repeat_interleave(offsets.diff(), output_size=values.shape[0])
        # The position behind the last one of a history is the item.
        targets = values.roll(-1, 0).index_copy(0, ends, item[has_end])
        next_keys = keys.roll(-1, 0).index_copy(0, ends, items[has_end])
        if not self.training:  # the loss is that of the item
            hidden, targets, next_keys, samples = (
                of_all.index_select(0, ends) for of_all in (hidden, targets, next_keys, samples)
            )
        return SequenceVectors(user, self._scaled(item), hidden, self._scaled(targets), next_keys, samples)

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, D] of any items int64[n]."""
        # In the bag of items of one sample, without a history.
        offsets = torch.tensor([0, 0, keys.shape[0]], device=keys.device)
        jagged = Jagged(names=(self.history, self.item_key), keys=keys, offsets=offsets)
        return self._scaled(self.embedding(jagged).sequences[self.item_key].values)

    def training_loss(self, output: SequenceVectors, batch: Batch) -> Tensor:
        """Return the mean loss over positions, a scalar in nats; in evaluation that of the items of the samples."""
        # A missing value is no item to predict.
        counts = (batch.label[:, 0] > 0)[output.samples] & (output.keys >= self.first_item)
        losses, is_valid = self._losses(output, batch, counts)
        weights = None if batch.weight is None else batch.weight[output.samples]
        return self.mean_loss(losses, counts & is_valid, weights)

    def _losses(self, output: SequenceVectors, batch: Batch, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each position, of which bool[P] count, and whether it has one."""
        positions, targets = output.positions.float(), output.targets.float()
        is_valid = torch.ones_like(output.keys, dtype=torch.bool)
        if self.spec.loss == "softmax":
            keys = torch.arange(self.first_item, self.num_items, device=output.keys.device)
            logits = dots(positions, self.vectors_of_items(keys))
            classes = (output.keys - self.first_item).clamp(0, len(keys) - 1)
            return cross_entropy(logits, classes, reduction="none"), is_valid
        items = output.keys[output.keys >= self.first_item]
        if self.training:
            self.sampler.observe(output.keys[counts])
        items = self.sampler.items_of_batch(items)
        own = (positions * targets).sum(1)
        if self.spec.loss in SHARED_DRAWS:
            drawn, log_q = self.sampler.shared(Candidates(batch=items), output.keys.device, self.draws())
            others = dots(positions, self.vectors_of_items(drawn))
            own_log_q = self.sampler.log_probability(output.keys.clamp(min=self.first_item), items)
            # The item itself is no negative of its own.
            is_taken = output.keys.unsqueeze(1) == drawn
            if self.spec.loss == "sampled_softmax":
                losses = sampled_softmax_loss(own, others, own_log_q=own_log_q, log_q=log_q, is_taken=is_taken)
            else:
                num_items = self.num_items - self.first_item
                losses = noise_contrastive_loss(
                    own, others, own_log_q=own_log_q, log_q=log_q, is_taken=is_taken, num_items=num_items
                )
            return losses, is_valid
        jagged, count = select(batch.sparse, (self.history, self.item_key)), self.spec.negatives.count
        owned = Owned(samples_of_keys(jagged), jagged.keys, self.num_items)
        many = positions.repeat_interleave(count, dim=0)

        def score(keys: Tensor) -> Tensor:
            # A whole number, as a batch may have no position, from which torch finds none.
            vectors = self.vectors_of_items(keys.flatten()).float().view(*keys.shape, self.spec.width)
            return (many.unsqueeze(1) * vectors).sum(2)

        owners = output.samples.repeat_interleave(count)
        keys, is_valid = self.sampler.draw(owners, [owned], Candidates(batch=items, score=score), self.draws())
        scores = score(keys.unsqueeze(1)).view(-1, count)
        # A user who has all items has no negative, and so no loss.
        return softplus(-own) + softplus(scores).mean(1), is_valid.view(-1, count).all(1)

    def encoded(self, vectors: Tensor, offsets: Tensor, jagged: Jagged) -> Tensor:
        """Return the output of the encoder for the vectors of histories; `jagged` is that of `recent`."""
        hidden: Tensor = self.encoder(vectors, offsets)
        return hidden

    def recent(self, sparse: Jagged) -> Jagged:
        """Return the last items of the histories, without missing values, and the items."""
        jagged = select(sparse, (self.history, self.item_key))
        jagged = cast(Jagged, without_keys(jagged, {self.history: self.missing}))
        size = jagged.batch_size
        total = int(jagged.offsets[size])
        keys, starts = last_positions(jagged.keys[:total], jagged.offsets[: size + 1], self.longest)
        items = jagged.keys[total:]
        if len(items) != size:
            raise ConfigError(
                f"column {self.item_key!r}", f"got {len(items)} keys for {size} samples, expected one for each"
            )
        return Jagged(
            names=jagged.names,
            keys=torch.cat([keys, items]),
            offsets=torch.cat([starts, starts[-1] + torch.arange(1, size + 1, device=starts.device)]),
        )

    @property
    def longest(self) -> int:
        """Number of items of a history that the encoder reads."""
        return self.spec.max_length

    def _padded(self, sparse: PaddedKeys) -> SequenceVectors:
        """Return the vectors in an exported program, which has padded sequences and no loss."""
        sequences = self.embedding(sparse.without({self.history: self.missing})).sequences
        history, item = sequences[self.history], sequences[self.item_key]
        assert isinstance(history, PaddedSequences)
        assert isinstance(item, PaddedSequences)
        vectors, lengths = recent_padded(history.values, history.mask, self.longest)
        encode = self.padded_encoder(sparse, history.mask)
        user = self._scaled(self.last_padded(vectors, lengths, encode)) / self.spec.temperature
        own = self._scaled(item.values[:, 0])
        nothing = torch.empty(0, dtype=torch.int64)
        return SequenceVectors(user, own, user, own, nothing, nothing)

    def padded_encoder(self, sparse: PaddedKeys, mask: Tensor) -> PaddedEncoder:
        """Return the encoder of padded histories, which have an item at the places `mask` bool[B, K]."""
        return self.encoder.padded

    def last_padded(self, vectors: Tensor, lengths: Tensor, encode: PaddedEncoder) -> Tensor:
        """Return the vector at the last position of float[B, K, D] of ``lengths int64[B]``; zeros for none."""
        hidden = encode(vectors, lengths)
        is_last = torch.arange(vectors.shape[1], device=lengths.device) == lengths.unsqueeze(1) - 1
        return (hidden * is_last.unsqueeze(2)).sum(1)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=1) if self.spec.similarity == "cosine" else vectors


class GRU4Rec(SequenceModel):
    """Gated recurrent units over the history (Hidasi et al. 2016, arXiv 1511.06939).

    Arguments and errors are those of `SequenceModel`.
    """

    def __init__(
        self, spec: GRU4RecSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        encoder = RecurrentEncoder(spec.width, spec.state, spec.layers, rate=spec.dropout, generator=generator)
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)


class SASRec(SequenceModel):
    """A causal transformer over the history (Kang and McAuley 2018, arXiv 1808.09781).

    Arguments and errors are those of `SequenceModel`.
    """

    def __init__(
        self, spec: SASRecSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0
    ) -> None:
        encoder = Transformer(
            spec.max_length,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            inner=spec.inner,
            causal=True,
            rate=spec.dropout,
            generator=torch.Generator().manual_seed(seed),
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)


class HSTU(SequenceModel):
    """Hierarchical sequential transduction units over the history: gated layers of pointwise attention.

    Zhai et al. 2024, arXiv 2402.17152.

    Attributes:
        beside: Column of times -> that of the history, whose lists have a time for each item.
        key_columns: Columns of times, whose keys are in no table.

    Arguments and errors are those of `SequenceModel`, and for no column of any integers for the times.
    """

    def __init__(self, spec: HSTUSpec, dataset: DatasetSpec, *, num_outputs: int | None = None, seed: int = 0) -> None:
        encoder = sequences.HSTU(
            spec.max_length,
            spec.width,
            layers=spec.layers,
            heads=spec.heads,
            rate=spec.dropout,
            time_buckets=0 if spec.times is None else spec.time_buckets,
            generator=torch.Generator().manual_seed(seed),
        )
        super().__init__(spec, dataset, encoder, kind=spec.kind, num_outputs=num_outputs, seed=seed)
        self.times = spec.times
        self.beside: Mapping[str, str] = {}
        self.key_columns: tuple[str, ...] = ()
        if spec.times is not None:
            self.user_columns = (*self.user_columns, spec.times)
            self.beside, self.key_columns = {spec.times: spec.history}, (spec.times,)
            check_times(spec.kind, "times", spec.times, dataset, one_key=False)

    @override
    def recent(self, sparse: Jagged) -> Jagged:
        jagged = super().recent(sparse)
        if self.times is None:
            return jagged
        both, size = select(sparse, (self.history, self.times)), sparse.batch_size
        both = cast(Jagged, without_keys(both, {self.history: self.missing}, {self.history: (self.times,)}))
        recent, _ = sequences.last_positions(both.keys.chunk(2)[1], both.offsets[: size + 1], self.longest)
        offsets = torch.cat([jagged.offsets, jagged.offsets[-1] + jagged.offsets[1 : size + 1]])
        return Jagged(names=(*jagged.names, self.times), keys=torch.cat([jagged.keys, recent]), offsets=offsets)

    @override
    def encoded(self, vectors: Tensor, offsets: Tensor, jagged: Jagged) -> Tensor:
        times = None if self.times is None else jagged.keys[len(jagged.keys) - len(vectors) :]
        hidden: Tensor = self.encoder(vectors, offsets, times)
        return hidden

    @override
    def padded_encoder(self, sparse: PaddedKeys, mask: Tensor) -> PaddedEncoder:
        if self.times is None:
            return super().padded_encoder(sparse, mask)
        assert isinstance(self.encoder, sequences.HSTU)
        every = at_places(padded_keys_of("hstu", self.times, sparse), mask)
        times, _ = recent_padded(every.unsqueeze(2), mask, self.longest)
        return partial(self.encoder.padded, times=times.squeeze(2))
