# SPDX-License-Identifier: Apache-2.0
"""`ShardingPlan`: the placement of each table on ranks, as a JSON file that can be edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from terarec.embedding.tables import AnyTableSpec
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.spec import DynamicTableSpec, TableSpec, checks, from_data, to_data
from terarec.spec.checks import did_you_mean

_FORMAT, _VERSION = "terarec.sharding", 1

Wire = Literal["float32", "bfloat16"]
PooledOn = Literal["samples", "rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """A copy of the table on every rank, for small tables: no vectors are exchanged, and gradients go to all ranks."""

    kind: ClassVar[str] = "data_parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableWise(checks.Checked):
    """The whole table on one rank (HugeCTR: localized slots).

    Attributes:
        rank: The rank.
    """

    kind: ClassVar[str] = "table_wise"
    rank: checks.NonNegativeInt


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWise:
    """The rows of the table spread over ranks by their keys (HugeCTR: distributed slots).

    Attributes:
        ranks: The ranks; empty for all.
    """

    kind: ClassVar[str] = "row_wise"
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self, self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnWise:
    """Every rank has the same number of columns of all rows.

    Attributes:
        ranks: The ranks, in the order of the columns; empty for all.
    """

    kind: ClassVar[str] = "column_wise"
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self, self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRowWise(checks.Checked):
    """The table on one machine, its rows spread over the ranks there.

    Attributes:
        node: Number of the machine.
    """

    kind: ClassVar[str] = "table_row_wise"
    node: checks.NonNegativeInt


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """The hot rows, which most batches use, as copies on every rank; the others spread over ranks by their keys.

    Attributes:
        hot_keys: Keys of the hot rows.
        ranks: The ranks of the other rows; empty for all.
    """

    kind: ClassVar[str] = "hybrid"
    hot_keys: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self, self.ranks)
        # Any int64, as the table may be a dynamic one.
        key = checks.list_of(checks.integer(-(2**63), 2**63 - 1))
        checks.follow(self, "hot_keys", key)
        if len(set(self.hot_keys)) < len(self.hot_keys):
            checks.reject(self, "hot_keys", "got a key twice, expected distinct keys")


Placement = DataParallel | TableWise | RowWise | ColumnWise | TableRowWise | Hybrid


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """Placement of one table.

    Attributes:
        table: Name of the table.
        placement: Ranks of its rows.
        pooling: Ranks that pool its bags: "samples" for those of the samples, to which the vectors of distinct keys go,
            or "rows" for those of the rows, which send a vector for each bag. The latter moves less for bags of many
            keys; all features of the table are sums or means then.
    """

    table: checks.Name
    placement: Placement
    pooling: PooledOn = "samples"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "placement", Placement, "a placement, such as RowWise()")
        if self.pooling == "rows" and isinstance(self.placement, DataParallel | Hybrid):
            checks.reject(
                self,
                "pooling",
                f"table {self.table!r}: got 'rows' for {self.placement.kind!r}, whose copies pool on the ranks of the "
                "samples, expected 'samples'",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """Placement of every table of a model on the ranks.

    Attributes:
        world_size: Number of ranks R that the plan is made for.
        tables: The tables, each once.
        ranks_per_node: Ranks on each machine, for placements on machines: ranks 0 to n - 1 are on machine 0, and so on.
            None for all ranks on one.
        wire: Type of vectors and gradients on their way between ranks.
        deterministic: Whether the gradients of a row are summed in the order of the samples of the whole batch, which
            gives the bits of one process but moves a gradient for each key and not for each distinct one.
        rank_bytes: Maximum bytes of weights on a rank; None for no bound.
    """

    world_size: checks.PositiveInt
    tables: tuple[TablePlan, ...]
    ranks_per_node: checks.PositiveInt | None = None
    wire: Wire = "float32"
    deterministic: bool = False
    rank_bytes: checks.PositiveInt | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.instance(self, "tables", tuple, "a tuple of TablePlan")
        checks.distinct(self, "tables", [entry.table for entry in self.tables])
        # The machine of a rank follows from its number, which needs as many ranks on each.
        if self.ranks_per_node is not None and self.world_size % self.ranks_per_node:
            checks.fail(self, "ranks_per_node", f"a divisor of the world_size {self.world_size}")
        pooled = [entry.table for entry in self.tables if entry.pooling == "rows"]
        if self.deterministic and pooled:
            checks.reject(
                self,
                "tables",
                f"table {pooled[0]!r}: got pooling 'rows' with deterministic=True, which adds up in the order of the "
                "samples, expected 'samples'",
            )
        for entry in self.tables:
            self._check_ranks_of(entry)

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement of each table by its name."""
        return {entry.table: entry.placement for entry in self.tables}

    @property
    def pooled_on_rows(self) -> frozenset[str]:
        """The tables whose bags the ranks of the rows pool."""
        return frozenset(entry.table for entry in self.tables if entry.pooling == "rows")

    def ranks_of(self, placement: Placement) -> tuple[int, ...]:
        """Return the ranks over which a placement spreads rows or columns; all ranks for copies."""
        every = tuple(range(self.world_size))
        if isinstance(placement, TableWise):
            return (placement.rank,)
        if isinstance(placement, TableRowWise):
            size = self.ranks_per_node or self.world_size
            return every[placement.node * size : (placement.node + 1) * size]
        if isinstance(placement, DataParallel):
            return every
        return placement.ranks or every

    def weight_bytes(self, tables: Sequence[AnyTableSpec]) -> list[int]:
        """Return the bytes of the weights of static `tables` on each rank."""
        total = [0] * self.world_size
        for spec in tables:
            # Nobody knows how many rows a dynamic table will have.
            if not isinstance(spec, TableSpec):
                continue
            placement = self.placements[spec.name]
            ranks = self.ranks_of(placement)
            row = spec.width * getattr(torch, spec.dtype).itemsize
            # Rows or columns, their bytes divide alike.
            share = spec.rows * row if isinstance(placement, DataParallel) else -(-spec.rows * row // len(ranks))
            for rank in ranks:
                total[rank] += share
            # An upper bound: the hot rows are counted in the shares, too.
            if isinstance(placement, Hybrid):
                total = [sum_so_far + len(placement.hot_keys) * row for sum_so_far in total]
        return total

    def check(self, tables: Sequence[AnyTableSpec], world_size: int) -> None:
        """Check that the plan fits a model and the ranks that train it.

        Args:
            tables: All tables of the model.
            world_size: Number of ranks.

        Raises:
            ConfigError: Another world size, an unknown table, a table that is left out, hot keys outside a table, or a
                width that columns cannot be cut from.
            StorageError: A rank that would hold more than `rank_bytes`.
        """
        self.check_size(world_size)
        specs = {spec.name: spec for spec in tables}
        for name in self.placements:
            if name not in specs:
                raise ConfigError(
                    "plan.tables",
                    f"got table {name!r}{did_you_mean(name, specs)}, expected tables of the model: {', '.join(specs)}",
                )
        missing = [name for name in specs if name not in self.placements]
        if missing:
            raise ConfigError("plan.tables", f"got none for table {missing[0]!r}, expected all tables of the model")
        for name, placement in self.placements.items():
            check_fits(specs[name], placement, len(self.ranks_of(placement)))
        if self.rank_bytes is not None:
            # Of weights alone, which the plan knows; the planner's own check has optimizer state and indexes, too.
            totals = self.weight_bytes(tables)
            rank = max(range(world_size), key=totals.__getitem__)
            if totals[rank] > self.rank_bytes:
                raise StorageError(
                    "plan.rank_bytes",
                    f"the weights on rank {rank} take {totals[rank]:,} bytes, at most "
                    f"{self.rank_bytes:,} are allowed; expected tables spread over more ranks",
                )

    def check_size(self, world_size: int) -> None:
        """Raise `ConfigError` unless the plan is made for `world_size` ranks."""
        if world_size != self.world_size:
            raise ConfigError(
                "plan.world_size", f"got {self.world_size}, expected {world_size}, the number of ranks that run"
            )

    def save(self, path: Path) -> None:
        """Write the plan as a JSON file, atomically."""
        write_versioned_json(path, _FORMAT, _VERSION, to_data(self))

    def _check_ranks_of(self, entry: TablePlan) -> None:
        placement = entry.placement
        if isinstance(placement, TableRowWise):
            nodes = self.world_size // (self.ranks_per_node or self.world_size)
            if placement.node >= nodes:
                checks.reject(
                    self, "tables", f"table {entry.table!r}: got node {placement.node}, expected 0 <= node < {nodes}"
                )
            return
        wrong = [rank for rank in self.ranks_of(placement) if rank >= self.world_size]
        if wrong:
            checks.reject(
                self, "tables", f"table {entry.table!r}: got rank {wrong[0]}, expected 0 <= rank < {self.world_size}"
            )


def load_plan(path: Path) -> ShardingPlan:
    """Read a plan that `ShardingPlan.save` or a person wrote.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a plan, or an invalid field; the message has its JSON path.
    """
    data = read_versioned_json(path, _FORMAT, _VERSION)
    try:
        return from_data(ShardingPlan, data, "$")
    except ConfigError as error:
        raise FormatError(path, error.where, error.problem) from None


def same_for_all(tables: Sequence[AnyTableSpec], placement: Placement, world_size: int) -> ShardingPlan:
    """Return the plan that gives all tables the same placement."""
    entries = tuple(TablePlan(table=spec.name, placement=placement) for spec in tables)
    return ShardingPlan(world_size=world_size, tables=entries)


COPIED_BYTES = 1 << 20
"""Static tables of at most this many bytes of weights have copies on all ranks in `default_plan`."""


def default_plan(tables: Sequence[AnyTableSpec], world_size: int) -> ShardingPlan:
    """Return a plan by the sizes of tables: copies of small static ones; large ones and dynamic ones by row.

    Static tables in tiers, and dynamic ones of fewer rows than ranks, are whole on a rank, each on the one that has the
    fewest bytes so far.
    """
    entries = []
    loads = [0] * world_size
    for spec in tables:
        placement: Placement = RowWise()
        rows = spec.rows if isinstance(spec, TableSpec) else spec.max_rows
        size = 0 if rows is None else rows * spec.width * getattr(torch, spec.dtype).itemsize
        is_whole = spec.tiers is not None if isinstance(spec, TableSpec) else rows is not None and rows < world_size
        if is_whole:
            rank = loads.index(min(loads))
            loads[rank] += size
            placement = TableWise(rank=rank)
        elif isinstance(spec, TableSpec) and size <= COPIED_BYTES:
            placement = DataParallel()
        entries.append(TablePlan(table=spec.name, placement=placement))
    return ShardingPlan(world_size=world_size, tables=tuple(entries))


def described(plan: ShardingPlan, tables: Sequence[AnyTableSpec]) -> list[str]:
    """Return a line for each table, such as "table 'item': row-wise over 4 ranks", and one for the bytes of ranks."""
    specs: Mapping[str, AnyTableSpec] = {spec.name: spec for spec in tables}
    lines = []
    for name, placement in plan.placements.items():
        spec, ranks = specs[name], plan.ranks_of(placement)
        size = f"{spec.rows:,} rows" if isinstance(spec, TableSpec) else "any keys"
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        word = placement.kind.replace("_", "-")
        pooled = ", bags pooled there" if name in plan.pooled_on_rows else ""
        lines.append(f"table {name!r} ({size} x {spec.width}): {word} on {where}{pooled}")
    shares = ", ".join(f"{num_bytes:,}" for num_bytes in plan.weight_bytes(tables))
    return [*lines, f"bytes of static weights by rank: {shares}"]


def _check_ranks(owner: object, ranks: tuple[int, ...]) -> None:
    checks.follow(owner, "ranks", checks.list_of(checks.integer(0, checks.MOST)))
    if len(set(ranks)) < len(ranks):
        checks.reject(owner, "ranks", f"got {list(ranks)}, expected distinct ranks")


def check_fits(spec: AnyTableSpec, placement: Placement, num_ranks: int) -> None:
    """Check that a table can have a placement.

    Args:
        spec: Table.
        placement: Where its rows are.
        num_ranks: Number of ranks that have rows of it.

    Raises:
        ConfigError: It cannot.
    """
    where = f"plan.tables: table {spec.name!r}"
    # All ranks exchange parts of one width.
    if isinstance(placement, ColumnWise) and spec.width % num_ranks:
        raise ConfigError(where, f"got {num_ranks} ranks for {spec.width} columns, expected a divisor of the width")
    if isinstance(placement, Hybrid) and isinstance(spec, TableSpec):
        outside = [key for key in placement.hot_keys if not 0 <= key < spec.rows]
        if outside:
            raise ConfigError(where, f"got the hot key {outside[0]}, expected 0 <= key < {spec.rows}")
    if isinstance(spec, DynamicTableSpec) and spec.max_rows is not None:
        hot = len(placement.hot_keys) if isinstance(placement, Hybrid) else 0
        # Shares of no row would be filled all the same, and no other number of ranks could load the table.
        if not isinstance(placement, ColumnWise | DataParallel) and spec.max_rows < hot + num_ranks:
            raise ConfigError(
                where,
                f"got max_rows {spec.max_rows:,} on {num_ranks} ranks, expected >= {hot + num_ranks:,}: {hot:,} hot "
                "rows and one for each rank",
            )
