# SPDX-License-Identifier: Apache-2.0
"""The distinct keys of a step on a device, whose numbers it need not tell before they go to other ranks.

A hash index would have to tell the host how many keys are new. Sorting gives tensors of as many elements as there are
keys, of which the first ones count; how many stays on the device, and is read once for all tables together with what
the other ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.dist.placement import PlacedTable
from terarec.dist.routing import BagPart, Routed, SentBags, StepKeys, TableKeys


class _SortedBags(NamedTuple):
    """The bags of a table by the rank that pools them; see `BagPart`.

    Attributes:
        lengths: int32[N], of each part of a bag; what is behind the last one is 0.
        bags: int64[N], the number of the bag of each part.
        places: int32[N], of each key among the distinct keys of its rank.
        weights: float32[N], or None.
        numbers: int64[R, 3].
        by_column: Whether ranks have columns of all rows, and so the same bags.
    """

    lengths: Tensor
    bags: Tensor
    places: Tensor
    weights: Tensor | None
    numbers: Tensor
    by_column: bool


def sorted_keys(
    tables: Sequence[PlacedTable], keys: Sequence[TableKeys], num_ranks: int, *, takes_counts: Sequence[bool]
) -> StepKeys:
    """Find the distinct keys of tables without waiting for their device; as `terarec.dist.routing.hashed_keys`.

    Args:
        tables: The tables.
        keys: Their keys.
        num_ranks: Number of ranks R.
        takes_counts: Whether each table needs the occurrences of keys.
    """
    joined = torch.cat([of_table.keys for of_table in keys])
    device, most = joined.device, num_ranks + 1
    ranks = [_destinations(table, of_table.keys, num_ranks) for table, of_table in zip(tables, keys, strict=True)]
    group = torch.cat([of_table + number * most for number, of_table in enumerate(ranks)])
    # Two stable sorts are one by table, rank and key.
    by_key = joined.argsort(stable=True)
    order = by_key[group[by_key].argsort(stable=True)]
    sorted_keys_, sorted_group = joined[order], group[order]
    is_first = torch.ones_like(joined, dtype=torch.bool)
    is_first[1:] = (sorted_keys_[1:] != sorted_keys_[:-1]) | (sorted_group[1:] != sorted_group[:-1])
    number = is_first.cumsum(0) - 1
    distinct = torch.empty_like(joined).scatter_(0, number, sorted_keys_)
    inverse = torch.empty_like(joined).scatter_(0, order, number)
    counts = torch.zeros_like(joined).index_add_(0, number, torch.ones_like(joined)) if any(takes_counts) else None
    # int64[T, R + 1], the last column that of copies.
    sizes = joined.new_zeros(len(tables) * most).index_add_(0, sorted_group, is_first.long()).view(len(tables), most)
    totals = sizes.sum(1)
    before = totals.cumsum(0) - totals
    places = [
        part - first
        for part, first in zip(
            torch.split(inverse, [of_table.keys.numel() for of_table in keys]), before.unbind(), strict=True
        )
    ]
    pooled = [
        _sorted_bags(table, of_table, place, of_ranks, of_table_sizes)
        for table, of_table, place, of_ranks, of_table_sizes in zip(
            tables, keys, places, ranks, sizes[:, :num_ranks], strict=True
        )
        if of_table.bags is not None
    ]
    rows = torch.stack([_rows(table, sizes[number], num_ranks) for number, table in enumerate(tables)], dim=1)
    bags = torch.stack([one.numbers for one in pooled], dim=1) if pooled else rows.new_zeros(num_ranks, 0, 3)
    return StepKeys(
        rows=rows,
        copies=sizes[:, num_ranks],
        bags=bags.to(device),
        totals=totals.unbind(),
        places=places,
        cut=partial(_cut, tables, [one.bags is not None for one in keys], distinct, counts, takes_counts, pooled),
    )


def _destinations(table: PlacedTable, keys: Tensor, num_ranks: int) -> Tensor:
    """Return the rank int64[N] of each key's row, and `num_ranks` for copies; by column the first rank of the table."""
    if table.by_column:
        return torch.full_like(keys, table.ranks[0])
    return table.owners(keys).remainder(num_ranks + 1)  # `COPIES` is -1


def _rows(table: PlacedTable, sizes: Tensor, num_ranks: int) -> Tensor:
    """Return the keys int64[R] for each rank, of ``sizes int64[R + 1]``."""
    if not table.by_column:
        return sizes[:num_ranks]
    total, nothing = sizes[table.ranks[0]], torch.zeros_like(sizes[0])
    return torch.stack([total if rank in table.ranks else nothing for rank in range(num_ranks)])


def _sorted_bags(table: PlacedTable, keys: TableKeys, places: Tensor, ranks: Tensor, sizes: Tensor) -> _SortedBags:
    """Split the bags of a table into the parts of the ranks, of which `ranks` has that of each key."""
    bags, weights = keys.bags, keys.weights
    assert bags is not None, "the ranks of the rows pool the table"
    order = ranks.argsort(stable=True)
    sorted_bags, sorted_ranks = bags[order], ranks[order]
    is_first = torch.ones_like(bags, dtype=torch.bool)
    is_first[1:] = (sorted_bags[1:] != sorted_bags[:-1]) | (sorted_ranks[1:] != sorted_ranks[:-1])
    number = is_first.cumsum(0) - 1
    # As long as the keys: the host does not know how many bags there are.
    lengths = torch.zeros_like(bags, dtype=torch.int32)
    lengths.index_add_(0, number, torch.ones_like(bags, dtype=torch.int32))
    num_bags = torch.zeros_like(sizes).index_add_(0, sorted_ranks, is_first.long())
    num_keys = torch.zeros_like(sizes).index_add_(0, sorted_ranks, torch.ones_like(bags))
    has_weights = torch.full_like(num_keys, int(weights is not None))
    numbers = torch.stack([num_bags, num_keys, has_weights], dim=1)
    if table.by_column:
        of_table = numbers[table.ranks[0]]
        numbers = torch.stack([of_table if rank in table.ranks else of_table * 0 for rank in range(len(numbers))])
        numbers[:, 2] = int(weights is not None)
    # Places of a rank's keys are counted from its first one.
    local = places[order] - (sizes.cumsum(0) - sizes)[sorted_ranks]
    return _SortedBags(
        lengths=lengths,
        bags=torch.zeros_like(bags).scatter_(0, number, sorted_bags),
        places=local.int(),
        weights=None if weights is None else weights[order].float(),
        numbers=numbers,
        by_column=table.by_column,
    )


def _cut(
    tables: Sequence[PlacedTable],
    has_bags: Sequence[bool],
    distinct: Tensor,
    counts: Tensor | None,
    takes_counts: Sequence[bool],
    pooled: Sequence[_SortedBags],
    rows: Tensor,
    copies: Tensor,
    bags: Tensor,
) -> list[Routed]:
    """Return the keys of each table, by their numbers in host memory."""
    sent = [_cut_bags(one, numbers) for one, numbers in zip(pooled, bags.transpose(0, 1).tolist(), strict=True)]
    of_pooled = iter(sent)
    wanted, first = [], 0
    for number, (table, on_ranks, num_copies) in enumerate(zip(tables, rows.T.tolist(), copies.tolist(), strict=True)):
        stop = first + (on_ranks[table.ranks[0]] if table.by_column else sum(on_ranks)) + num_copies
        times = counts[first:stop] if counts is not None and takes_counts[number] else None
        of_table = next(of_pooled) if has_bags[number] else None
        wanted.append(Routed(distinct[first:stop], times, on_ranks, num_copies, of_table))
        first = stop
    return wanted


def _cut_bags(source: _SortedBags, numbers: Sequence[Sequence[int]]) -> SentBags:
    parts, bags, first_bag, first_key = [], [], 0, 0
    for num_bags, num_keys, _ in numbers:
        of_bags, of_keys = slice(first_bag, first_bag + num_bags), slice(first_key, first_key + num_keys)
        weights = None if source.weights is None else source.weights[of_keys]
        parts.append(BagPart(source.lengths[of_bags], source.places[of_keys], weights))
        bags.append(source.bags[of_bags])
        # By column every rank of the table has all bags.
        if not source.by_column:
            first_bag, first_key = of_bags.stop, of_keys.stop
    return SentBags(tuple(parts), tuple(bags))
