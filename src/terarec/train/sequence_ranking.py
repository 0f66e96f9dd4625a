# SPDX-License-Identifier: Apache-2.0
"""Evaluation of models that predict the next item of a history, among all items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.batch import Batch, select, to_device
from terarec.errors import ConfigError
from terarec.memory import BudgetError
from terarec.metrics import evaluate_retrieval
from terarec.metrics.ranking import RetrievalResults
from terarec.models.contract import device_of
from terarec.models.next_items import NextItemModel
from terarec.models.sequences import SequenceModel
from terarec.nn.precision import Precision, autocast
from terarec.ragged import ArrayLists, Ragged, concatenate_lists, offsets_of
from terarec.train.retrieval import Popularity

DEFAULT_K = (5, 10)
"""Lengths of the lists of items."""

Integers = NDArray[np.int64]

_ITEMS_AT_ONCE = 1 << 16


class _Samples:
    """Items to find and items of the histories of the evaluated samples, as places from 0.

    Attributes:
        unknown: Number of items to find that are missing or rare values.
    """

    def __init__(self, item: str, history: str, first_item: int) -> None:
        self._columns, self._first_item = (history, item), first_item
        self.unknown = 0
        self._relevant: list[ArrayLists] = []
        self._seen: list[ArrayLists] = []

    def add(self, batch: Batch) -> None:
        """Add a batch."""
        jagged, size = select(batch.sparse, self._columns), batch.batch_size
        keys, offsets = jagged.keys.cpu().numpy(), jagged.offsets.cpu().numpy()
        is_wanted = (batch.label[:, 0] > 0).cpu().numpy()
        self._seen.append(self._items(keys[: offsets[size]], np.diff(offsets[: size + 1])))
        wanted = keys[offsets[size] :][is_wanted]
        self._relevant.append(self._items(wanted, is_wanted.astype(np.int64)))
        self.unknown += int((wanted < self._first_item).sum())

    def _items(self, keys: Integers, lengths: Integers) -> ArrayLists:
        """Return lists of places; those of missing and rare values are left out."""
        owners = np.repeat(np.arange(len(lengths)), lengths)
        is_item = keys >= self._first_item
        return Ragged(
            keys[is_item] - self._first_item, offsets_of(np.bincount(owners[is_item], minlength=len(lengths)))
        )

    def results(self, users: Tensor, items: Tensor, k: Sequence[int]) -> RetrievalResults:
        """Rank all items for all samples."""
        results = evaluate_retrieval(
            users, items, concatenate_lists(self._relevant), seen=concatenate_lists(self._seen), k=k
        )
        return replace(results, relevant_unknown=self.unknown)


@torch.no_grad()
def evaluate_sequences(
    model: SequenceModel | NextItemModel | Popularity,
    batches: Iterable[Batch],
    *,
    k: Sequence[int] | None = None,
    first_item: int | None = None,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> RetrievalResults:
    """Rank all items for each sample of a split, without those of its own history; the relevant item is the sample's.

    Ids of rare values stand for many items and for those that training did not have, so they are not ranked, and a
    sample whose item is one of them does not count.

    Args:
        model: The model; it is in evaluation mode meanwhile.
        batches: Batches of the split; samples with a label of 0 have no relevant item, and are left out.
        k: Lengths of the lists; None for those of `DEFAULT_K` that are no longer than the number of items.
        first_item: Lowest id of one item; those below are of missing and of rare values. None for that of the model.
        precision: Precision of the layers' matrix products.
        progress: Function called after every batch with the number of samples so far.

    Raises:
        ConfigError: No samples, or a `k` above the number of items.
    """
    was_training, device = model.training, device_of(model)
    first_item = model.first_item if first_item is None else first_item
    samples = _Samples(model.item_key, model.history, first_item)
    users: list[Tensor] = []
    done = 0
    model.eval()
    try:
        with autocast(precision, device):
            for batch in batches:
                # The ranking is that of float32 dot products.
                users.append(model.user_vectors(to_device(batch, device)).float())
                samples.add(batch)
                done += batch.batch_size
                if progress is not None:
                    progress(done)
            keys = torch.arange(first_item, model.num_items, device=device)
            if not len(keys):
                raise ConfigError("retrieval", f"got no item in {model.item_key!r} that is no rare value")
            items = _vectors_of(model, keys)
    finally:
        model.train(was_training)
    if not users:
        raise ConfigError("retrieval", "got no sample, expected at least one")
    return samples.results(torch.cat(users), items, _lengths(k, len(keys)))


def _vectors_of(model: SequenceModel | NextItemModel | Popularity, keys: Tensor) -> Tensor:
    """Return the vectors float32[n, D] of items, in parts that the tiers of their table hold."""
    size = _ITEMS_AT_ONCE
    while True:
        try:
            return torch.cat([model.vectors_of_items(part).float() for part in torch.split(keys, size)])
        except BudgetError:
            if size == 1:
                raise
            size //= 4


def _lengths(k: Sequence[int] | None, num_items: int) -> Sequence[int]:
    return k if k is not None else [length for length in DEFAULT_K if length <= num_items] or [num_items]
