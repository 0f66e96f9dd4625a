# SPDX-License-Identifier: Apache-2.0
"""The common part of models that reduce a history to one vector, whose dot with that of an item is its score."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from terarec.batch import Batch, Jagged, select
from terarec.models.columns import (
    categorical_column,
    check_history,
    check_one_label,
    item_ids,
    missing_key,
    without_keys,
)
from terarec.nn.batch_ranks import BatchRanks, sum_over
from terarec.nn.losses import sampled_softmax_loss
from terarec.nn.negatives import Candidates, Owned, Sampler
from terarec.spec import DatasetSpec, MultVAESpec, YouTubeDNNSpec
from terarec.spec.dataset import FIRST_ID


class NextItemVectors(NamedTuple):
    """Vectors of a batch.

    Attributes:
        user: float[B, W], of the histories.
        item: float[B, W], of the items.
        penalty: float[B], a further term of the loss of each sample; None for none.
    """

    user: Tensor
    item: Tensor
    penalty: Tensor | None = None


class NextItemModel(nn.Module):
    """A vector of a history and one of an item; the loss compares the scores of items for each history.

    Samples with a label above 0 have a loss. Drawn items are none of the sample's.

    Args:
        spec: Columns and loss.
        dataset: Columns, with one label.
        num_outputs: Number of outputs, which is 1; None for one a label.

    Raises:
        ConfigError: A column that is not there, a history of other ids, several outputs, or no second item.
    """

    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch, over whose samples the loss is a mean."""
    gives_probabilities: ClassVar[bool] = False
    """Whether scores are probabilities of the label; these losses only order the items."""
    adds_up: ClassVar[bool] = True
    """Whether the loss of a rank is its part of that of the whole batch, and no mean over its own samples."""

    def __init__(self, spec: YouTubeDNNSpec | MultVAESpec, dataset: DatasetSpec, *, num_outputs: int | None) -> None:
        super().__init__()
        check_one_label(spec.kind, dataset, num_outputs)
        check_history(spec.kind, "", spec.item, spec.history, dataset)
        item = categorical_column(spec.kind, "item", spec.item, dataset, one_key=True)
        self.item_key, self.history = spec.item, spec.history
        self.num_items = item_ids(spec.kind, item)
        self.missing = missing_key(item)
        self._loss = spec.loss
        self.sampler = Sampler(spec.negatives, FIRST_ID, self.num_items, where=f"{spec.kind}: negatives")

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the histories float[B, W]."""
        output: NextItemVectors = self(batch)
        return output.user

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the items float[B, W]."""
        output: NextItemVectors = self(batch)
        return output.item

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the vectors float[n, W] of any items int64[n]."""
        raise NotImplementedError

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the samples and the keys that the loss is over, in training; in evaluation that of each sample."""
        return self._items(batch)

    def output_logits(self, output: NextItemVectors) -> Tensor:
        """Return the score of each sample's own item: float[B, 1]."""
        return (output.user * output.item).sum(1, keepdim=True)

    def training_loss(self, output: NextItemVectors, batch: Batch) -> Tensor:
        """Return the mean loss over the samples with a label above 0 and an item, a scalar in nats."""
        samples, keys = self.targets(batch) if self.training else self._items(batch)
        users = output.user.float()
        losses = (
            self._of_all(users, samples, keys)
            if self._loss == "softmax"
            else self._of_drawn(users, samples, keys, batch)
        )
        # Of the items of a sample the losses are added up: the multinomial likelihood of all.
        of_samples = torch.zeros(batch.batch_size, device=losses.device).index_add(0, samples, losses)
        if output.penalty is not None:
            of_samples = of_samples + output.penalty
        _, items = self._items(batch)
        counts = (batch.label[:, 0] > 0) & (items != self.missing)
        weight = counts.float() if batch.weight is None else counts * batch.weight
        number = counts.sum()
        if self.batch_ranks is not None:
            number = sum_over(self.batch_ranks, "samples of next items", number)
        return (of_samples * weight).sum() / number.clamp_min(1)

    def _of_all(self, users: Tensor, samples: Tensor, keys: Tensor) -> Tensor:
        """Return the cross entropy float32[T] of each of the keys among all items."""
        every = torch.arange(FIRST_ID, self.num_items, device=users.device)
        # Under autocast a product has 16 bits.
        logits = (users @ self.vectors_of_items(every).float().t()).float()
        classes = (keys - FIRST_ID).clamp(0, len(every) - 1)
        return logits.logsumexp(1)[samples] - logits[samples, classes]

    def _of_drawn(self, users: Tensor, samples: Tensor, keys: Tensor, batch: Batch) -> Tensor:
        """Return the cross entropy float32[T] of each of the keys among drawn items, which all samples share."""
        # Of the same draws in each evaluation, whose result is not to depend on chance.
        generator = None if self.training else torch.Generator().manual_seed(0)
        _, items = self._items(batch)
        items = items[items >= FIRST_ID]
        if self.training:
            self.sampler.observe(items)
        drawn, log_q = self.sampler.shared(Candidates(batch=items), keys.device, generator)
        jagged = select(batch.sparse, (self.history, self.item_key))
        having = torch.arange(batch.batch_size, device=keys.device).repeat(2)
        having = having.repeat_interleave(jagged.offsets.diff(), output_size=len(jagged.keys))
        owned = Owned(having, jagged.keys, self.num_items)
        is_taken = owned.has(torch.arange(batch.batch_size, device=keys.device).unsqueeze(1), drawn)
        others = (users @ self.vectors_of_items(drawn).float().t()).float()
        own = (users[samples] * self.vectors_of_items(keys).float()).sum(1)
        own_log_q = self.sampler.log_probability(keys.clamp(min=FIRST_ID), items)
        # Of an item that no draw can give there is nothing to correct.
        own_log_q = own_log_q.masked_fill(own_log_q.isinf(), 0.0)
        return sampled_softmax_loss(own, others[samples], own_log_q=own_log_q, log_q=log_q, is_taken=is_taken[samples])

    def _items(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the numbers of the samples, and their items int64[B]."""
        keys = select(batch.sparse, (self.item_key,)).keys
        return torch.arange(batch.batch_size, device=keys.device), keys

    def without_missing(self, batch: Batch) -> Jagged:
        """Return the keys of a batch without missing values in its histories."""
        return cast(Jagged, without_keys(batch.sparse, {self.history: self.missing}))
