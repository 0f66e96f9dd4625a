# SPDX-License-Identifier: Apache-2.0
"""Evaluation of retrieval by a model of users and items, among all items of a data set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from typing_extensions import override

from terarec.batch import Batch, feature_keys, select, to_device
from terarec.errors import ConfigError
from terarec.metrics import evaluate_retrieval
from terarec.metrics.ranking import DEFAULT_METRICS, RetrievalResults
from terarec.models.contract import device_of
from terarec.models.next_items import NextItemModel
from terarec.models.pairs import PairModel
from terarec.models.retrieving import RetrievalModel
from terarec.models.sequences import SequenceModel
from terarec.models.two_tower import TwoTower
from terarec.nn.precision import Precision, autocast
from terarec.nn.sequences import steps_to_end
from terarec.ragged import Ragged, offsets_of
from terarec.spec import DatasetSpec, TwoTowerSpec
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.retrieval import PairSpec
from terarec.train.evaluation import described_by, known_values

DEFAULT_K = (10, 50, 100)
"""Lengths of the lists of recommended items."""

Integers = npt.NDArray[np.int64]

_logger = logging.getLogger(__name__)


def user_column(spec: TwoTowerSpec | PairSpec, dataset: DatasetSpec, group: str | None = None) -> str:
    """Return the column that identifies users: `group`, or else the first key column of the user's tower.

    Raises:
        ConfigError: The tower has no column of one key a sample, and `group` is None.
    """
    if group is not None:
        return group
    if isinstance(spec, PairSpec):
        return spec.user
    single = [column.name for column in dataset.categorical if column.hotness == 1]
    for name in spec.user:
        if name in single:
            return name
    raise ConfigError(
        "group",
        f"got none, and the user's tower has no column of one key a sample ({', '.join(spec.user)}), expected "
        "the column that identifies users",
    )


@torch.no_grad()
def evaluate_towers(
    model: TwoTower | PairModel | Popularity,
    evaluated: Iterable[Batch],
    train: Iterable[Batch] = (),
    *,
    user: str,
    k: Sequence[int] | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    first_item: int = MISSING_KEY + 1,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> RetrievalResults:
    """Rank all items for each user of a split, without those of the user's training samples.

    The items are those of all samples, identified by the model's ``item_key``; an item's vector is that of the first
    sample with it. A user's vector is that of the user's first evaluated sample. Relevant items are those of evaluated
    samples with a label above 0, and seen ones those of training samples with a label above 0. Samples without a user
    give items only.

    Args:
        model: The model; it is in evaluation mode meanwhile.
        evaluated: Batches of the evaluated split.
        train: Batches of the train split; none to mask nothing.
        user: Column that identifies users: metadata, or a categorical column of one key a sample.
        k: Lengths of the lists; None for those of `DEFAULT_K` that are no longer than the number of items.
        metrics: Names among those of `evaluate_retrieval`.
        first_item: Lowest key of one item; those below are of missing and of rare values, which are no items.
        precision: Precision of the layers' matrix products.
        progress: Function called after every batch with the number of samples so far.

    Raises:
        ConfigError: No samples, an unknown column, or a `k` above the number of items.
    """
    was_training, device, described = model.training, device_of(model), described_by(evaluated)
    users, items = Numbering(), Numbering()
    user_vectors: list[Tensor] = []
    item_vectors: list[Tensor] = []
    relevant: list[Integers] = []
    seen: list[Integers] = []
    done = unknown = 0
    model.eval()
    try:
        for is_train, batch in _both(evaluated, train):
            there = to_device(batch, device)
            with autocast(precision, device):
                item, first = items.number(feature_keys(batch, model.item_key), lowest=first_item)
                if len(first):
                    item_vectors.append(_rows(model.item_vectors(there), first))
                person, first = users.number(known_values(batch, user, described), grows=not is_train)
                if len(first):
                    user_vectors.append(_rows(model.user_vectors(there), first))
            # Samples without a user, and training samples of users who are not evaluated, only give items.
            counts = (batch.label[:, 0] > 0).cpu().numpy() & (person >= 0)
            unknown += 0 if is_train else int((counts & (item < 0)).sum())
            counts &= item >= 0
            (seen if is_train else relevant).append(np.stack([person[counts], item[counts]]))
            done += batch.batch_size
            if progress is not None:
                progress(done)
        if not user_vectors:
            raise ConfigError("retrieval", f"got no sample with a user in column {user!r}, expected at least one")
        if not item_vectors:
            raise ConfigError("retrieval", f"got no item in {model.item_key!r} that is no missing or rare value")
        if k is None:
            k = [length for length in DEFAULT_K if length <= len(items)] or [len(items)]
        results = evaluate_retrieval(
            torch.cat(user_vectors),
            torch.cat(item_vectors),
            lists_of_pairs(relevant, len(users)),
            seen=lists_of_pairs(seen, len(users)),
            k=k,
            metrics=metrics,
            pair_scores=model.pair_scores if isinstance(model, PairModel) and not model.scores_are_dots else None,
        )
    finally:
        model.train(was_training)
    undefined = [name for name, value in results.values.items() if math.isnan(value)]
    if undefined:
        _logger.warning(
            "%s are undefined: no user has a relevant item in the split that is not among those of the user's training "
            "samples",
            ", ".join(undefined),
        )
    return replace(results, relevant_unknown=unknown)


class Popularity(RetrievalModel):
    """Score of an item for any user: how often it is in the train split, for example.

    Args:
        item: Column of one key a sample.
        keys: Keys of items int64[n], distinct and rising.
        counts: Their numbers int64[n].
        first_item: Lowest id of an item, where items have ids.
        num_items: One more than the highest one.
        history: Column of the items of a user, where samples have one.
    """

    def __init__(
        self, item: str, keys: Tensor, counts: Tensor, *, first_item: int = 0, num_items: int = 0, history: str = ""
    ) -> None:
        super().__init__()
        self.item_key, self.history = item, history
        self.first_item, self.num_items = first_item, num_items
        self._keys, self._counts = keys, counts

    @classmethod
    def of_positives(cls, item: str, batches: Iterable[Batch]) -> Popularity:
        """Count the items of samples with a label above 0."""
        keys = [feature_keys(batch, item)[batch.label[:, 0] > 0].cpu() for batch in batches]
        return cls(item, *torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *keys]), return_counts=True))

    @classmethod
    def of_sequences(cls, model: SequenceModel | NextItemModel, batches: Iterable[Batch]) -> Popularity:
        """Count the items of samples with a label above 0, and those of their histories, each event once.

        Where most histories are those of another sample with its item behind them, as `History` makes a sample for each
        event, they repeat events, and the items of the samples alone are counted.
        """
        of_items, of_histories = torch.zeros(2, model.num_items, dtype=torch.int64)
        histories: list[Tensor] = []
        extended: list[Tensor] = []
        for batch in batches:
            jagged, size = select(batch.sparse, (model.history, model.item_key)), batch.batch_size
            keys, offsets = jagged.keys.cpu(), jagged.offsets[: size + 1].cpu()
            is_positive = batch.label[:, 0].cpu() > 0
            past, items = keys[: offsets[-1]], keys[offsets[-1] :]
            of_items += items[is_positive].bincount(minlength=model.num_items)
            counted = past[is_positive.repeat_interleave(offsets.diff())]
            of_histories += counted.bincount(minlength=model.num_items)
            before, after = _digests(past, offsets, items)
            histories.append(before)
            extended.append(after)
        known = torch.cat([torch.empty(0, dtype=torch.int64), *histories])
        repeats = torch.isin(known, torch.cat([known[:0], *extended])).sum()
        counts = of_items if 2 * repeats > len(known) else of_items + of_histories
        every = torch.arange(model.num_items)
        first, end = model.first_item, model.num_items
        return cls(model.item_key, every, counts, first_item=first, num_items=end, history=model.history)

    @override
    def user_vectors(self, batch: Batch) -> Tensor:
        return torch.ones(batch.batch_size, 1)

    @override
    def item_vectors(self, batch: Batch) -> Tensor:
        return self.vectors_of_items(feature_keys(batch, self.item_key))

    def vectors_of_items(self, keys: Tensor) -> Tensor:
        """Return the scores float32[n, 1] of ``keys int64[n]``, 0 for an unknown one."""
        if not len(self._keys):
            return torch.zeros(len(keys), 1)
        places = torch.searchsorted(self._keys, keys.cpu()).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[places] == keys.cpu(), self._counts[places], 0).float().unsqueeze(1)


def _digests(past: Tensor, offsets: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers of the histories that have items, and of all with their sample's item behind them.

    A longest list has lost its first item where it has got another one, so each is numbered with and without its first.

    Args:
        past: Items int64[T] of all histories.
        offsets: int64[B + 1].
        items: Items int64[B] of the samples.

    Returns:
        int64[n] of the histories, int64[2 B] of the longer ones.
    """
    steps = steps_to_end(offsets, len(past))
    # A polynomial modulo 2^64 in the distance from the end.
    powers = torch.full((int(steps.max()) + 2 if len(steps) else 1,), _BASE).cumprod(0)
    sample = torch.repeat_interleave(offsets.diff(), output_size=len(past))
    sums = [torch.zeros(len(items), dtype=torch.int64) for _ in range(2)]
    for further, total in enumerate(sums):
        total.index_add_(0, sample, (past + 1) * powers[steps + further])
    has_past = offsets.diff() > 0
    longer = sums[1] + (items + 1) * powers[0]
    firsts = offsets[:-1][has_past]
    shorter = longer[has_past] - (past[firsts] + 1) * powers[steps[firsts] + 1]
    return sums[0][has_past], torch.cat([longer, shorter])


_BASE = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX


class Numbering:
    """Numbers for the values of a column, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(
        self, values: Tensor | pa.Array, *, grows: bool = True, lowest: int = MISSING_KEY
    ) -> tuple[Integers, Integers]:
        """Return the number of each value, and the positions of the first ones of new values in their order.

        Args:
            values: Keys int64[B], or an Arrow array of B values.
            grows: Whether new values get numbers. A value without a number, such as null, has -1.
            lowest: Lowest key that gets a number.
        """
        if isinstance(values, Tensor):
            distinct, first, inverse = np.unique(values.cpu().numpy(), return_index=True, return_inverse=True)
            named: list[object] = distinct.tolist()
        else:
            encoded = values.dictionary_encode()
            # Null gets a code of its own behind those of the values.
            codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
            distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
            named = [*encoded.dictionary.to_pylist(), None]
            named = [named[code] for code in distinct]
        numbers = np.full(len(named), -1, dtype=np.int64)
        new: list[int] = []
        for position, value in enumerate(named):
            if value is None or (isinstance(value, int) and value < lowest):
                continue
            if grows and value not in self._numbers:
                self._numbers[value] = len(self._numbers)
                new.append(int(first[position]))
            numbers[position] = self._numbers.get(value, -1)
        return numbers[inverse], np.array(new, dtype=np.int64)


def _both(evaluated: Iterable[Batch], train: Iterable[Batch]) -> Iterator[tuple[bool, Batch]]:
    # First, since these samples number the users; training samples only look numbers up.
    for batch in evaluated:
        yield False, batch
    for batch in train:
        yield True, batch


def _rows(vectors: Tensor, rows: Integers) -> Tensor:
    # Under autocast vectors may have 16 bits; the ranking is that of float32 dot products.
    return vectors.float()[torch.from_numpy(rows).to(vectors.device)]


def lists_of_pairs(pairs: Sequence[Integers], num_users: int) -> Ragged[Integers, Integers]:
    """Return the lists of `pairs`, each int64[2, N] of users and items."""
    user, item = np.concatenate([np.empty((2, 0), dtype=np.int64), *pairs], axis=1)
    order = user.argsort(kind="stable")
    return Ragged(item[order], offsets_of(np.bincount(user, minlength=num_users)))
