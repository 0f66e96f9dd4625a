# SPDX-License-Identifier: Apache-2.0
"""`shard`: places the tables of a single-device model on several ranks and replaces collections by `ShardedCollection`.

No line of a model changes. A forward pass finds the distinct keys of this rank's samples, fetches their vectors from
the ranks of their rows (`terarec.dist.exchange`), and pools them here by the kernels of one device. The backward pass
sends gradients to the ranks of the rows, where the row optimizer of the part on that rank finds them as those of any
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, select
from terarec.dist.exchange import Exchange
from terarec.dist.lookups import Lookups, PendingLookups
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import ShardingPlan
from terarec.dist.ranks import Ranks
from terarec.dist.routing import is_poolable
from terarec.dist.streams import KeyStream, has_streams
from terarec.dist.tables import sharded_table
from terarec.embedding import EmbeddingCollection, EmbeddingOutput
from terarec.embedding.collection import columns_of
from terarec.embedding.modules import replace_modules
from terarec.embedding.output import cast
from terarec.errors import ConfigError, NoSpaceError
from terarec.memory.fast_tier import TierUse
from terarec.spec import FeatureSpec, TableSpec


def shard(model: nn.Module, plan: ShardingPlan, ranks: Ranks) -> nn.Module:
    """Place the tables of a model on ranks.

    Tables of a model that was built under `terarec.embedding.tables.record_tables` start from their initial weights,
    so that no rank ever allocates all rows. Other tables keep their rows, which must be the same on all ranks.

    Args:
        model: Any module with embedding collections; the same on all ranks. It is changed in place.
        plan: Placements of all tables.
        ranks: The ranks, all of which call this.

    Returns:
        `model`, or the sharded collection if `model` is a collection itself.

    Raises:
        ConfigError: A plan for another number of ranks or other tables, a placement that a table cannot have, or tables
            that have a row optimizer.
        CollectiveError: Ranks with other plans or tables.
        StorageError: Too little memory, or more bytes on a rank than the plan allows.
    """
    collections = {path: module for path, module in model.named_modules() if isinstance(module, EmbeddingCollection)}
    plan.check([spec for collection in collections.values() for spec in collection.specs], ranks.size)
    # Before memory is allocated and keys are exchanged: with another plan a rank would wait for the others, or get keys
    # of rows that it lacks.
    ranks.check_same(
        "plan", {"plan": repr(plan), "tables": {path: repr(module.specs) for path, module in collections.items()}}
    )
    sharded: dict[nn.Module, nn.Module] = {
        module: ShardedCollection(module, plan, ranks, name=path or "tables") for path, module in collections.items()
    }
    replace_modules(model, sharded)
    return sharded.get(model, model)


@contextmanager
def named_memory(model: nn.Module, purpose: str) -> Iterator[None]:
    """Raise the error of a device without memory with this rank and its largest table, if a model has some on ranks.

    Args:
        model: The model.
        purpose: What the memory is for.

    Raises:
        NoSpaceError: The device is out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        sharded = [module for module in model.modules() if isinstance(module, ShardedCollection)]
        if not sharded:
            raise
        raise max(sharded, key=_largest_table).no_memory(error, purpose) from None


def _largest_table(collection: ShardedCollection) -> int:
    """Return the bytes of the largest table of a collection on this rank."""
    return max(table.memory_bytes for table in collection.tables.values())


class ShardedCollection(nn.Module):
    """Embedding tables on several ranks, in place of a `terarec.embedding.EmbeddingCollection`.

    Attributes:
        features: Features, in the order of the output's columns.
        tables: The tables of all ranks by name, as checkpoints hold them: each rank's part has the keys of the whole.
        local: Collection of the parts of the tables on this rank.
        placed: The tables.
        columns: Columns of a batch of features with other names; see `EmbeddingCollection`.
        output_width: Columns of the pooled output.

    Args:
        collection: The collection on one device.
        plan: Placements of its tables.
        ranks: The ranks.
        name: Name of the collection, for errors.

    Raises:
        ConfigError: A placement that a table cannot have, or a collection that has a row optimizer.
        StorageError: Too little memory.
    """

    def __init__(self, collection: EmbeddingCollection, plan: ShardingPlan, ranks: Ranks, *, name: str) -> None:
        super().__init__()
        if any(arena.attached is not None for arena in collection.arenas):
            raise ConfigError(
                "shard",
                "got tables that have a row optimizer, expected the optimizer to be made after the tables moved",
            )
        placements, rank = plan.placements, ranks.rank
        self.features, self.output_width = collection.features, collection.output_width
        self.columns = collection.columns
        self.placed = [PlacedTable(spec, placements[spec.name], plan) for spec in collection.specs]
        self.local = EmbeddingCollection(
            [table.part(rank) for table in self.placed],
            # A feature a table, without pooling: ranks exchange vectors of keys, and features exist on the ranks of the
            # samples.
            [FeatureSpec(name=table.spec.name, table=table.spec.name, pooling="none") for table in self.placed],
            seed=collection.seed,
        )
        self.local.is_exchanged = True
        if ranks.size > 1:
            _number_rows(collection, self.local, self.placed, rank)
        split = [table for table in self.placed if table.by_column]
        self.local.split_columns = ColumnParts(split, ranks, is_exact=plan.deterministic) if split else None
        self.local.has_hot_rows = any(table.has_hot_rows for table in self.placed) and ranks.size > 1
        if ranks.size > 1:
            self.local.pending.over_ranks = partial(_sum_over, ranks)
            self.local.pending.counted = [self._counted(arena.table_names, rank) for arena in self.local.arenas]
            self.local.pending.has_norm = not self.local.has_hot_rows  # copies of a row would count several times
        self._started: PendingLookups | None = None
        self._announced: PendingLookups | None = None
        self._key_stream: KeyStream | None = None
        # Whether lookups begin before calls. None until a call has got the very object of `start`: a model may pass
        # other keys, and a lookup in vain would insert and count keys that no call asks for, or miss renamed features.
        # One rank has nothing to exchange, and a lookup that begins early would only keep its vectors longer.
        self._is_ahead: bool | None = None if ranks.size > 1 else False
        self._expected: Jagged | None = None
        self._starts = Series(ranks, f"lookups of {name} that begin ahead")
        self._announcements = Series(ranks, f"lookups of {name} that are announced")
        self._ranks_ahead = ranks
        pooled = self._pooled_tables(plan, ranks.size)
        exchange = Exchange(self.placed, self.local, ranks, wire=plan.wire, name=name, pooled=pooled)
        self._lookups = Lookups(collection, exchange, is_exact=plan.deterministic)
        self.tables = {
            table.spec.name: sharded_table(table, self.local.tables[table.spec.name], ranks, seed=collection.seed)
            for table in self.placed
        }
        for table_name, store in self.tables.items():
            store.fill(collection.tables[table_name])
        self.local.stores = self.tables
        self.train(collection.training)
        self.local.rows.requires_grad_(collection.is_trained)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up; all ranks call it at the same time, also those without a sample.

        Args:
            jagged: Keys of this rank's samples.

        Raises:
            ConfigError: A feature that `jagged` does not have, or offsets that decrease or do not cover the keys.
            KeyOutOfRangeError: A key outside its static table, with feature and table named.
            CollectiveError: Another rank has raised an error, or does not join; or some ranks read other keys than
                those of `start`, and others do not.
            StorageError: Memory or a dynamic table is full on this rank.
        """
        if torch.compiler.is_compiling():
            from terarec.ops.traced import run_eager  # loads the compiler

            apart: EmbeddingOutput = run_eager(self._look_up, jagged)
            return apart
        return self._look_up(jagged)

    def start(self, jagged: Jagged) -> None:
        """Begin the lookups of a batch before the first layers, so that its vectors are exchanged during these layers.

        The first call shows whether the model passes the object itself: before, and if it does not, nothing begins.

        Args:
            jagged: Keys of this rank's samples; a call with the same object follows.

        Raises:
            CollectiveError: Some ranks have dropped the lookups of the last call or of `announce`, and others use them.
            Exception: The errors of a call.
        """
        if self._is_ahead is None and self._is_trained:
            self._expected = jagged
        if self._is_ahead and self._is_trained:
            # A batch that was started and never called must not keep its rows.
            self._drop()
            # The caller may pass another batch: the keys of the announced batch were then sent in vain.
            pending = self._take_announced(jagged, drops=True)
            with self._lookups.exchange.named_memory():
                if pending is None:
                    pending = self._lookups.begin(jagged, is_trained=True)
                pending.look_up()
            self._started = pending
            self._starts.begin()

    def announce(self, jagged: Jagged) -> None:
        """Begin to send the keys of the batch after the present one.

        Args:
            jagged: Keys of this rank's samples; `start` or a call with the same object follows.

        Raises:
            CollectiveError: Some ranks have used the lookups of the last call, and others have not.
        """
        if not self._is_ahead or not self._is_trained:
            return
        if self._announced is not None:
            self._announced = None
            self._announcements.end(is_used=False)
        self._announcements.begin()
        device, stream = jagged.keys.device, self._key_stream
        if not has_streams(device):
            self._announced = self._lookups.begin(jagged, is_trained=True)
            return
        if stream is None or stream.device != device:
            stream = self._key_stream = KeyStream(device, self._lookups.exchange.ranks)
        # Errors of its collectives name the step, too.
        stream.ranks.step = self._lookups.exchange.ranks.step
        with self._lookups.exchange.named_memory(), stream.after(jagged.ready):
            self._announced = self._lookups.begin(jagged, is_trained=True, stream=stream)
        stream.keep(self._announced)

    def no_memory(self, error: torch.OutOfMemoryError, purpose: str) -> NoSpaceError:
        """Return the error of a device without memory, with this rank and its largest table."""
        return self._lookups.exchange.no_memory(error, purpose)

    def extra_repr(self) -> str:
        """Return one line per table with its placement."""
        return "\n".join(
            f"{table.spec.name}: {'copies' if table.has_copies else 'columns' if table.by_column else 'rows'} on ranks "
            f"{', '.join(map(str, table.ranks))}"
            for table in self.placed
        )

    def tier_use(self) -> TierUse | None:
        """Return the counters of the tables' tiers on this rank; None without tiers."""
        return self.local.tier_use()

    def prefetch(self, jagged: Jagged, number: int = 1) -> None:
        """Read rows of this rank that a coming batch needs into memory, where tables have tiers.

        Args:
            jagged: Keys of the batch, or of some of its samples.
            number: Number of lookups from now on to that of the batch: 1 for the next.
        """
        self.prefetch_rows(self._own_keys(self._keys_of(jagged)), number)

    def read_ahead_apart(self) -> None:
        """Let `requested_rows` be called by another thread than lookups; all ranks call this, before the thread starts.

        Its collectives then have an order of their own.
        """
        ranks = self._lookups.exchange.ranks
        if self._ranks_ahead is ranks:
            self._ranks_ahead = ranks.twin()

    def requested_rows(self, jagged: Jagged) -> dict[str, Tensor]:
        """Return which rows of this rank the samples of all ranks need; they all call it at the same time.

        Args:
            jagged: Keys of this rank's samples of a coming batch.

        Returns:
            Table in tiers -> keys int64[n] of its part here.
        """
        ranks = self._ranks_ahead
        wanted = self._distinct_keys(self._keys_of(jagged))
        tables = [table for table in self.placed if table.spec.name in wanted]
        parts = [
            [keys[table.is_on(keys, rank)] for table, keys in zip(tables, wanted.values(), strict=True)]
            for rank in range(ranks.size)
        ]
        if not tables:  # on no rank: their batches have the same features
            return {}
        # Counts first: a rank has to know how many rows come.
        counts = torch.tensor([[part.numel() for part in of_rank] for of_rank in parts])
        each = [len(tables)] * ranks.size
        came = ranks.all_to_all("counts of rows to read ahead", counts.flatten(), each, each).view(counts.shape)
        sent = torch.cat([part for of_rank in parts for part in of_rank])
        rows = ranks.all_to_all("rows to read ahead", sent, counts.sum(1).tolist(), came.sum(1).tolist())
        # Rank by rank, and of each rank table by table.
        blocks = torch.split(rows, came.flatten().tolist())
        return {
            table.spec.name: table.local_keys(torch.unique(torch.cat(blocks[number :: len(tables)])))
            for number, table in enumerate(tables)
        }

    def prefetch_rows(self, keys: Mapping[str, Tensor], number: int = 1) -> None:
        """Read rows of this rank into memory: table in tiers -> keys int64[n] of its part here; see `prefetch`."""
        parts = [keys.get(table.spec.name, torch.empty(0, dtype=torch.int64)) for table in self.placed]
        ends = torch.tensor([0, *accumulate(part.numel() for part in parts)])
        self.local.prefetch(
            Jagged(names=tuple(table.spec.name for table in self.placed), keys=torch.cat(parts), offsets=ends), number
        )

    def preload(self, keys: Mapping[str, Tensor]) -> None:
        """Load rows of this rank that a part of the data needs; see `EmbeddingCollection.preload`."""
        self.local.preload(self._own_keys(keys))

    def preload_next(
        self, present: Mapping[str, Tensor], keys: Mapping[str, Tensor], goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Load rows of the next part next to those of the present one; see `EmbeddingCollection.preload_next`."""
        self.local.preload_next(self._own_keys(present), self._own_keys(keys), goes_on)

    def _own_keys(self, keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return table in tiers -> keys int64[n] of its part here, of ``feature -> int64[n]``."""
        distinct, rank = self._distinct_keys(keys), self._lookups.exchange.ranks.rank
        tables = {table.spec.name: table for table in self.placed}
        return {
            name: tables[name].local_keys(every[tables[name].is_on(every, rank)]) for name, every in distinct.items()
        }

    def _keys_of(self, jagged: Jagged) -> dict[str, Tensor]:
        columns = columns_of(self.features, self.columns)
        return {name: select(jagged, [column]).keys for name, column in columns.items() if column in jagged.names}

    def _distinct_keys(self, keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return table in tiers -> distinct keys int64[n] that its rows may have, of ``feature -> int64[n]``."""
        distinct = {}
        for table in self.placed:
            readers = [f.name for f in self.features if f.table == table.spec.name and f.name in keys]
            if table.spec.tiers is None or not readers:
                continue
            every = torch.unique(torch.cat([keys[name] for name in readers]))
            # A key outside the table is an error of its lookup, which names feature and table; here it has no row to
            # read.
            if isinstance(table.spec, TableSpec):
                every = every[(every >= 0) & (every < table.spec.rows)]
            distinct[table.spec.name] = every
        return distinct

    def _pooled_tables(self, plan: ShardingPlan, size: int) -> list[int]:
        """Return the numbers of the tables that the ranks of the rows pool; none for one rank."""
        tables = []
        for number, table in enumerate(self.placed):
            if table.spec.name not in plan.pooled_on_rows:
                continue
            readers = [f for f in self.features if f.table == table.spec.name]
            others = [f for f in readers if not is_poolable(f.pooling)]
            if others:
                raise ConfigError(
                    f"plan.tables: table {table.spec.name!r}",
                    f"got pooling 'rows', but feature {others[0].name!r} is pooled by {others[0].pooling!r}, expected "
                    "'samples'",
                )
            if readers:
                tables.append(number)
        return tables if size > 1 else []

    def _counted(self, tables: Sequence[str], rank: int) -> Tensor | None:
        """Return 0 for tables of copies, whose gradients rank 0 counts, and 1 for others."""
        has_copies = {table.spec.name for table in self.placed if table.has_copies}
        counts = [0.0 if rank and name in has_copies else 1.0 for name in tables]
        return None if all(counts) else torch.tensor(counts)

    @property
    def _is_trained(self) -> bool:
        return torch.is_grad_enabled() and self.local.is_trained

    def _drop(self) -> None:
        """Drop lookups that were started and that no call followed.

        Raises:
            CollectiveError: Other ranks use them, and wait for this one in collectives that it would not join.
        """
        if self._started is None:
            return
        if self._started.fetched is not None:
            self._started.fetched.release()
        self._started = None
        self._starts.end(is_used=False)

    def _take_announced(self, jagged: Jagged, *, drops: bool = False) -> PendingLookups | None:
        """Return the lookups of a batch if it was announced; drop those of another one if asked."""
        pending = self._announced
        is_used = pending is not None and pending.jagged is jagged
        if pending is None or not (is_used or drops):
            return None
        self._announced = None
        self._announcements.end(is_used=is_used)
        return pending if is_used else None

    def _pending(self, jagged: Jagged, *, is_trained: bool) -> PendingLookups:
        """Return the lookups of a batch, which may have begun before."""
        if is_trained and self._expected is not None:
            # On all ranks or on none: a lookup that begins early is a collective of all.
            agree = self._lookups.exchange.ranks.agree
            self._is_ahead, self._expected = agree("whether lookups begin ahead", self._expected is jagged), None
        if is_trained and self._started is not None:
            pending = self._started
            if pending.jagged is jagged:
                self._started = None
                self._starts.end(is_used=True)
                return pending
            self._is_ahead = False  # the model reads other keys than those of its batches now
            self._drop()
        announced = self._take_announced(jagged) if is_trained else None
        return self._lookups.begin(jagged, is_trained=is_trained) if announced is None else announced

    def _look_up(self, jagged: Jagged) -> EmbeddingOutput:
        with self._lookups.exchange.named_memory():
            return self._output(jagged)

    def _output(self, jagged: Jagged) -> EmbeddingOutput:
        is_trained = self._is_trained
        pending = self._pending(jagged, is_trained=is_trained)
        fetched = pending.look_up()
        fetched.receive()
        if not is_trained:
            fetched.release()
        elif self._announced is not None:  # all ranks have said by now how many keys come
            self._announced.request.send_keys()
        out = self._lookups.output(pending, jagged, self.local.rows if is_trained else None)
        dtype = self.local.rows.dtype
        return out if dtype == torch.float32 else cast(out, dtype)


class Series:
    """Lookups that all ranks begin, one after the other, each of which all of them have to use or to drop.

    Args:
        ranks: The ranks.
        what: Name of the lookups, for errors.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._ranks = ranks
        self._what = ranks.register(what)
        self._number = 0

    def begin(self) -> None:
        """Count a lookup that this rank begins."""
        self._number += 1

    def end(self, *, is_used: bool) -> None:
        """Use or drop the last one; see `Ranks.choose`."""
        self._ranks.choose(self._what, self._number, is_used=is_used)


def _number_rows(
    whole: EmbeddingCollection, local: EmbeddingCollection, tables: Sequence[PlacedTable], rank: int
) -> None:
    """Let the rows of static tables be rounded as in one process, wherever they lie here."""
    sizes = {spec.name: spec.rows for spec in whole.specs if isinstance(spec, TableSpec)}
    bases: dict[str, int] = {}
    for arena in whole.arenas:
        # By the specs: tables that were only recorded have fewer rows.
        of_tables = [sizes.get(name, 0) for name in arena.table_names]
        bases |= dict(zip(arena.table_names, accumulate(of_tables, initial=0), strict=False))
    placed = {table.spec.name: table for table in tables}
    for arena in local.arenas:
        places = zip(arena.table_names, arena.table_base, strict=True)
        arena.number_by([part for name, base in places for part in placed[name].numbers(rank, base, bases[name])])


class ColumnParts:
    """Exchanges numbers of rows between the ranks that have their columns: a `terarec.ops.split_rows.SplitColumns`.

    Attributes:
        widths: Table -> columns of its whole rows.
        is_exact: Whether sums over columns have the bits of one process.

    Args:
        tables: The tables whose columns are on several ranks.
        ranks: The ranks.
        is_exact: Whether sums over columns have the bits of one process.
    """

    def __init__(self, tables: Sequence[PlacedTable], ranks: Ranks, *, is_exact: bool) -> None:
        self.widths: Mapping[str, int] = {table.spec.name: table.spec.width for table in tables}
        self.is_exact = is_exact
        self._members = {table.spec.name: table.ranks for table in tables}
        self._ranks = ranks

    def parts(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return ``[n, ...]`` of each table from all of its ranks, in the order of their columns."""
        size, me = self._ranks.size, self._ranks.rank
        mine = {
            name: values_of_name
            for name, values_of_name in values.items()
            if me in self._members[name] and values_of_name.numel()
        }
        for_rank = [[name for name in mine if rank != me and rank in self._members[name]] for rank in range(size)]
        sizes = [[mine[name].numel() for name in names] for names in for_rank]
        sent = [mine[name].flatten() for names in for_rank for name in names]
        counts = [sum(of_rank) for of_rank in sizes]
        # All ranks of a table have the same distinct rows of it, so each rank receives as much as it sends.
        nothing = torch.empty(0, device=next(iter(values.values())).device)
        came = self._ranks.all_to_all("sums over columns", torch.cat([nothing, *sent]), counts, counts)
        received = {
            (rank, name): part.view(mine[name].shape)
            for rank, of_rank in enumerate(torch.split(came, counts))
            for name, part in zip(for_rank[rank], torch.split(of_rank, sizes[rank]), strict=True)
        }
        return {name: [received.get((rank, name), own) for rank in self._members[name]] for name, own in values.items()}

    def place(self, table: str) -> int:
        """Return the number of this rank among those of a table of which it has columns."""
        return self._members[table].index(self._ranks.rank)


def _sum_over(ranks: Ranks, value: float) -> float:
    # In float64, in which one process adds up the norms of its arenas.
    return float(ranks.all_reduce_("sum for the norm of gradients", torch.tensor([value], dtype=torch.float64)))
