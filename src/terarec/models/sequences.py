# SPDX-License-Identifier: Apache-2.0
"""The common part of models that predict the next item of a history."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softplus

from terarec.batch import Batch, Jagged, select
from terarec.embedding import EmbeddingCollection, PaddedSequences
from terarec.embedding.output import PaddedKeys
from terarec.errors import ConfigError
from terarec.models.columns import (
    categorical_column,
    check_history,
    check_one_label,
    item_ids,
    missing_key,
    without_keys,
)
from terarec.nn.batch_ranks import BatchRanks, sum_over
from terarec.nn.negatives import draw_keys, draw_negatives
from terarec.nn.sequences import SequenceEncoder, last_positions, recent_padded
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec, FeatureSpec
from terarec.spec.dataset import FIRST_ID
from terarec.spec.sequences import SequenceSpec


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


class SequenceModel(nn.Module):
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

    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, over whose positions the loss is a mean."""
    gives_probabilities: ClassVar[bool] = False
    """Whether scores are probabilities of the label; these losses only order the items."""
    adds_up: ClassVar[bool] = True
    """Whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""

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
        self.num_items = item_ids(kind, item)
        self.item_key, self.history = spec.item, spec.history
        self.spec = spec
        self.encoder = encoder
        self.missing = missing_key(item)
        self.embedding = EmbeddingCollection(
            [spec.tables.table(item.name, rows=item.rows, width=spec.width)],
            [FeatureSpec(name=name, table=item.name, pooling="none") for name in (spec.history, spec.item)],
            seed=seed,
        )

    def forward(self, batch: Batch) -> SequenceVectors:
        """Return the vectors of histories and items, and of the positions that the loss is over."""
        if isinstance(batch.sparse, PaddedKeys):  # in an exported program
            return self._padded(batch.sparse)
        jagged = self._recent(batch.sparse)
        sequences = self.embedding(jagged).sequences
        return self.vectors(sequences[self.history], sequences[self.item_key].values, jagged)

    def vectors(self, history: Ragged[Tensor, Tensor], item: Tensor, jagged: Jagged) -> SequenceVectors:
        """Return the output for the vectors of histories and items; `jagged` has their keys."""
        values, offsets = history
        # Under autocast an encoder may return 16 bits.
        hidden = self._scaled(self.encoder(values, offsets).to(item.dtype)) / self.spec.temperature
        has_end = offsets.diff() > 0
        ends = offsets[1:][has_end] - 1
        user = torch.zeros_like(item).index_copy(0, has_end.nonzero().flatten(), hidden.index_select(0, ends))
        keys = jagged.keys[: values.shape[0]]
        items = jagged.keys[values.shape[0] :]
        samples = torch.repeat_interleave(offsets.diff(), output_size=values.shape[0])
        # The position behind the last one of a history is the item.
        targets = values.roll(-1, 0).index_copy(0, ends, item[has_end])
        next_keys = keys.roll(-1, 0).index_copy(0, ends, items[has_end])
        if not self.training:  # the loss is that of the item
            hidden, targets, next_keys, samples = (
                of_all.index_select(0, ends) for of_all in (hidden, targets, next_keys, samples)
            )
        return SequenceVectors(user, self._scaled(item), hidden, self._scaled(targets), next_keys, samples)

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the histories float[B, D], divided by the temperature."""
        output: SequenceVectors = self(batch)
        return output.user

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the items float[B, D]."""
        output: SequenceVectors = self(batch)
        return output.item

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, D] of any items int64[n]."""
        # In the bag of items of one sample, without a history.
        offsets = torch.tensor([0, 0, keys.shape[0]], device=keys.device)
        jagged = Jagged(names=(self.history, self.item_key), keys=keys, offsets=offsets)
        return self._scaled(self.embedding(jagged).sequences[self.item_key].values)

    def output_logits(self, output: SequenceVectors) -> Tensor:
        """Return the score of each sample's own item: float[B, 1]."""
        return (output.user * output.item).sum(1, keepdim=True)

    def training_loss(self, output: SequenceVectors, batch: Batch) -> Tensor:
        """Return the mean loss over positions, a scalar in nats; in evaluation that of the items of the samples."""
        is_query = batch.label[:, 0] > 0
        weight = is_query.float() if batch.weight is None else is_query * batch.weight
        # A missing value is no item to predict.
        counts = is_query[output.samples] & (output.keys != self.missing)
        losses, is_valid = self._losses(output, batch)
        counts = counts & is_valid
        number = counts.sum()
        if self.batch_ranks is not None:
            number = sum_over(self.batch_ranks, "positions of sequences", number)
        return (losses * counts * weight[output.samples]).sum() / number.clamp_min(1)

    def _losses(self, output: SequenceVectors, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each position, and whether it has one."""
        positions, targets = output.positions.float(), output.targets.float()
        is_valid = torch.ones_like(output.keys, dtype=torch.bool)
        if self.spec.loss == "softmax":
            keys = torch.arange(FIRST_ID, self.num_items, device=output.keys.device)
            logits = positions @ self.vectors_of_items(keys).float().t()
            classes = (output.keys - FIRST_ID).clamp(0, len(keys) - 1)
            return cross_entropy(logits, classes, reduction="none"), is_valid
        # Of the same draws in each evaluation, whose result is not to depend on chance.
        generator = None if self.training else torch.Generator().manual_seed(0)
        own = (positions * targets).sum(1)
        if self.spec.loss == "bce":
            owners = output.samples.repeat_interleave(self.spec.negatives)
            drawn, is_valid = draw_negatives(owners, self._owned(batch), FIRST_ID, self.num_items, generator)
            others = self.vectors_of_items(drawn).float().view(-1, self.spec.negatives, positions.shape[1])
            scores = (positions.unsqueeze(1) * others).sum(2)
            # A user who has all items has no negative, and so no loss.
            return softplus(-own) + softplus(scores).mean(1), is_valid.view(-1, self.spec.negatives).all(1)
        shape = torch.Size([self.spec.negatives])
        drawn = draw_keys(shape, FIRST_ID, self.num_items, output.keys.device, generator)
        logits = positions @ self.vectors_of_items(drawn).float().t()
        # The item itself is no negative of its own.
        logits = logits.masked_fill(output.keys.unsqueeze(1) == drawn, -torch.inf)
        return torch.cat([own.unsqueeze(1), logits], dim=1).logsumexp(1) - own, is_valid

    def _owned(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the samples and keys of all histories and items."""
        jagged = select(batch.sparse, (self.history, self.item_key))
        samples = torch.arange(batch.batch_size, device=jagged.keys.device).repeat(2)
        return samples.repeat_interleave(jagged.offsets.diff(), output_size=jagged.keys.shape[0]), jagged.keys

    def _recent(self, sparse: Jagged) -> Jagged:
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
        user = self._scaled(self.last_padded(vectors, lengths)) / self.spec.temperature
        own = self._scaled(item.values[:, 0])
        nothing = torch.empty(0, dtype=torch.int64)
        return SequenceVectors(user, own, user, own, nothing, nothing)

    def last_padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Return the vector at the last position of float[B, K, D] of ``lengths int64[B]``; zeros for none."""
        hidden = self.encoder.padded(vectors, lengths)
        is_last = torch.arange(vectors.shape[1], device=lengths.device) == lengths.unsqueeze(1) - 1
        return (hidden * is_last.unsqueeze(2)).sum(1)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return normalize(vectors, dim=1) if self.spec.similarity == "cosine" else vectors
