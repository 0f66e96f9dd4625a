# SPDX-License-Identifier: Apache-2.0
"""Evaluation of models that predict items from a history, among all items."""

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
from terarec.metrics.ranking import DEFAULT_METRICS, RetrievalResults
from terarec.models.contract import device_of
from terarec.models.next_items import NextItemModel
from terarec.models.sequences import SequenceModel
from terarec.nn.precision import Precision, autocast
from terarec.ragged import ArrayLists, Ragged, concatenate_lists, offsets_of, take_lists
from terarec.train.evaluation import described_by, known_values
from terarec.train.retrieval import Numbering, Popularity, lists_of_pairs

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
        self._relevant: list[Integers] = []
        self._seen: list[ArrayLists] = []

    def add(self, batch: Batch, rankings: Integers, first: Integers) -> None:
        """Add a batch.

        Args:
            batch: The batch.
            rankings: Ranking of each sample; -1 for a sample that does not count.
            first: Samples of new rankings, in their order.
        """
        jagged, size = select(batch.sparse, self._columns), batch.batch_size
        keys, offsets = jagged.keys.cpu().numpy(), jagged.offsets.cpu().numpy()
        is_wanted = (batch.label[:, 0] > 0).cpu().numpy() & (rankings >= 0)
        histories = Ragged(keys[: offsets[size]], offsets[: size + 1])
        self._seen.append(self._items(take_lists(histories, first)))
        wanted = keys[offsets[size] :]
        is_item = wanted >= self._first_item
        self._relevant.append(np.stack([rankings, wanted - self._first_item])[:, is_wanted & is_item])
        self.unknown += int((is_wanted & ~is_item).sum())

    def _items(self, lists: ArrayLists) -> ArrayLists:
        """Return lists of places; those of missing and rare values are left out."""
        lengths = np.diff(lists.offsets)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        is_item = lists.values >= self._first_item
        counts = np.bincount(owners[is_item], minlength=len(lengths))
        return Ragged(lists.values[is_item] - self._first_item, offsets_of(counts))

    def results(self, users: Tensor, items: Tensor, k: Sequence[int], metrics: Sequence[str]) -> RetrievalResults:
        """Rank all items for all rankings."""
        relevant = lists_of_pairs(self._relevant, len(users))
        results = evaluate_retrieval(users, items, relevant, seen=concatenate_lists(self._seen), k=k, metrics=metrics)
        return replace(results, relevant_unknown=self.unknown)


@torch.no_grad()
def evaluate_sequences(
    model: SequenceModel | NextItemModel | Popularity,
    batches: Iterable[Batch],
    *,
    user: str | None = None,
    k: Sequence[int] | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
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
        user: Column that identifies users, of whose samples all items are relevant at once and the history is that of
            the first; samples without a user are left out. None where each sample has a ranking of its own.
        k: Lengths of the lists; None for those of `DEFAULT_K` that are no longer than the number of items.
        metrics: Names among those of `evaluate_retrieval`.
        first_item: Lowest id of one item; those below are of missing and of rare values. None for that of the model.
        precision: Precision of the layers' matrix products.
        progress: Function called after every batch with the number of samples so far.

    Raises:
        ConfigError: No samples, an unknown column, or a `k` above the number of items.
    """
    was_training, device, described = model.training, device_of(model), described_by(batches)
    first_item = model.first_item if first_item is None else first_item
    samples = _Samples(model.item_key, model.history, first_item)
    numbering = Numbering()
    users: list[Tensor] = []
    done = 0
    model.eval()
    try:
        with autocast(precision, device):
            for batch in batches:
                if user is None:
                    first = np.arange(batch.batch_size)
                    rankings = first + done
                else:
                    rankings, first = numbering.number(known_values(batch, user, described))
                # The ranking is that of float32 dot products.
                vectors = model.user_vectors(to_device(batch, device)).float()
                users.append(vectors[torch.from_numpy(first).to(vectors.device)])
                samples.add(batch, rankings, first)
                done += batch.batch_size
                if progress is not None:
                    progress(done)
            keys = torch.arange(first_item, model.num_items, device=device)
            if not len(keys):
                raise ConfigError("retrieval", f"got no item in {model.item_key!r} that is no rare value")
            items = _vectors_of(model, keys)
    finally:
        model.train(was_training)
    if not sum(map(len, users)):
        wanted = "" if user is None else f" with a user in column {user!r}"
        raise ConfigError("retrieval", f"got no sample{wanted}, expected at least one")
    return samples.results(torch.cat(users), items, _lengths(k, len(keys)), metrics)


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
