# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics over many groups, and the evaluation of retrieval by exact search of the top items of each user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Floats, Integers
from terarec.ragged import Ragged
from terarec.spec.registry import Registry

NOT_RANKED = np.iinfo(np.int64).max
"""The rank of a relevant entry that is not in the ranking."""


@dataclass(frozen=True, kw_only=True)
class RelevantRanks:
    """The H relevant entries of G rankings, in any order.

    Attributes:
        group: Ranking of each entry, int64[H] in [0, groups).
        rank: Rank of each entry, from 1, int64[H]; `NOT_RANKED` for an entry that the ranking does not hold.
        gain: Gain of each entry, > 0, float64[H].
        groups: Number G of rankings.
    """

    group: Integers
    rank: Integers
    gain: Floats
    groups: int

    @cached_property
    def counts(self) -> Integers:
        """The number of relevant entries of each ranking, int64[G]."""
        return np.bincount(self.group, minlength=self.groups)

    def within(self, k: int | None) -> tuple[Integers, Integers, Floats]:
        """Group, rank and gain of the entries among the first `k`; of all that are ranked for None."""
        is_within = self.rank <= (NOT_RANKED - 1 if k is None else k)
        return self.group[is_within], self.rank[is_within], self.gain[is_within]

    @cached_property
    def ideal(self) -> RelevantRanks:
        """The best ranking of the entries, by descending gain."""
        order = np.lexsort((-self.gain, self.group))
        group = self.group[order]
        return RelevantRanks(group=group, rank=rank_in_group(group), gain=self.gain[order], groups=self.groups)


def rank_in_group(group: Integers) -> Integers:
    """Return the place, from 1, of each entry among the entries of its group; the entries of a group are contiguous."""
    is_start = np.concatenate([[True], group[1:] != group[:-1]])[: len(group)]
    places = np.arange(len(group))
    starts = np.flatnonzero(is_start)
    ranks: Integers = places - starts[is_start.cumsum() - 1] + 1 if len(group) else places
    return ranks


def ranks_of_samples(scores: FloatColumns, labels: FloatColumns, group: Integers, groups: int) -> RelevantRanks:
    """Return the ranks of the samples with a label above 0 by descending score in their groups; the label is the gain.

    Among equal scores the lower label comes first: neither the order of the input nor a constant score helps.

    Args:
        scores: Scores [N].
        labels: Labels >= 0, [N].
        group: Group of each sample, int64[N] in [0, groups).
        groups: Number of groups.
    """
    order = np.lexsort((labels, -scores, group))
    sorted_group = group[order]
    ranks, gains = rank_in_group(sorted_group), labels[order].astype(np.float64)
    is_relevant = gains > 0
    return RelevantRanks(
        group=sorted_group[is_relevant], rank=ranks[is_relevant], gain=gains[is_relevant], groups=groups
    )


def ndcg(ranks: RelevantRanks, k: int | None) -> Floats:
    """Return DCG@k / ideal DCG@k, DCG@k = sum of gain / log2(rank + 1) over ranks <= k (Jarvelin & Kekalainen 2002)."""
    return _share(_dcg(ranks, k), _dcg(ranks.ideal, k))


def recall(ranks: RelevantRanks, k: int | None) -> Floats:
    """Return the share of the relevant entries that are among the first k."""
    group, _, _ = ranks.within(k)
    return _share(np.bincount(group, minlength=ranks.groups).astype(np.float64), ranks.counts)


def precision(ranks: RelevantRanks, k: int | None) -> Floats:
    """Return the number of relevant entries among the first k, / k."""
    assert k is not None, "the share of all entries says nothing of their order"
    group, _, _ = ranks.within(k)
    return _defined(ranks, np.bincount(group, minlength=ranks.groups) / k)


def hit_rate(ranks: RelevantRanks, k: int | None) -> Floats:
    """Return 1 if a relevant entry is among the first k, 0 otherwise."""
    group, _, _ = ranks.within(k)
    return _defined(ranks, np.bincount(group, minlength=ranks.groups) > 0)


def mrr(ranks: RelevantRanks, k: int | None) -> Floats:
    """Return 1 / rank of the first relevant entry, 0 if it is not among the first k."""
    group, rank, _ = ranks.within(k)
    best = np.zeros(ranks.groups)
    np.maximum.at(best, group, 1.0 / rank)
    return _defined(ranks, best)


def average_precision(ranks: RelevantRanks, k: int | None) -> Floats:
    """Sum of precision@rank over the relevant ranks <= k, / min(k, number of relevant entries)."""
    group, rank, _ = ranks.within(k)
    order = np.lexsort((rank, group))
    group, rank = group[order], rank[order]
    totals = np.bincount(group, rank_in_group(group) / rank, ranks.groups).astype(np.float64)
    return _share(totals, ranks.counts if k is None else np.minimum(ranks.counts, k))


RANKING_METRICS: Registry[Callable[[RelevantRanks, int | None], Floats]] = Registry(
    "metric",
    {
        "ndcg": ndcg,
        "recall": recall,
        "precision": precision,
        "hit_rate": hit_rate,
        "mrr": mrr,
        "map": average_precision,
    },
)
"""Name -> function of ranks and k that gives a value for each ranking, NaN for one without a relevant entry."""


DEFAULT_METRICS = ("recall", "ndcg", "hit_rate", "mrr")
"""Metrics of a retrieval where none are named."""


def _dcg(ranks: RelevantRanks, k: int | None) -> Floats:
    group, rank, gain = ranks.within(k)
    return np.bincount(group, gain / np.log2(rank + 1.0), ranks.groups).astype(np.float64)


def _share(parts: Floats, wholes: Floats | Integers) -> Floats:
    shares: Floats = np.divide(parts, wholes, out=np.full(len(parts), np.nan), where=wholes > 0)
    return shares


def _defined(ranks: RelevantRanks, values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Floats:
    return np.where(ranks.counts > 0, values, np.nan)


BLOCK_BYTES = 64 << 20
"""Memory of the scores of one block of users."""


IntegerLists: TypeAlias = Ragged[Tensor | Integers, Tensor | Integers]
"""Lists of integers, each in a tensor or an array."""


PairScores: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Scores of vectors of users [B, D] and of items [1, I, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalResults:
    """Results of `evaluate_retrieval`.

    Attributes:
        values: Metric, such as ``recall@10``, -> mean over the users that count; NaN if there are none.
        users: Users that count: those with a relevant item that they have not seen.
        items: Items that were ranked for each user, seen ones included.
        relevant: Relevant items of the users that count.
        relevant_seen: Relevant items that were left out because the user has seen them.
        relevant_unknown: Relevant items that were left out because they are no single items, such as rare values.
    """

    values: dict[str, float]
    users: int
    items: int
    relevant: int
    relevant_seen: int
    relevant_unknown: int = 0


@torch.no_grad()
def evaluate_retrieval(
    user_vectors: Tensor,
    item_vectors: Tensor,
    relevant: IntegerLists,
    *,
    k: Sequence[int],
    seen: IntegerLists | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    pair_scores: PairScores | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> RetrievalResults:
    """Rank all items for each user by the dot product of their vectors, and compare the first k with the relevant ones.

    The ranking is exact for the float32 dot products; of items with equal products the one with the lower number comes
    first. A seen item is not ranked. A relevant item that is seen as well cannot be found, so it does not count as
    relevant; a user who has no other relevant item does not count. Items that are named twice count once. Recall, NDCG
    (with gains of 1), hit rate and MRR are those of `terarec.metrics.ranking`, and the result is their mean over users.

    Memory: `block_bytes` for scores, and some bytes for each relevant and seen item.

    Args:
        user_vectors: Vectors of the users, float[U, D].
        item_vectors: Vectors of the items, float[I, D], on the same device.
        relevant: Items that each user should be shown.
        k: Lengths of the lists of recommended items.
        seen: Items that are not to be recommended, such as those of the training part.
        metrics: Names of `RANKING_METRICS`, such as "recall" and "map".
        pair_scores: Function that returns the scores [B, I] of vectors of users [B, D] and of items [1, I, D]; None for
            their dot products.
        block_bytes: Memory of the scores of one block of users.

    Raises:
        ConfigError: Vectors whose shapes or devices do not match or that are not finite, lists that do not fit the
            users and items, a k that is not in [1, I], or an unknown metric.
    """
    _check_vectors(user_vectors, item_vectors)
    num_users, num_items = len(user_vectors), len(item_vectors)
    for length in k:
        if not 1 <= length <= num_items:
            raise ConfigError("k", f"got {length}, expected 1 to {num_items}, the number of items")
    for name in metrics:
        RANKING_METRICS.find(name, "metrics")
    if not k or not metrics:
        raise ConfigError("k, metrics", "got none, expected at least one of each")
    wanted = _pairs("relevant", relevant, num_users, num_items)
    masked = wanted[:0] if seen is None else _pairs("seen", seen, num_users, num_items)
    # Only these can be found: a seen item is never a hit, so it would lower the recall of any model.
    findable = np.setdiff1d(wanted, masked, assume_unique=True)
    user = findable // num_items
    users = np.unique(user)
    rank = _ranks(user_vectors, item_vectors, findable, masked, users, max(k), block_bytes, pair_scores)
    ranks = RelevantRanks(group=np.searchsorted(users, user), rank=rank, gain=np.ones(len(findable)), groups=len(users))
    values = {}
    for length in k:
        for name in metrics:
            of_users = RANKING_METRICS[name](ranks, length)
            values[f"{name}@{length}"] = float(of_users.mean()) if len(of_users) else float("nan")
    return RetrievalResults(
        values=values,
        users=len(users),
        items=num_items,
        relevant=len(findable),
        relevant_seen=len(wanted) - len(findable),
    )


def _ranks(
    user_vectors: Tensor,
    item_vectors: Tensor,
    findable: Integers,
    masked: Integers,
    users: Integers,
    k: int,
    block_bytes: int,
    pair_scores: PairScores | None,
) -> Integers:
    """Return the rank of each pair of `findable`, `NOT_RANKED` for those beyond the first `k`.

    Pairs are ``user * I + item``, rising; `users` are those to rank items for.
    """
    num_items, device = len(item_vectors), user_vectors.device
    transposed = item_vectors.float().T
    ranks = np.full(len(findable), NOT_RANKED)
    # A function of pairs has their vectors side by side in memory.
    block = max(1, block_bytes // (4 * num_items * (1 if pair_scores is None else 2 * item_vectors.shape[1])))
    # Masked pairs of users that do not count are left out, the others renumbered by the place of their user.
    places = np.searchsorted(users, masked // num_items)
    counts = np.flatnonzero(np.isin(masked // num_items, users))
    masked = places[counts] * num_items + masked[counts] % num_items
    pairs = np.searchsorted(users, findable // num_items) * num_items + findable % num_items
    memory = torch.empty(min(block, len(users)), num_items, device=device)  # new memory costs more than the product
    for start in range(0, len(users), block):
        chosen = torch.from_numpy(users[start : start + block]).to(device)
        vectors = user_vectors[chosen].float()
        if pair_scores is None:
            scores = torch.mm(vectors, transposed, out=memory[: len(chosen)])
        else:
            scores = memory[: len(chosen)].copy_(pair_scores(vectors, item_vectors.float().unsqueeze(0)))
        first, last = np.searchsorted(masked, (start * num_items, (start + len(chosen)) * num_items))
        # Who has seen nearly all items gets seen ones at the end of the list; they are not hits, as findable pairs lack
        # them.
        scores.view(-1)[torch.from_numpy(masked[first:last] - start * num_items).to(device)] = -torch.inf
        top = best_items(scores, k).cpu().numpy()
        first, last = np.searchsorted(pairs, (start * num_items, (start + len(chosen)) * num_items))
        of_block = pairs[first:last]
        flat_places = (np.arange(start, start + len(chosen))[:, None] * num_items + top).ravel()
        position = np.searchsorted(of_block, flat_places).clip(max=len(of_block) - 1)
        is_hit = of_block[position] == flat_places
        ranks[first + position[is_hit]] = np.flatnonzero(is_hit) % k + 1
    return ranks


def best_items(scores: Tensor, k: int) -> Tensor:
    """Return the `k` items with the highest scores of each row, best first, the lower number first among equal scores.

    Args:
        scores: Scores [B, I], without NaN.
        k: Number of items, at most I.

    Returns:
        int64[B, k].
    """
    # One more than `k` shows whether the last place is tied.
    beyond = min(k + 1, scores.shape[1])
    values, items = scores.topk(beyond, dim=1)
    if bool(values[:, :1].isnan().any()):  # the highest of all for `topk`
        raise ConfigError("scores", "got NaN, expected numbers: the dot products of the vectors overflow")
    if beyond > k:
        # `topk` takes any of the items whose scores equal the last one.
        tied = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        values, items = values[:, :k], items[:, :k]
        for row in tied.tolist():
            items[row] = _first_of_equals(scores[row], values[row], k)
            values[row] = scores[row][items[row]]
    # By number first, so that the stable sort by score leaves equal scores in that order.
    by_item = items.argsort(dim=1)
    items, values = items.gather(1, by_item), values.gather(1, by_item)
    return items.gather(1, values.argsort(dim=1, descending=True, stable=True))


def _first_of_equals(scores: Tensor, values: Tensor, k: int) -> Tensor:
    """Return the `k` best items of a row, in any order: all above the last of `values`, and the first equal to it."""
    least = values[-1]
    above = (scores > least).nonzero()[:, 0]
    equal = (scores == least).nonzero()[:, 0]
    return torch.cat([above, equal[: k - len(above)]])


def _check_vectors(user_vectors: Tensor, item_vectors: Tensor) -> None:
    shapes = f"users {list(user_vectors.shape)} and items {list(item_vectors.shape)}"
    if user_vectors.dim() != 2 or item_vectors.dim() != 2 or user_vectors.shape[1] != item_vectors.shape[1]:
        raise ConfigError("vectors", f"got {shapes}, expected [U, D] and [I, D]")
    if not len(item_vectors):
        raise ConfigError("vectors", f"got {shapes}, expected at least one item")
    if user_vectors.device != item_vectors.device:
        got = f"users on {user_vectors.device} and items on {item_vectors.device}"
        raise ConfigError("vectors", f"got {got}, expected one device")
    for name, vectors in (("user_vectors", user_vectors), ("item_vectors", item_vectors)):
        bad = ~vectors.isfinite().all(dim=1)
        if bool(bad.any()):
            raise ConfigError(name, f"got numbers that are not finite in row {int(bad.nonzero()[0])}")


def _pairs(name: str, lists: IntegerLists, num_users: int, num_items: int) -> Integers:
    """Return the distinct pairs ``user * I + item`` of `lists`, rising, int64."""
    offsets, items = _as_int64(f"{name}.offsets", lists.offsets), _as_int64(f"{name}.values", lists.values)
    if offsets.shape != (num_users + 1,) or items.ndim != 1:
        got = f"offsets {list(offsets.shape)} and items {list(items.shape)}"
        raise ConfigError(name, f"got {got}, expected [{num_users + 1}] and [N]")
    if offsets[0] != 0 or offsets[-1] != len(items) or (np.diff(offsets) < 0).any():
        raise ConfigError(
            f"{name}.offsets", f"got other numbers, expected them to rise from 0 to the {len(items)} items"
        )
    bad = (items < 0) | (items >= num_items)
    if bad.any():
        raise ConfigError(f"{name}.values", f"got {items[bad][0]}, expected 0 to {num_items - 1}")
    # One integer a pair, so that sets of pairs are sorted arrays: differences and membership are searches.
    return np.unique(np.repeat(np.arange(num_users), np.diff(offsets)) * num_items + items)


def _as_int64(name: str, values: Tensor | npt.NDArray[np.int64]) -> Integers:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "iu":
        raise ConfigError(name, f"got {array.dtype}, expected integers")
    return array.astype(np.int64)
