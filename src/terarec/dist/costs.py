# SPDX-License-Identifier: Apache-2.0
"""Costs of a placement of a table for each rank: rows, bytes on links, and seconds.

It is counted on the keys of sampled batches, so it contains their skew: keys that repeat in a rank's share travel once,
and the rank of a row gets its key once from each rank that wants it. Rows and bytes become seconds by `MachineCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.dist.placement import COPIES, PlacedTable
from terarec.dist.plan import Hybrid, Placement, PooledOn, ShardingPlan
from terarec.embedding.tables import AnyTableSpec
from terarec.spec import checks

HOT_SHARE = 0.5
"""A row is hot if at least this fraction of the ranks' shares of a batch has its key."""
_KEY_BYTES = 8
_BAG_BYTES = 4  # of the length of a bag, and of the place of each of its keys
_SUM_BYTES = 4  # of a sum over columns; in deterministic mode of each of the columns
_LESS = 0.9  # ranks of rows pool if at most this share of the bytes is sent, since splitting bags takes time, too

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineCosts:
    """Seconds of the parts of a step, measured by a probe or given.

    Attributes:
        lookup_seconds: Seconds to find and copy a row, whatever its width.
        lookup_byte_seconds: Seconds for each byte of its vector besides.
        update_seconds: Seconds to add a gradient to those of its row and update this, whatever its width.
        update_byte_seconds: Seconds for each byte of its weights and state besides.
        local_bandwidth: Bytes per second that a rank sends to ranks of its machine.
        bandwidth: Bytes per second that a rank sends to other machines.
        latency: Seconds of a collective without content.
        source: Origin of the numbers, as text.
    """

    lookup_seconds: float = 4e-8
    lookup_byte_seconds: float = 3e-10
    update_seconds: float = 8e-8
    update_byte_seconds: float = 4e-10
    local_bandwidth: float = 2e9
    bandwidth: float = 1.25e9
    latency: float = 2e-4
    source: str = "assumed"

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "source" and not 0 < getattr(self, field.name) < float("inf"):
                checks.fail(self, field.name, "a number > 0")


GPU_COSTS = MachineCosts(
    lookup_seconds=1e-10,
    lookup_byte_seconds=1e-12,
    update_seconds=4e-10,
    update_byte_seconds=1.5e-12,
    local_bandwidth=2e11,
    bandwidth=2e10,
    latency=3e-5,
    source="assumed for GPUs",
)
"""Costs on GPUs with NVLink and a port of 200 Gbit/s each; assumptions, where no probe has measured them."""


def hot_keys(shares: Sequence[Tensor], *, most: int | None = None) -> tuple[int, ...]:
    """Return the keys of hot rows, in ascending order; see `HOT_SHARE`.

    Args:
        shares: Distinct keys int64[n] of shares of batches.
        most: Maximum number of keys, of which those in most shares are taken; None for all.
    """
    if not shares:
        return ()
    keys, counts = torch.unique(torch.cat(list(shares)), return_counts=True)
    is_hot = counts >= HOT_SHARE * len(shares)
    keys, counts = keys[is_hot], counts[is_hot]
    if most is not None and keys.numel() > most:
        # Of keys in as many shares the lowest, so that all processes choose the same.
        keys = keys[counts.argsort(descending=True, stable=True)[:most]].sort().values
    return tuple(keys.tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableLoad:
    """Sizes of a table, and the keys of sampled batches that it looks up.

    Attributes:
        spec: The table.
        rows: Rows that it will have.
        num_bytes: Bytes of all of them, with optimizer state and indexes.
        row_bytes: Bytes of the weights and optimizer state of a row.
        batches: For each sampled batch the distinct keys int64[n] of each rank's share.
        bags: For each sampled batch and rank the keys of its share and the bag of each, int64[N] both; empty for tables
            with features that cannot be pooled in parts, such as sequences.
        forbids_copies: Whether its optimizer cannot have some rows, but not all, on every rank.
        row_sums: Sums over all columns of a row that an update takes, such as that of row-wise AdaGrad.
    """

    spec: AnyTableSpec
    rows: int
    num_bytes: int
    row_bytes: float
    batches: Sequence[Sequence[Tensor]]
    bags: Sequence[Sequence[tuple[Tensor, Tensor]]] = ()
    forbids_copies: bool = False
    row_sums: int = 0

    @property
    def hot_keys(self) -> tuple[int, ...]:
        """Keys of hot rows, in ascending order; see `HOT_SHARE`."""
        return hot_keys([keys for batch in self.batches for keys in batch])


class Cost:
    """Costs of a placement of a table for each rank, float64[R] each, in one block so that costs add up at once.

    Rows: bytes, rows looked up, gradients of rows, seconds of the rank's own work; then bytes on links, first inside a
    machine and then between machines: vectors sent and received, gradients and keys sent and received.
    """

    __slots__ = ("block", "pooling")

    def __init__(self, block: FloatArray, pooling: PooledOn = "samples") -> None:
        self.block = block
        self.pooling = pooling

    def seconds(self, costs: MachineCosts) -> FloatArray:
        """Return the seconds of each rank: its work, and each direction of the exchange as its fuller side."""
        # No latency: the tables of a plan share their collectives for any placements.
        total: FloatArray = self.block[3].copy()
        for first, speed in ((4, costs.local_bandwidth), (8, costs.bandwidth)):
            for phase in (first, first + 2):
                # Links send and receive at the same time.
                total += np.maximum(self.block[phase], self.block[phase + 1]) / speed
        return total

    @property
    def sent_bytes(self) -> FloatArray:
        """Bytes that each rank sends."""
        total: FloatArray = self.block[4] + self.block[6] + self.block[8] + self.block[10]
        return total


def cost_of(
    load: TableLoad,
    placement: Placement,
    plan: ShardingPlan,
    costs: MachineCosts,
    pooling: PooledOn | None = None,
) -> Cost:
    """Compute the mean costs of a placement over the sampled batches.

    Args:
        load: The table.
        placement: Its placement.
        plan: The plan that it is of.
        costs: Costs of parts of a step.
        pooling: Ranks that pool its bags; None for those with which fewer bytes travel.

    Raises:
        ConfigError: A placement that the table cannot have.
    """
    size = plan.world_size
    placed = PlacedTable(load.spec, placement, plan)
    requested, copies = np.zeros((size, size)), np.zeros(size)
    for batch in load.batches:
        for source, keys in enumerate(batch):
            if placed.by_column:
                requested[source, list(placed.ranks)] += keys.numel()
                continue
            owners = placed.owners(keys)
            # `COPIES` is -1, so that rows with copies are counted first and then those of rank 0, 1, ...
            counts = torch.bincount(owners - COPIES, minlength=size + 1).numpy()
            copies[source] += counts[0]
            requested[source] += counts[1:]
    count = max(1, len(load.batches))
    requested, copies = requested / count, copies / count
    block = np.zeros((12, size))
    block[0] = _bytes_on_ranks(load, placed, placement, size)
    block[1] = requested.sum(axis=0) + copies
    block[2] = requested.sum(axis=0) + copies.sum()  # every rank updates its copy by the gradients of all
    part = placed.width / load.spec.width
    vector_bytes = placed.width * (2 if plan.wire == "bfloat16" else 4)
    seconds_looked_up = costs.lookup_seconds + costs.lookup_byte_seconds * 4 * placed.width
    block[3] = block[1] * seconds_looked_up
    block[3] += block[2] * (costs.update_seconds + costs.update_byte_seconds * load.row_bytes * part)
    # A plan that names no machines has all ranks on one.
    node = np.arange(size) // (plan.ranks_per_node or size)
    is_near = node[:, None] == node
    # Keys travel in the direction of gradients, against that of vectors.
    vectors, integers = requested, _KEY_BYTES * requested
    pooled = _PooledOnRows(0 * requested, 0 * requested)
    # Sums in the order of the samples, copies and hot rows all need the vectors of keys.
    can_pool = not (plan.deterministic or placed.has_copies or placed.has_hot_rows) and size > 1
    if load.bags and can_pool and pooling != "samples":
        pooled = _pooled_on_rows(load, placed, size)
        travels = ~np.eye(size, dtype=bool)
        # Twice, since a vector comes and its gradient goes back.
        on_samples = 2 * vector_bytes * (requested * travels).sum()
        on_rows = ((2 * vector_bytes + _BAG_BYTES) * pooled.bags + _BAG_BYTES * pooled.keys)[travels].sum()
        if pooling is None:
            pooling = "rows" if on_rows < _LESS * on_samples else "samples"
    if pooling == "rows":
        vectors, integers = pooled.bags, integers + _BAG_BYTES * (pooled.bags + pooled.keys)
    spread = copies[:, None] * np.ones(size)  # gradients of copies go to all
    sums = _sums_over_columns(load, placed, size, is_exact=plan.deterministic)
    for first, mask in ((4, is_near & ~np.eye(size, dtype=bool)), (8, ~is_near)):
        rows, grads = vectors * mask, (vectors + spread) * mask
        numbers = (integers + _KEY_BYTES * spread + _SUM_BYTES * sums) * mask
        block[first] = rows.sum(axis=0) * vector_bytes
        block[first + 1] = rows.sum(axis=1) * vector_bytes
        block[first + 2] = grads.sum(axis=1) * vector_bytes + numbers.sum(axis=1)
        block[first + 3] = grads.sum(axis=0) * vector_bytes + numbers.sum(axis=0)
    return Cost(block, pooling or "samples")


def _sums_over_columns(load: TableLoad, placed: PlacedTable, size: int, *, is_exact: bool) -> FloatArray:
    """Return float64[R, R], the sums over columns that a rank sends to another, or their parts, in the mean of batches.

    With `is_exact` these are the gradients in the columns here.
    """
    sums = np.zeros((size, size))
    # Those of all ranks' samples: each rank of the table updates its columns of every row of the batch.
    if placed.by_column and load.row_sums:
        rows = [torch.unique(torch.cat(list(batch))).numel() for batch in load.batches]
        sums[np.ix_(placed.ranks, placed.ranks)] = (
            (placed.width if is_exact else load.row_sums) * sum(rows) / max(1, len(rows))
        )
    return sums


class _PooledOnRows(NamedTuple):
    """Bags that the ranks of the rows would pool, in the mean of the batches.

    Attributes:
        bags: float64[R, R], bags that a rank (row) has keys of on another (column).
        keys: float64[R, R], their keys.
    """

    bags: FloatArray
    keys: FloatArray


def _pooled_on_rows(load: TableLoad, placed: PlacedTable, size: int) -> _PooledOnRows:
    bags, numbers = np.zeros((size, size)), np.zeros((size, size))
    for batch in load.bags:
        for source, (keys, of_keys) in enumerate(batch):
            if placed.by_column:
                bags[source, list(placed.ranks)] += torch.unique_consecutive(of_keys).numel()
                numbers[source, list(placed.ranks)] += keys.numel()
                continue
            owners = placed.owners(keys)
            numbers[source] += torch.bincount(owners, minlength=size).numpy()
            # A pair (bag, rank) as one integer: a bag goes once to each rank that has any of its keys.
            parts = torch.unique(of_keys * size + owners)
            bags[source] += torch.bincount(parts.remainder(size), minlength=size).numpy()
    count = max(1, len(load.bags))
    return _PooledOnRows(bags / count, numbers / count)


def _bytes_on_ranks(load: TableLoad, placed: PlacedTable, placement: Placement, size: int) -> FloatArray:
    totals = np.zeros(size)
    if placed.has_copies:
        totals[:] = load.num_bytes
        return totals
    # Hashed keys and keys modulo the ranks spread evenly over them.
    totals[list(placed.ranks)] = load.num_bytes / len(placed.ranks)
    # Besides their share above: an upper bound, as in `ShardingPlan.weight_bytes`.
    if isinstance(placement, Hybrid):
        totals += len(placement.hot_keys) * load.num_bytes / max(1, load.rows)
    return totals
