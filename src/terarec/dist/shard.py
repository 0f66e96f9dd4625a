"""`shard`: puts the tables of a single-device model on several ranks; `ShardedCollection` is what the model calls then.

No line of a model changes. A forward pass finds the distinct keys of this rank's samples, fetches their vectors from
the ranks of their rows (`terarec.dist.exchange`), and pools them here by the kernels of one device. The backward pass
sends gradients to the ranks of the rows, where the row optimizer of the part on that rank finds them as those of any
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, check_offsets, select
from terarec.dist.bags import factors_of, is_poolable, numbered_bags, sent_bags
from terarec.dist.exchange import Asked, Exchange, Fetched, Occurrences, Routed, Wanted, route
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import ShardingPlan
from terarec.dist.ranks import Ranks
from terarec.dist.tables import ShardedTable
from terarec.embedding import EmbeddingCollection, EmbeddingOutput
from terarec.embedding.output import assemble, bags_of, cast
from terarec.embedding.tables import LookupGroup, check_keys, lookup_groups, placed
from terarec.errors import ConfigError
from terarec.kernels.hash_index import new_hash_index
from terarec.kernels.rows import initialise_keys
from terarec.ops.bag_lookup import bag_lookup, key_weight_gradient
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient, key_gradients, summed_gradients
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec
from terarec.storage import DynamicArena, Rows, TierUse
from terarec.storage.arena import first_scale
from terarec.storage.growing_rows import GrowingRows
from terarec.storage.tiered import TieredTable

_ROWS_AT_ONCE = 1 << 18  # of first values or copies, which bounds their memory


def shard(model: nn.Module, plan: ShardingPlan, ranks: Ranks) -> nn.Module:
    """Put the tables of a model on ranks.

    Tables of a model that was built under `terarec.embedding.recording.record_tables` start from their first weights,
    so that no rank ever has memory for all; others keep the rows that they have, which all ranks must have alike.

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
    found = {path: module for path, module in model.named_modules() if isinstance(module, EmbeddingCollection)}
    plan.check([spec for collection in found.values() for spec in collection.specs], ranks.size)
    ranks.check_same("plan", {"plan": repr(plan), "tables": {path: repr(held.specs) for path, held in found.items()}})
    sharded = {path: ShardedCollection(held, plan, ranks, name=path or "tables") for path, held in found.items()}
    if "" in sharded:
        return sharded[""]
    for path, collection in sharded.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = collection
    return model


class _Group(NamedTuple):
    """Features that one call of `terarec.ops.bag_lookup` pools, or that the ranks of the rows pool.

    Attributes:
        lookup: The group, with the layout of the whole tables.
        tables: Number of each feature's table in the collection.
        vectors: Number of the matrix of vectors that it reads.
        is_there: Whether the ranks of the rows pool it, so that it reads no matrix.
    """

    lookup: LookupGroup
    tables: tuple[int, ...]
    vectors: int
    is_there: bool


class _Lookup(NamedTuple):
    """A group's bags in a batch: `keys` are rows of the matrix of fetched vectors, `layout` is that of this matrix."""

    group: _Group
    part: Jagged
    keys: Tensor
    layout: BagLayout
    key_weights: Tensor | None


class _PooledThere(NamedTuple):
    """Bags of a group that the ranks of the rows pool.

    Attributes:
        group: The group.
        part: The bags.
        factors: float32[S * B, 1], what the sum of each bag is multiplied by.
    """

    group: _Group
    part: Jagged
    factors: Tensor

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of the tables, each once."""
        return tuple(dict.fromkeys(self.group.tables))

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Columns D, samples B and features S."""
        layout = self.group.lookup.layout
        return layout.width, self.part.batch_size, len(layout.feature_names)

    def joined(self, fetched: Fetched, wanted: Sequence[Routed]) -> Tensor:
        """Return the pooled vectors float32[B, S * D] of the parts that came."""
        width, size, features = self._sizes
        total = torch.zeros(self.factors.shape[0], width)
        for table in self.tables:
            held = wanted[table].bags
            assert held is not None, "a table that the ranks of the rows pool has bags"
            parts = fetched.vectors[table]
            # By column all parts came together, and all ranks of the table have the same bags.
            bags = held.bags if len(parts) == len(held.bags) else (max(held.bags, key=len),)
            for numbers, part in zip(bags, parts, strict=True):
                total.index_add_(0, numbers, part)
        return (total * self.factors).view(features, size, width).transpose(0, 1).reshape(size, features * width)

    def gradients(self, grad: Tensor | None, wanted: Sequence[Routed]) -> dict[int, list[Tensor]]:
        """Return for each table and rank the gradients float32[b, D] of its bags, of ``grad float[B, S * D]``."""
        width, size, features = self._sizes
        if grad is None:
            by_bag = torch.zeros(self.factors.shape[0], width)
        else:
            by_feature = grad.float().view(size, features, width).transpose(0, 1)
            by_bag = by_feature.reshape(features * size, width) * self.factors
        return {table: [by_bag[bags] for bags in held.bags] for table in self.tables if (held := wanted[table].bags)}


class _Begun:
    """The lookups of a batch whose keys, or whose vectors, are on their way.

    Attributes:
        jagged: Keys of the batch.
        parts: Bags of each group of features.
        places: For each group the row of each key's vector in its matrix.
        wanted: Distinct keys of each table.
        asked: Keys on their way.
        error: What is wrong with the keys.
        fetched: Vectors on their way; None before the rows were looked up.
    """

    def __init__(
        self,
        jagged: Jagged,
        parts: Sequence[Jagged],
        places: Sequence[Tensor],
        wanted: Sequence[Routed],
        asked: Asked,
        error: Exception | None = None,
    ) -> None:
        self.jagged = jagged
        self.parts, self.places, self.wanted = parts, places, wanted
        self.asked, self.error = asked, error
        self.fetched: Fetched | None = None

    def look_up(self) -> Fetched:
        """Look up the rows that other ranks have asked for, and begin to send them."""
        if self.fetched is None:
            if self.error is not None:
                self.asked.send_keys()
                raise self.error
            self.fetched = self.asked.fetch()
        return self.fetched


class ShardedCollection(nn.Module):
    """Embedding tables on several ranks, in the place of a `terarec.embedding.EmbeddingCollection`.

    Attributes:
        features: Features, in the order of the output's columns.
        local: Collection of the parts of the tables on this rank.
        placed: The tables.
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
        self.placed = [PlacedTable(spec, placements[spec.name], plan) for spec in collection.specs]
        self.local = EmbeddingCollection(
            [table.part(rank) for table in self.placed],
            [FeatureSpec(name=table.spec.name, table=table.spec.name, pooling="none") for table in self.placed],
            seed=collection.seed,
        )
        self.local.is_exchanged = True
        self.local.split_tables = frozenset(table.spec.name for table in self.placed if table.by_column)
        self.local.has_hot_rows = any(table.has_hot_rows for table in self.placed) and ranks.size > 1
        if ranks.size > 1:
            self.local.pending.over_ranks = partial(_sum_over, ranks)
            self.local.pending.counted = [self._counted(arena.table_names, rank) for arena in self.local.arenas]
            self.local.pending.has_norm = not self.local.has_hot_rows
        self._is_exact = plan.deterministic
        pooled = self._pooled_tables(plan, ranks.size)
        self._started: _Begun | None = None
        self._announced: _Begun | None = None
        self._is_ahead = ranks.size > 1
        self._exchange = Exchange(self.placed, self.local, ranks, wire=plan.wire, name=name, pooled=pooled)
        self._groups, self._matrices = _grouped(collection, pooled)
        for table in self.placed:
            _fill(self.local, table, collection, rank)
        self.local.stores = {
            table.spec.name: ShardedTable(
                table,
                self.local.tables[table.spec.name],
                ranks,
                seed=collection.seed,
                restart_part=partial(_draw, self.local, table, rank),
            )
            for table in self.placed
        }
        self.train(collection.training)
        self.local.rows.requires_grad_(collection.is_trained)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up; all ranks call it at the same time, also those without a sample.

        Args:
            jagged: Keys of this rank's samples.

        Raises:
            ConfigError: A feature that `jagged` does not have, or offsets that decrease or do not cover the keys.
            KeyOutOfRangeError: A key outside its static table, with feature and table named.
            CollectiveError: Another rank has raised an error, or does not join.
            StorageError: Memory or a dynamic table is full on this rank.
        """
        if torch.compiler.is_compiling():
            from terarec.ops.traced import run_eager  # loads the compiler

            apart: EmbeddingOutput = run_eager(self._look_up, jagged)
            return apart
        return self._look_up(jagged)

    def start(self, jagged: Jagged) -> None:
        """Begin the lookups of a batch before the layers that come first, so that its vectors travel meanwhile.

        Args:
            jagged: Keys of this rank's samples; a call with the same object follows.

        Raises:
            Exception: What a call raises.
        """
        if self._is_ahead and self._learns:
            self._drop()
            begun, self._announced = self._announced, None
            if begun is None or begun.jagged is not jagged:
                begun = self._begin(jagged, is_trained=True)
            begun.look_up()
            self._started = begun

    def announce(self, jagged: Jagged) -> None:
        """Begin to send the keys of the batch after the present one.

        Args:
            jagged: Keys of this rank's samples; `start` or a call with the same object follows.
        """
        if self._is_ahead and self._learns:
            self._announced = self._begin(jagged, is_trained=True)

    def extra_repr(self) -> str:
        """Return one line per table with its placement."""
        return "\n".join(
            f"{table.spec.name}: {'copies' if table.has_copies else 'columns' if table.by_column else 'rows'} on ranks "
            f"{', '.join(map(str, table.ranks))}"
            for table in self.placed
        )

    def tier_use(self) -> TierUse | None:
        """Return what the tiers of the tables did on this rank so far; None without any."""
        return self.local.tier_use()

    def prefetch(self, jagged: Jagged, number: int = 1) -> None:
        """Read rows of this rank that a coming batch needs into memory, where tables have tiers.

        Args:
            jagged: Keys of the batch, or of some of its samples.
            number: Number of lookups from now on to that of the batch: 1 for the next.
        """
        names = {feature.name for feature in self.features}
        keys = self._own_keys({name: select(jagged, [name]).keys for name in jagged.names if name in names})
        parts = [keys.get(table.spec.name, torch.empty(0, dtype=torch.int64)) for table in self.placed]
        ends = torch.tensor([0, *accumulate(part.numel() for part in parts)])
        self.local.prefetch(
            Jagged(names=tuple(table.spec.name for table in self.placed), keys=torch.cat(parts), offsets=ends), number
        )

    def preload(self, keys: Mapping[str, Tensor]) -> None:
        """Load rows of this rank that a part of the data needs; see `EmbeddingCollection.preload`."""
        self.local.preload(self._own_keys(keys))

    def preload_beside(
        self, present: Mapping[str, Tensor], keys: Mapping[str, Tensor], goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Load rows of the next part beside those of the present one; see `EmbeddingCollection.preload_beside`."""
        self.local.preload_beside(self._own_keys(present), self._own_keys(keys), goes_on)

    def _own_keys(self, keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return table in tiers -> keys int64[n] of its part here, of ``feature -> int64[n]``."""
        found = {}
        for table in self.placed:
            readers = [f.name for f in self.features if f.table == table.spec.name and f.name in keys]
            if table.spec.tiers is None or not readers:
                continue
            every = torch.unique(torch.cat([keys[name] for name in readers]))
            if isinstance(table.spec, TableSpec):
                every = every[(every >= 0) & (every < table.spec.rows)]
            found[table.spec.name] = table.local_keys(every[table.is_on(every, self._exchange.ranks.rank)])
        return found

    def _pooled_tables(self, plan: ShardingPlan, size: int) -> list[int]:
        """Return the numbers of the tables that the ranks of the rows pool; none for one rank."""
        found = []
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
                found.append(number)
        return found if size > 1 else []

    def _counted(self, tables: Sequence[str], rank: int) -> Tensor | None:
        """Return 0 for tables of copies, whose gradients rank 0 counts, and 1 for others."""
        has_copies = {table.spec.name for table in self.placed if table.has_copies}
        counts = [0.0 if rank and name in has_copies else 1.0 for name in tables]
        return None if all(counts) else torch.tensor(counts)

    @property
    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self.local.is_trained

    def _begin(self, jagged: Jagged, *, is_trained: bool) -> _Begun:
        """Begin to send the keys of a batch; what is wrong with them is raised where its rows are looked up."""
        try:
            check_offsets(jagged)
            parts = [bags_of(jagged, group.lookup) for group in self._groups]
            for group, part in zip(self._groups, parts, strict=True):
                if isinstance(self.placed[group.tables[0]].spec, TableSpec):
                    check_keys(part, group.lookup.layout)
                is_learned = part.weights is not None and part.weights.requires_grad
                if group.is_there and is_learned:
                    raise ConfigError(
                        f"plan.tables: table {self.placed[group.tables[0]].spec.name!r}",
                        "got pooling 'rows' and weights of keys that need gradients, expected 'samples'",
                    )
            wanted, places = self._distinct(parts)
        except Exception as error:
            return _Begun(jagged, [], [], [], self._exchange.ask(None, is_trained=is_trained), error)
        return _Begun(jagged, parts, places, wanted, self._exchange.ask(wanted, is_trained=is_trained))

    def _drop(self) -> None:
        """Drop lookups that were started and that no call followed."""
        if self._started is not None and self._started.fetched is not None:
            self._started.fetched.release()
        self._started = None

    def _begun(self, jagged: Jagged, *, is_trained: bool) -> _Begun:
        """Return the lookups of a batch, which may have begun before."""
        if is_trained and self._started is not None:
            begun = self._started
            if begun.jagged is jagged:
                self._started = None
                return begun
            self._drop()
            self._is_ahead = False  # the model reads other keys than those of its batches
        if is_trained and self._announced is not None and self._announced.jagged is jagged:
            begun, self._announced = self._announced, None
            return begun
        return self._begin(jagged, is_trained=is_trained)

    def _look_up(self, jagged: Jagged) -> EmbeddingOutput:
        is_trained = self._learns
        begun = self._begun(jagged, is_trained=is_trained)
        fetched = begun.look_up()
        fetched.receive()
        if not is_trained:
            fetched.release()
        elif self._announced is not None:  # all ranks have said by now how many keys come
            self._announced.asked.send_keys()
        parts, places, wanted = begun.parts, begun.places, begun.wanted
        there = [
            _PooledThere(group, part, factors_of(part, group.lookup.layout))
            for group, part in zip(self._groups, parts, strict=True)
            if group.is_there
        ]
        matrices = [
            _stacked([part for table in tables for part in fetched.vectors[table]], self.placed[tables[0]].spec.width)
            if tables
            else torch.empty(0, 0)
            for tables in self._matrices
        ]
        lookups = [
            _Lookup(
                group,
                part,
                keys,
                placed(group.lookup.layout, matrices[group.vectors].shape[0]),
                part.weights if group.lookup.layout.takes_key_weights else None,
            )
            for group, part, keys in zip(self._groups, parts, places, strict=True)
            if not group.is_there
        ]
        step = _Step(self, lookups, matrices, fetched, wanted, there)
        pooled: Sequence[Tensor]
        if is_trained:
            with torch._C.DisableTorchFunctionSubclass():
                factors = [lookup.key_weights for lookup in lookups]
                pooled = _Pool.apply(self.local.rows, step, *factors)  # type: ignore[no-untyped-call]
        else:
            pooled = step.pooled()
        every: list[_Lookup | _PooledThere] = [*lookups, *there]
        results = [(lookup.group.lookup, lookup.part, held) for lookup, held in zip(every, pooled, strict=True)]
        out = assemble(self.features, results, jagged)
        dtype = self.local.rows.dtype
        return out if dtype == torch.float32 else cast(out, dtype)

    def _distinct(self, parts: Sequence[Jagged]) -> tuple[list[Routed], list[Tensor]]:
        """Return the distinct keys of each table, and for each group the row of each key's vector in its matrix."""
        spans: list[list[tuple[int, slice]]] = [[] for _ in self.placed]
        for number, (group, part) in enumerate(zip(self._groups, parts, strict=True)):
            size = part.batch_size
            ends = part.offsets[::size].tolist() if size else [0] * (len(group.tables) + 1)
            for feature, of_table in enumerate(group.tables):
                spans[of_table].append((number, slice(ends[feature], ends[feature + 1])))
        places = [torch.empty_like(part.keys) for part in parts]
        wanted: list[Routed] = []
        of_bags = {number: numbered_bags(parts[number]) for number, held in enumerate(self._groups) if held.is_there}
        of_matrix = {number: matrix for matrix, numbers in enumerate(self._matrices) for number in numbers}
        filled = [0] * len(self._matrices)
        for number, table in enumerate(self.placed):
            pieces = [parts[group].keys[span] for group, span in spans[number]]
            keys = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
            index = new_hash_index(keys.device)
            inverse, distinct = index.insert(keys, keys[:0], 0)
            counts = None
            if self._exchange.takes_counts[number]:
                counts = torch.bincount(inverse, minlength=distinct.numel())
            routed = route(table, Wanted(distinct, counts), self._exchange.ranks.size)
            if number in self._exchange.pooled:
                wanted.append(self._with_bags(routed, table, inverse, spans[number], parts, of_bags))
                continue
            wanted.append(routed)
            found, first = routed.place[inverse] + filled[of_matrix[number]], 0
            filled[of_matrix[number]] += distinct.numel()
            for index_of_group, span in spans[number]:
                count = span.stop - span.start
                places[index_of_group][span] = found[first : first + count]
                first += count
        return wanted, places

    def _with_bags(
        self,
        routed: Routed,
        table: PlacedTable,
        inverse: Tensor,
        spans: Sequence[tuple[int, slice]],
        parts: Sequence[Jagged],
        of_bags: Mapping[int, Tensor],
    ) -> Routed:
        """Return the keys of a table with their bags, all of one group."""
        bags = [of_bags[group][span] for group, span in spans]
        every = [(parts[group].weights, span) for group, span in spans]
        weights = [held[span] for held, span in every if held is not None]
        return routed._replace(
            bags=sent_bags(
                routed.num_rows,
                routed.place[inverse],
                torch.cat(bags) if bags else torch.empty(0, dtype=torch.int64),
                torch.cat(weights).detach() if weights else None,
                by_column=table.by_column,
            )
        )

    def keep(self, step: _Step, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a step's pooled vectors to the ranks of the rows.

        Args:
            step: The step.
            gradients: Gradients of the result of each lookup; None for results that nothing was computed from.
        """
        held = [
            BagGradient(
                lookup.keys,
                lookup.part.offsets,
                (_no_gradient(step, lookup) if grad is None else grad).float().contiguous(),
                lookup.layout,
                None if lookup.key_weights is None else lookup.key_weights.detach(),
            )
            for lookup, grad in zip(step.lookups, gradients, strict=False)
        ]
        if self._is_exact:
            step.fetched.return_occurrences(self._occurrences(step, held))
            return
        sums: list[Tensor] = [torch.empty(0)] * len(self.placed)
        for number, tables in enumerate(self._matrices):
            mine = [
                gradient for lookup, gradient in zip(step.lookups, held, strict=True) if lookup.group.vectors == number
            ]
            matrix = step.matrices[number]
            summed = summed_gradients(mine, matrix) if matrix.shape[0] else matrix
            sizes = [step.wanted[table].keys.numel() for table in tables]
            for table, part in zip(tables, torch.split(summed, sizes), strict=True):
                sums[table] = part
        of_bags: dict[int, list[Tensor]] = {}
        for lookup, grad in zip(step.there, gradients[len(step.lookups) :], strict=True):
            of_bags |= lookup.gradients(grad, step.wanted)
        finish = step.fetched.return_sums(sums, of_bags)
        # The gradients travel while the layers below the tables compute theirs.
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _occurrences(self, step: _Step, gradients: Sequence[BagGradient]) -> list[Occurrences]:
        """Return the occurrences by feature, in the order in which autograd's backward of one process keeps them."""
        found = []
        # The lookup that was made last is the first whose gradient comes.
        for lookup, gradient in reversed(list(zip(step.lookups, gradients, strict=True))):
            grads = key_gradients(gradient, step.matrices[lookup.group.vectors])
            size = lookup.part.batch_size
            ends = lookup.part.offsets[::size].tolist() if size else [0] * (len(lookup.group.tables) + 1)
            for feature, table in enumerate(lookup.group.tables):
                span = slice(ends[feature], ends[feature + 1])
                base = sum(
                    step.wanted[other].keys.numel()
                    for other in self._matrices[lookup.group.vectors][
                        : self._matrices[lookup.group.vectors].index(table)
                    ]
                )
                found.append(Occurrences(table, lookup.keys[span] - base, grads[span]))
        return found


def _sum_over(ranks: Ranks, value: float) -> float:
    return float(ranks.all_reduce_("sum for the norm of gradients", torch.tensor([value], dtype=torch.float64)))


class _Step:
    """One forward pass of a sharded collection, until its backward pass."""

    def __init__(
        self,
        collection: ShardedCollection,
        lookups: Sequence[_Lookup],
        matrices: Sequence[Tensor],
        fetched: Fetched,
        wanted: Sequence[Routed],
        there: Sequence[_PooledThere],
    ) -> None:
        self.collection = collection
        self.lookups = lookups
        self.matrices = matrices
        self.fetched = fetched
        self.wanted = wanted
        self.there = there

    def pooled(self) -> list[Tensor]:
        """Return the vectors of each lookup, and of what the ranks of the rows pooled."""
        here = [
            bag_lookup(
                self.matrices[lookup.group.vectors],
                lookup.keys,
                lookup.part.offsets,
                lookup.layout,
                key_weights=None if lookup.key_weights is None else lookup.key_weights.detach(),
            )
            for lookup in self.lookups
        ]
        return [*here, *(lookup.joined(self.fetched, self.wanted) for lookup in self.there)]


class _Pool(torch.autograd.Function):
    """All lookups of a step: one backward pass with the gradients of all, so that they travel together."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: _Step, *key_weights: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        return tuple(step.pooled())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step: _Step = ctx.step
        ctx.step = None
        of_weights: list[Tensor | None] = [None] * len(step.lookups)
        for index, (lookup, grad) in enumerate(zip(step.lookups, grads, strict=False)):
            if ctx.needs_input_grad[2 + index] and grad is not None and lookup.key_weights is not None:
                of_weights[index] = key_weight_gradient(
                    step.matrices[lookup.group.vectors],
                    lookup.keys,
                    lookup.part.offsets,
                    grad.float().contiguous(),
                    lookup.layout,
                    key_weights=lookup.key_weights.detach(),
                )
        step.collection.keep(step, grads)
        return None, None, *of_weights


def _no_gradient(step: _Step, lookup: _Lookup) -> Tensor:
    width, layout = lookup.layout.width, lookup.layout
    if layout.is_pooled:
        return torch.zeros(lookup.part.batch_size, width * len(layout.feature_names))
    return torch.zeros(lookup.keys.numel(), width)


def _grouped(collection: EmbeddingCollection, pooled: Sequence[int]) -> tuple[list[_Group], list[list[int]]]:
    """Return the groups of features that are looked up together, and the tables of each matrix of vectors.

    They are those of the collection on one device: static groups before those whose rows an index finds. Features of
    the tables `pooled`, which the ranks of the rows pool, have groups of their own.
    """
    specs = {spec.name: spec for spec in collection.specs}
    numbers = {name: number for number, name in enumerate(specs)}
    matrices = [
        [numbers[name] for name in arena.table_names if numbers[name] not in pooled] for arena in collection.arenas
    ]
    found = []
    features = collection.features
    there = [feature for feature in features if numbers[feature.table] in pooled]
    here = [feature for feature in features if numbers[feature.table] not in pooled]
    groups = [
        (group, is_there)
        for is_there, some in ((False, here), (True, there))
        for group in lookup_groups(collection.arenas, some)
    ]
    for group, is_there in groups:
        layout = group.layout
        names = [layout.table_names[table] for table in layout.feature_table]
        whole = [specs[name] for name in layout.table_names]
        rows = tuple(spec.rows if isinstance(spec, TableSpec) else 1 for spec in whole)
        lookup = replace(group, layout=replace(layout, table_base=(0,) * len(rows), table_rows=rows))
        found.append(_Group(lookup, tuple(numbers[name] for name in names), group.arena, is_there))

    # In one process static tables of one memory are looked up before all others.
    def comes_later(group: _Group) -> bool:
        spec = collection.specs[group.tables[0]]
        return isinstance(spec, DynamicTableSpec) or spec.tiers is not None

    return sorted(found, key=comes_later), matrices


def _stacked(parts: Sequence[Tensor], width: int) -> Tensor:
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(list(parts)) if parts else torch.empty(0, width)


def _fill(local: EmbeddingCollection, table: PlacedTable, collection: EmbeddingCollection, rank: int) -> None:
    """Give the part of a table on this rank its rows: first weights, or what the collection has."""
    whole, part = collection.tables[table.spec.name], local.tables[table.spec.name]
    columns = table.columns(rank)
    if isinstance(part, TieredTable):
        if table.by_column:
            part.arena.data.draw_columns(part.number, table.spec.width, columns.start)
        elif not table.keeps_numbers:
            part.arena.data.draw_by(part.number, partial(table.keys_of, rank))
        is_recorded = isinstance(table.spec, TableSpec) and len(whole) != table.spec.rows
        # Reading tiers opens their files, which all ranks would try to take.
        for piece in () if is_recorded or not whole.num_changed else whole.export_changed(_ROWS_AT_ONCE):
            mine = table.is_on(piece.keys, rank)
            weights = piece.weights[mine][:, columns].contiguous()
            part.import_(Rows(keys=table.local_keys(piece.keys[mine]), weights=weights))
        return
    if isinstance(table.spec, DynamicTableSpec):
        if table.by_column and isinstance(part.arena, DynamicArena):
            number = part.arena.table_names.index(table.spec.name)
            if isinstance(part.arena.data, GrowingRows):
                part.arena.data.columns[number] = (table.spec.width, columns.start)
            else:
                part.arena.data.draw_columns(number, table.spec.width, columns.start)
        for piece in whole.export_chunks(_ROWS_AT_ONCE) if len(whole) else ():
            mine = table.is_on(piece.keys, rank)
            if bool(mine.any()):
                part.import_(Rows(keys=piece.keys[mine], weights=piece.weights[mine][:, columns]))
        return
    if len(whole) != table.spec.rows:
        _draw(local, table, rank, collection.seed)
        return
    for rows, keys in _static_rows(table, rank, len(part)):
        part.import_(Rows(keys=rows, weights=whole.export(keys).weights[:, columns].contiguous()))


def _draw(local: EmbeddingCollection, table: PlacedTable, rank: int, seed: int) -> None:
    """Give the part of a static table on this rank the first weights of a seed."""
    if (table.keeps_numbers and not table.by_column) or table.spec.tiers is not None:
        return  # a table of this name draws the same rows
    assert isinstance(table.spec, TableSpec), "rows of a dynamic table are drawn when they are inserted"
    part = local.tables[table.spec.name]
    for rows, keys in _static_rows(table, rank, len(part)):
        weights = _first_weights(table.spec, keys, seed)[:, table.columns(rank)]
        part.import_(Rows(keys=rows, weights=weights.contiguous()))


def _static_rows(table: PlacedTable, rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of the part of a static table on this rank and their keys, int64[n] each."""
    if table.by_column and rank not in table.ranks:
        return
    for first in range(0, count, _ROWS_AT_ONCE):
        rows, keys = table.keys_on(rank, first, min(first + _ROWS_AT_ONCE, count))
        if keys.numel():
            yield rows, keys


def _first_weights(spec: TableSpec, keys: Tensor, seed: int) -> Tensor:
    """Return the first weights [n, D] of ``keys int64[n]``."""
    weights = torch.empty(keys.numel(), spec.width, dtype=getattr(torch, spec.dtype))
    initialise_keys(
        weights,
        torch.arange(keys.numel()),
        keys,
        table=spec.name,
        seed=seed,
        initializer=spec.initializer,
        scale=first_scale(spec),
    )
    return weights
