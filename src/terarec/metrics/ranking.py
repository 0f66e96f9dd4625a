"""Ranking metrics over many groups: the ranks of relevant entries, and the metrics computed from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from terarec.metrics.columns import FloatColumns, Floats, Integers
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
        """The same entries in the best ranking, by falling gain."""
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
    """Return the ranks of the samples with a label above 0 by falling score in their groups; the label is the gain.

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
    """DCG@k / ideal DCG@k with DCG@k = sum of gain / log2(rank + 1) over ranks <= k (Jarvelin & Kekalainen 2002)."""
    return _share(_dcg(ranks, k), _dcg(ranks.ideal, k))


def recall(ranks: RelevantRanks, k: int | None) -> Floats:
    """Share of the relevant entries that are among the first k."""
    group, _, _ = ranks.within(k)
    return _share(np.bincount(group, minlength=ranks.groups).astype(np.float64), ranks.counts)


def hit_rate(ranks: RelevantRanks, k: int | None) -> Floats:
    """1 if a relevant entry is among the first k, 0 otherwise."""
    group, _, _ = ranks.within(k)
    return _defined(ranks, np.bincount(group, minlength=ranks.groups) > 0)


def mrr(ranks: RelevantRanks, k: int | None) -> Floats:
    """1 / rank of the first relevant entry, 0 if it is not among the first k."""
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
        "hit_rate": hit_rate,
        "mrr": mrr,
        "map": average_precision,
    },
)
"""Name -> function of ranks and k that gives a value for each ranking, NaN for one without a relevant entry."""


def _dcg(ranks: RelevantRanks, k: int | None) -> Floats:
    group, rank, gain = ranks.within(k)
    return np.bincount(group, gain / np.log2(rank + 1.0), ranks.groups).astype(np.float64)


def _share(parts: Floats, wholes: Floats | Integers) -> Floats:
    shares: Floats = np.divide(parts, wholes, out=np.full(len(parts), np.nan), where=wholes > 0)
    return shares


def _defined(ranks: RelevantRanks, values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Floats:
    return np.where(ranks.counts > 0, values, np.nan)
