# SPDX-License-Identifier: Apache-2.0
"""The planner: places the tables of a model by the costs of a step for each rank (`terarec.dist.costs`).

It is a search table by table: it starts with the table of the highest cost, and then repeats the search for each table
as long as the slowest rank becomes faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from terarec.dist.costs import Cost, FloatArray, MachineCosts, TableLoad, cost_of
from terarec.dist.plan import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    PooledOn,
    RowWise,
    ShardingPlan,
    TablePlan,
    TableRowWise,
    TableWise,
    check_fits,
)
from terarec.errors import ConfigError, NoSpaceError

_ROUNDS = 4  # over all tables, after which nothing changed in plans of up to 200 tables
_AS_GOOD = 1.02  # placements within this fraction of the least time differ by less than its uncertainty

_KINDS = tuple(placement.kind for placement in get_args(Placement))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTable:
    """A table of a plan.

    Attributes:
        table: Its name.
        placement: Kind of its placement.
        ranks: Ranks that have its rows, such as "0, 1, 2, 3".
        bytes: Bytes on all ranks together, with optimizer state and indexes.
        rows_looked_up: Rows that all ranks together look up in a step.
        sent_bytes: Bytes that all ranks together send in a step for it.
        seconds: Seconds of a step that it takes on the rank where it takes most.
        reason: Time of the slowest rank with other placements.
    """

    table: str
    placement: str
    ranks: str
    bytes: int
    rows_looked_up: int
    sent_bytes: int
    seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRank:
    """A rank of a plan.

    Attributes:
        rank: Its number.
        tables: Number of tables of which it has rows.
        table_bytes: Bytes of their rows, with optimizer state and indexes.
        rows_looked_up: Rows that it looks up in a step.
        rows_updated: Gradients of rows that it gets in a step.
        sent_bytes: Bytes that it sends in a step for tables.
        milliseconds: Estimated time of its tables in a step.
    """

    rank: int
    tables: int
    table_bytes: int
    rows_looked_up: int
    rows_updated: int
    sent_bytes: int
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSharding:
    """A plan and its costs.

    Attributes:
        plan: The placements.
        tables: Every table, in the order of the plan.
        ranks: Every rank.
        costs: Costs behind the figures.
    """

    plan: ShardingPlan
    tables: tuple[PlannedTable, ...]
    ranks: tuple[PlannedRank, ...]
    costs: MachineCosts

    @property
    def slowest_over_mean(self) -> float:
        """Time of the slowest rank in proportion to the mean of all."""
        each = [rank.milliseconds for rank in self.ranks]
        return max(each) * len(each) / sum(each) if sum(each) else 1.0

    def check(self) -> None:
        """Raise `StorageError` if a rank has more than the plan's `rank_bytes`, with optimizer state and indexes."""
        most = max(self.ranks, key=lambda rank: rank.table_bytes)
        allowed = self.plan.rank_bytes
        if allowed is not None and most.table_bytes > allowed:
            largest = max(self.tables, key=lambda table: table.bytes)
            total = sum(rank.table_bytes for rank in self.ranks)
            raise NoSpaceError(
                "plan.rank_bytes",
                f"the tables on rank {most.rank} take {most.table_bytes:,} bytes, at most {allowed:,} are allowed; the "
                f"largest table {largest.table!r} takes {largest.bytes:,}; expected more than "
                f"{total // allowed} ranks, tiers, or tables spread over more ranks",
            )


def plan_tables(
    loads: Sequence[TableLoad],
    world_size: int,
    costs: MachineCosts,
    *,
    ranks_per_node: int | None = None,
    rank_bytes: int | None = None,
    fixed: Mapping[str, str] | None = None,
) -> PlannedSharding:
    """Place tables so that the slowest rank is as fast as possible and no rank has more than `rank_bytes`.

    Args:
        loads: All tables of a model.
        world_size: Number of ranks R.
        costs: Costs of parts of a step.
        ranks_per_node: Ranks on each machine; None for all on one.
        rank_bytes: Maximum bytes of rows on a rank, with optimizer state and indexes; None for no bound.
        fixed: Table -> kind of placement that it has to have.

    Raises:
        ConfigError: An unknown table in `fixed`, or a placement that a table cannot have.
        StorageError: No placement that fits was found.
    """
    frame = ShardingPlan(world_size=world_size, tables=(), ranks_per_node=ranks_per_node, rank_bytes=rank_bytes)
    search = _Search(loads, frame, costs, fixed or {})
    search.run()
    plan = search.result()
    plan.check()
    return plan


def rate_plan(plan: ShardingPlan, loads: Sequence[TableLoad], costs: MachineCosts) -> PlannedSharding:
    """Return the costs of a plan.

    Args:
        plan: The plan, which fits the tables (`ShardingPlan.check`).
        loads: All tables of the model.
        costs: Costs of parts of a step.
    """
    search = _Search(loads, plan, costs, {})
    search.chosen = dict(plan.placements)
    search.poolings = {entry.table: entry.pooling for entry in plan.tables}
    return search.result()


class _Search:
    """Placements of all tables that are changed one at a time."""

    def __init__(
        self, loads: Sequence[TableLoad], frame: ShardingPlan, costs: MachineCosts, fixed: Mapping[str, str]
    ) -> None:
        self._loads = {load.spec.name: load for load in loads}
        self._frame = frame
        self._costs = costs
        self._fixed = fixed
        self._known: dict[tuple[str, Placement], Cost | None] = {}
        self._hot = {name: load.hot_keys for name, load in self._loads.items()}
        self.chosen: dict[str, Placement] = {}
        self.poolings: dict[str, PooledOn] = {}
        for name, kind in fixed.items():
            if name not in self._loads:
                raise ConfigError("place", f"got table {name!r}, expected one of {', '.join(map(repr, self._loads))}")
            if kind not in _KINDS:
                raise ConfigError("place", f"got {kind!r} for table {name!r}, expected one of {', '.join(_KINDS)}")
            if not self._candidates(name, np.zeros((12, frame.world_size))):
                raise ConfigError("place", f"got {kind!r} for table {name!r}, which it cannot have")

    def run(self) -> None:
        """Choose a placement for each table."""
        size = self._frame.world_size
        total = np.zeros((12, size))
        weight = {
            name: load.num_bytes + sum(keys.numel() for batch in load.batches for keys in batch) * load.row_bytes
            for name, load in self._loads.items()
        }
        # As in bin packing: large tables are placed while there is a choice, and small tables even out the rest.
        order = sorted(self._loads, key=lambda name: -weight[name])
        for name in order:
            total = self._place(name, total)
        for _ in range(_ROUNDS):
            before = dict(self.chosen)
            for name in order:
                total = self._place(name, total - self._cost(name, self.chosen[name]).block)
            if self.chosen == before:
                return

    def result(self) -> PlannedSharding:
        """Return the plan with its costs."""
        frame, size = self._frame, self._frame.world_size
        # The cost has chosen who pools the bags, unless the plan said so.
        entries = tuple(
            TablePlan(table=name, placement=placement, pooling=self._cost(name, placement).pooling)
            for name, placement in ((name, self.chosen[name]) for name in self._loads)
        )
        plan = ShardingPlan(
            world_size=size,
            tables=entries,
            ranks_per_node=frame.ranks_per_node,
            wire=frame.wire,
            deterministic=frame.deterministic,
            rank_bytes=frame.rank_bytes,
        )
        costs = {name: self._cost(name, self.chosen[name]) for name in self._loads}
        # Blocks add up, seconds do not: of each direction of a link the fuller side counts.
        total = Cost(sum((cost.block for cost in costs.values()), np.zeros((12, size))))
        seconds, sent = total.seconds(self._costs), total.sent_bytes
        tables = tuple(
            PlannedTable(
                table=name,
                placement=placement.kind,
                ranks=_listed(plan.ranks_of(placement)),
                bytes=int(costs[name].block[0].sum()),
                rows_looked_up=round(costs[name].block[1].sum()),
                sent_bytes=round(costs[name].sent_bytes.sum()),
                seconds=float(costs[name].seconds(self._costs).max()),
                reason=self._reason(name, total.block),
            )
            for name, placement in ((name, self.chosen[name]) for name in self._loads)
        )
        ranks = tuple(
            PlannedRank(
                rank=rank,
                tables=sum(bool(cost.block[0, rank]) for cost in costs.values()),
                table_bytes=int(total.block[0, rank]),
                rows_looked_up=round(total.block[1, rank]),
                rows_updated=round(total.block[2, rank]),
                sent_bytes=round(sent[rank]),
                milliseconds=1e3 * float(seconds[rank]),
            )
            for rank in range(size)
        )
        return PlannedSharding(plan=plan, tables=tables, ranks=ranks, costs=self._costs)

    def _cost(self, name: str, placement: Placement) -> Cost:
        cost = self._known_cost(name, placement)
        assert cost is not None, "only placements that a table can have are chosen"
        return cost

    def _known_cost(self, name: str, placement: Placement) -> Cost | None:
        """Return the cost of a placement; None where the table cannot have it."""
        at = (name, placement)
        # Rounds rate the same placements again, and each rating reads the keys of all sampled batches.
        if at not in self._known:
            load = self._loads[name]
            try:
                check_fits(load.spec, placement, len(self._frame.ranks_of(placement)))
                self._known[at] = cost_of(load, placement, self._frame, self._costs, self.poolings.get(name))
            except ConfigError:
                self._known[at] = None
        return self._known[at]

    def _place(self, name: str, others: FloatArray) -> FloatArray:
        """Choose the best placement of a table next to `others`, and return the cost of all."""
        rated = []
        for placement, cost in self._candidates(name, others):
            total = Cost(others + cost.block)
            seconds = total.seconds(self._costs)
            # The mean decides between placements that leave the slowest rank as it is.
            rated.append(
                (self._excess(total), seconds.max() + 0.1 * seconds.mean(), total.block[0].max(), placement, cost)
            )
        # One over the budget may be the best so far: later rounds move other tables away, and `check` rejects the rest.
        least = min(excess for excess, *_ in rated)
        rated = [entry for entry in rated if entry[0] == least]
        bound = _AS_GOOD * min(time for _, time, *_ in rated)
        _, _, _, placement, cost = min(
            (entry for entry in rated if entry[1] <= bound), key=lambda entry: (entry[2], entry[1])
        )
        self.chosen[name] = placement
        return others + cost.block

    def _excess(self, cost: Cost) -> float:
        """Return the bytes over the budget on the fullest rank."""
        bound = self._frame.rank_bytes
        return 0.0 if bound is None else max(0.0, float(cost.block[0].max()) - bound)

    def _candidates(self, name: str, others: FloatArray) -> list[tuple[Placement, Cost]]:
        """Return the possible placements of a table next to `others`, of each kind the one with the emptiest ranks."""
        load, frame = self._loads[name], self._frame
        size = frame.world_size
        seconds = Cost(others).seconds(self._costs)
        candidates: list[Placement] = [DataParallel(), RowWise()]
        for order in ((others[0], seconds), (seconds, others[0])):  # the rank with most time, and with most room
            rank = int(np.lexsort(order)[0])
            candidates.append(TableWise(rank=rank))
        if size > 1 and load.spec.width % size == 0:
            candidates.append(ColumnWise())
        per_node = frame.ranks_per_node or size
        if per_node < size:
            of_nodes = seconds.reshape(-1, per_node).max(axis=1)
            candidates.append(TableRowWise(node=int(of_nodes.argmin())))
        hot = self._hot[name]
        if hot and size > 1 and not load.forbids_copies:
            candidates.append(Hybrid(hot_keys=hot))
        kind = self._fixed.get(name)
        rated = [(placement, self._known_cost(name, placement)) for placement in dict.fromkeys(candidates)]
        return [(placement, cost) for placement, cost in rated if cost is not None and kind in (None, placement.kind)]

    def _reason(self, name: str, total: FloatArray) -> str:
        """Return the time of the slowest rank, and its times with other placements of the table."""
        mine = self.chosen[name]
        remark = "bags pooled there; " if self._cost(name, mine).pooling == "rows" else ""
        if name in self._fixed:
            return f"{remark}given"
        others = total - self._cost(name, mine).block
        words = []
        # One entry a kind: there may be two placements on a whole rank, of which the better one is shown.
        best: dict[str, str] = {}
        least: dict[str, float] = {}
        for placement, cost in self._candidates(name, others):
            changed = Cost(others + cost.block)
            slowest = float(changed.seconds(self._costs).max())
            if placement.kind == mine.kind or slowest >= least.get(placement.kind, float("inf")):
                continue
            least[placement.kind] = slowest
            word = placement.kind.replace("_", "-")
            best[placement.kind] = f"{word} {1e3 * slowest:.3g} ms"
            if self._excess(changed):
                best[placement.kind] = f"{word} would not fit"
        words = list(best.values())
        now = float(Cost(total).seconds(self._costs).max())
        return f"{remark}slowest rank {1e3 * now:.3g} ms" + (f"; {', '.join(words)}" if words else "")


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
