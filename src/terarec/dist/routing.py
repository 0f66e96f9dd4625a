# SPDX-License-Identifier: Apache-2.0
"""The parts of a rank's batch for each rank: distinct keys, and bags that the ranks of their rows pool.

Bags may be pooled on the ranks of their rows, so that a vector travels for each bag and not for each distinct key. The
rank of the samples sends to every rank the places, among the requested keys, of the keys of each bag. That rank
returns the sum of their vectors, times the weights of the keys. The parts of a bag on several ranks add up to the whole
one, which the rank of the samples divides for "mean" and "sqrtn". The gradients of bags return the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist.placement import COPIES, PlacedTable
from terarec.embedding.tables import LookupGroup
from terarec.kernels.hash_index import new_hash_index
from terarec.kernels.ref.bag_lookup import locate_checked
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.layout import BagLayout, found_rows, single_layout
from terarec.ops.row_update import BagGradient, summed_gradients

_POOLED = ("sum", "mean", "sqrtn")


class TableKeys(NamedTuple):
    """The keys of one table in a rank's batch.

    Attributes:
        keys: int64[N], also repeated ones.
        bags: int64[N], rising, the bag of each key, of a table whose bags the ranks of the rows pool; else None.
        weights: float32[N], weights of these keys; None for none.
    """

    keys: Tensor
    bags: Tensor | None = None
    weights: Tensor | None = None


class Routed(NamedTuple):
    """Distinct keys of one table in the order of the ranks that they go to.

    Attributes:
        keys: int64[U]: those of rank 0's rows, ..., of rank R - 1's, and of rows with copies on all ranks. By column,
            all keys go to all ranks of the table.
        counts: int64[U], the occurrences of each, or None.
        num_rows: Keys for each rank without those of copies; by column all keys for each rank of the table.
        num_copies: Keys of rows with copies.
        bags: The bags, of a table whose bags the ranks of the rows pool.
    """

    keys: Tensor
    counts: Tensor | None
    num_rows: list[int]
    num_copies: int
    bags: SentBags | None = None


class StepKeys(NamedTuple):
    """The distinct keys of all tables in a rank's batch. A device may not have told their numbers yet.

    Attributes:
        rows: int64[R, T], keys for each rank without those of copies; by column all keys for each rank of the table.
        copies: int64[T], keys of rows with copies.
        bags: int64[R, P, 3], see `BagPart.numbers`, for tables whose bags the ranks of the rows pool.
        totals: Distinct keys of each table, or scalars of the device.
        places: For each table the place int64[N] of each of its keys among the distinct ones.
        cut: Function that returns the keys of each table of `rows`, `copies` and `bags` in host memory.
    """

    rows: Tensor
    copies: Tensor
    bags: Tensor
    totals: Sequence[int | Tensor]
    places: Sequence[Tensor]
    cut: Callable[[Tensor, Tensor, Tensor], list[Routed]]


def hashed_keys(
    tables: Sequence[PlacedTable], keys: Sequence[TableKeys], num_ranks: int, *, takes_counts: Sequence[bool]
) -> StepKeys:
    """Find the distinct keys of tables in host memory, and sort them by the ranks that they go to.

    Args:
        tables: The tables.
        keys: Their keys.
        num_ranks: Number of ranks R.
        takes_counts: Whether each table needs the occurrences of keys.
    """
    wanted: list[Routed] = []
    places: list[Tensor] = []
    for table, (of_table, bags, weights), is_counted in zip(tables, keys, takes_counts, strict=True):
        # Ids in the order of first occurrence, in one pass; `torch.unique` would sort.
        inverse, distinct = new_hash_index(of_table.device).insert(of_table, of_table[:0], 0)
        counts = torch.bincount(inverse, minlength=distinct.numel()) if is_counted else None
        routed, place = route(table, distinct, counts, num_ranks)
        places.append(place[inverse])
        if bags is not None:
            sent = sent_bags(routed.num_rows, places[-1], bags, weights, by_column=table.by_column)
            routed = routed._replace(bags=sent)
        wanted.append(routed)
    pooled = [routed.bags for routed in wanted if routed.bags is not None]
    numbers = [[part.numbers for part in sent.parts] for sent in pooled]
    return StepKeys(
        rows=torch.tensor([routed.num_rows for routed in wanted]).T.contiguous(),
        copies=torch.tensor([routed.num_copies for routed in wanted]),
        bags=torch.tensor(numbers, dtype=torch.int64).view(len(pooled), num_ranks, 3).transpose(0, 1),
        totals=[routed.keys.numel() for routed in wanted],
        places=places,
        cut=lambda *_: wanted,
    )


def route(table: PlacedTable, keys: Tensor, counts: Tensor | None, num_ranks: int) -> tuple[Routed, Tensor]:
    """Sort distinct keys by the ranks that they go to; return them with the place int64[U] of each."""
    total = keys.numel()
    # In the first three cases all keys go to the same ranks, so that none has to be moved.
    if table.by_column:
        on_ranks = [total if rank in table.ranks else 0 for rank in range(num_ranks)]
        return Routed(keys, counts, on_ranks, 0), torch.arange(total)
    if table.has_copies:
        return Routed(keys, counts, [0] * num_ranks, total), torch.arange(total)
    if len(table.ranks) == 1 and not table.has_hot_rows:
        on_ranks = [total if rank == table.ranks[0] else 0 for rank in range(num_ranks)]
        return Routed(keys, counts, on_ranks, 0), torch.arange(total)
    owners = table.owners(keys)
    keys_by_rank = dict.fromkeys(range(num_ranks), keys[:0])
    for owner in (*table.ranks, COPIES) if table.has_hot_rows else table.ranks:
        # A pass for each rank, of which there are few, keeps the order of the keys, as a stable sort would.
        keys_by_rank[owner] = (owners == owner).nonzero()[:, 0]
    order = torch.cat(list(keys_by_rank.values()))  # those with copies last
    place = torch.empty_like(order)
    place[order] = torch.arange(total)
    sizes = [keys_by_rank[rank].numel() for rank in range(num_ranks)]
    return Routed(keys[order], None if counts is None else counts[order], sizes, total - sum(sizes)), place


class BagPart(NamedTuple):
    """The part of the bags of a table that one rank has: b bags of n keys.

    Attributes:
        lengths: int32[b], keys of each bag.
        places: int32[n], the place of each key among the distinct keys of the table that go to the rank.
        weights: float32[n], weights of the keys; None for none.
    """

    lengths: Tensor
    places: Tensor
    weights: Tensor | None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Bags, keys, and 1 if these have weights."""
        return self.lengths.numel(), self.places.numel(), int(self.weights is not None)

    def packed(self) -> Tensor:
        """Return the part as int64[packed_size(numbers)], to travel with keys."""
        parts = [self.lengths, self.places]
        if self.weights is not None:
            parts.append(self.weights.view(torch.int32))
        # Lengths, places and weights are of 4 bytes each; as int64 they travel in the collective of the keys.
        if sum(part.numel() for part in parts) % 2:
            parts.append(self.lengths.new_zeros(1))
        return torch.cat(parts).view(torch.int64)

    def pool(self, vectors: Tensor) -> Tensor:
        """Return the sums float32[b, D] of ``vectors float32[u, D]`` of the distinct keys."""
        if not self.places.numel():
            return vectors.new_zeros(self.lengths.numel(), vectors.shape[1])
        keys, offsets, layout = self._lookup(vectors)
        return bag_lookup(vectors, keys, offsets, layout, key_weights=self.weights)

    def gradient(self, grad: Tensor, num_keys: int) -> Tensor:
        """Return the gradient float32[u, D] of the distinct keys of ``grad float32[b, D]`` of the sums."""
        like = grad.new_empty(num_keys, grad.shape[1])
        if not self.places.numel():
            return like.zero_()
        keys, offsets, layout = self._lookup(like)
        return summed_gradients([BagGradient(keys, offsets, grad.contiguous(), layout, self.weights)], like)

    def _lookup(self, vectors: Tensor) -> tuple[Tensor, Tensor, BagLayout]:
        """Return keys, offsets and layout of a lookup of one feature in a matrix of vectors."""
        offsets = torch.cat([self.lengths.new_zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        # The vectors as a table of their own, since the kernels of one device pool and sum them.
        return self.places.long(), offsets, single_layout(found_rows(vectors), vectors.shape[1], "sum")


def packed_size(numbers: Sequence[int]) -> int:
    """Return the length in int64 of a packed part of these numbers of bags and keys, and 1 for weights."""
    bags, keys, has_weights = numbers
    return (bags + keys * (1 + has_weights) + 1) // 2


def unpacked(values: Tensor, numbers: Sequence[int]) -> BagPart:
    """Return the part that ``values int64[packed_size(numbers)]`` hold."""
    bags, keys, has_weights = numbers
    words = values.view(torch.int32)
    weights = words[bags + keys : bags + 2 * keys].view(torch.float32) if has_weights else None
    return BagPart(words[:bags], words[bags : bags + keys], weights)


class SentBags(NamedTuple):
    """The bags of one table in a rank's batch.

    Attributes:
        parts: Part for each rank.
        bags: For each rank the numbers int64[b] of its bags: ``feature * B + sample``, the features those of a group.
    """

    parts: tuple[BagPart, ...]
    bags: tuple[Tensor, ...]


def sent_bags(
    num_rows: Sequence[int], places: Tensor, bags: Tensor, weights: Tensor | None, *, by_column: bool
) -> SentBags:
    """Split the bags of a table into the parts of the ranks.

    Args:
        num_rows: Distinct keys that go to each rank; by column all of them to each rank of the table.
        places: Place int64[N] of each key among the distinct keys, which are in the order of the ranks.
        bags: Bag int64[N] of each key, rising.
        weights: Weights float32[N] of the keys; None for none.
        by_column: Whether ranks have columns of all rows.
    """
    parts, numbers, first = [], [], 0
    chosen: slice | Tensor
    for count in num_rows:
        # All keys go there, or none: nothing has to be chosen.
        if by_column or count == sum(num_rows):
            chosen = slice(0, places.numel() if count else 0)
        else:
            chosen = ((places >= first) & (places < first + count)).nonzero()[:, 0]
        # Bags rise, so equal ones are next to each other. A bag without a key there does not occur, and gets nothing
        # from there.
        mine, lengths = torch.unique_consecutive(bags[chosen], return_counts=True)
        local = places[chosen] - (0 if by_column else first)
        of_keys = None if weights is None else weights[chosen].float()
        parts.append(BagPart(lengths.int(), local.int(), of_keys))
        numbers.append(mine)
        first += count
    return SentBags(tuple(parts), tuple(numbers))


class PooledOnRows(NamedTuple):
    """Bags of a group that the ranks of the rows pool.

    Attributes:
        lookup: The group, with the layout of the whole tables.
        table_of: Number of each feature's table in the collection.
        part: The bags.
        factors: float32[S * B, 1], factor of the sum of each bag.
    """

    lookup: LookupGroup
    table_of: tuple[int, ...]
    part: Jagged
    factors: Tensor

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of the tables, each once."""
        return tuple(dict.fromkeys(self.table_of))

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Columns D, samples B and features S."""
        layout = self.lookup.layout
        return layout.width, self.part.batch_size, len(layout.feature_names)

    def joined(self, vectors: Sequence[Sequence[Tensor]], wanted: Sequence[Routed]) -> Tensor:
        """Return the pooled vectors float32[B, S * D] of ``vectors [table][part]``, the parts that came."""
        width, size, features = self._sizes
        total = self.factors.new_zeros(self.factors.shape[0], width)
        for table in self.tables:
            bags_of_table = wanted[table].bags
            assert bags_of_table is not None, "a table that the ranks of the rows pool has bags"
            parts = vectors[table]
            # By column all parts came together, and all ranks of the table have the same bags.
            bags = bags_of_table.bags if len(parts) == len(bags_of_table.bags) else (max(bags_of_table.bags, key=len),)
            # Rank by rank: a bag occurs once in each part, so that its sum has one order and the same bits each time.
            for numbers, part in zip(bags, parts, strict=True):
                total.index_add_(0, numbers, part)
        return (total * self.factors).view(features, size, width).transpose(0, 1).reshape(size, features * width)

    def gradients(self, grad: Tensor | None, wanted: Sequence[Routed]) -> dict[int, list[Tensor]]:
        """Return for each table and rank the gradients float32[b, D] of its bags, of ``grad float[B, S * D]``."""
        width, size, features = self._sizes
        if grad is None:
            # The ranks of the rows expect gradients also of bags that no loss used.
            by_bag = self.factors.new_zeros(self.factors.shape[0], width)
        else:
            by_feature = grad.float().view(size, features, width).transpose(0, 1)
            by_bag = by_feature.reshape(features * size, width) * self.factors
        return {
            table: [by_bag[bags] for bags in pooled.bags] for table in self.tables if (pooled := wanted[table].bags)
        }


def factors_of(part: Jagged, layout: BagLayout) -> Tensor:
    """Return the factors float32[S * B, 1] of the bags' sums: 1, or one over the divisor of "mean" and "sqrtn"."""
    weights = None if part.weights is None else part.weights.detach().float()
    located = locate_checked(part.keys, part.offsets, *layout.on(part.keys.device), weights)
    return located.factors[:, None]


def is_poolable(pooling: str) -> bool:
    """Return whether parts of a bag can be pooled apart."""
    return pooling in _POOLED
