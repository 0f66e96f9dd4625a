# SPDX-License-Identifier: Apache-2.0
"""The lookups of a step on this rank: a batch's keys, pooled vectors, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terarec.batch import Jagged, check_offsets, feature_ends
from terarec.dist.exchange import Exchange, KeyRequest
from terarec.dist.occurrences import Occurrences, occurrences
from terarec.dist.routing import (
    PooledOnRows,
    Routed,
    StepKeys,
    TableKeys,
    factors_of,
    hashed_keys,
)
from terarec.dist.sorting import sorted_keys
from terarec.dist.streams import KeyStream
from terarec.dist.vectors import FetchedVectors
from terarec.embedding import EmbeddingCollection, EmbeddingOutput
from terarec.embedding.output import assemble, bags_of
from terarec.embedding.tables import LookupGroup, check_keys, lookup_groups
from terarec.errors import ConfigError
from terarec.kernels.ref.bag_lookup import numbered_bags
from terarec.ops.bag_lookup import bag_lookup, key_weight_gradient
from terarec.ops.layout import BagLayout, found_rows, placed
from terarec.ops.row_update import BagGradient, key_gradients, summed_gradients
from terarec.spec import DynamicTableSpec, TableSpec


class _Group(NamedTuple):
    """Features that one call of `terarec.ops.bag_lookup` pools, or that the ranks of the rows pool.

    Attributes:
        lookup: The group, with the layout of the whole tables.
        tables: Number of each feature's table in the collection.
        vectors: Number of the matrix of vectors that it reads.
        is_pooled_on_rows: Whether the ranks of the rows pool it, so that it reads no matrix.
    """

    lookup: LookupGroup
    tables: tuple[int, ...]
    vectors: int
    is_pooled_on_rows: bool


class _Span(NamedTuple):
    """The keys of one feature among those of its group.

    Attributes:
        group: Number of the group.
        feature: Number of the feature in the group.
        keys: Place of the keys.
    """

    group: int
    feature: int
    keys: slice


class _Lookup(NamedTuple):
    """A group's bags in a batch: `keys` are rows of the matrix of fetched vectors, `layout` is that of this matrix."""

    group: _Group
    part: Jagged
    keys: Tensor
    layout: BagLayout
    key_weights: Tensor | None


class PendingLookups:
    """The lookups of a batch while its keys or vectors are exchanged.

    Attributes:
        jagged: Keys of the batch.
        parts: Bags of each group of features.
        places: For each group the row of each key's vector in its matrix.
        request: Keys on their way.
        error: The error of invalid keys; None for valid ones.
        check: Function that raises the error of keys that a device has found to be invalid.
        fetched: Vectors on their way; None before the rows were looked up.
    """

    def __init__(
        self,
        jagged: Jagged,
        parts: Sequence[Jagged],
        places: Sequence[Tensor],
        request: KeyRequest,
        error: Exception | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.jagged = jagged
        self.parts, self.places = parts, places
        self.request, self.error, self.check = request, error, check
        self.fetched: FetchedVectors | None = None

    def look_up(self) -> FetchedVectors:
        """Look up the rows that other ranks have requested, and begin to send them."""
        if self.fetched is None:
            # Reads what the others have sent, so that no collective stays open when the error leaves this rank.
            if self.error is not None:
                self.request.send_keys()
                raise self.error
            self.request.send_keys()
            # A device says only that something is wrong; the check on the host names the key.
            if self.request.is_rejected:
                self.check()
            self.fetched = FetchedVectors(self.request)
        return self.fetched


class Lookups:
    """The lookups of a sharded collection.

    Attributes:
        exchange: Exchange of its keys, vectors and gradients.

    Args:
        collection: The collection on one device.
        exchange: Exchange of its keys, vectors and gradients.
        is_exact: Whether gradients are summed in the order of the whole batch's samples.
    """

    def __init__(self, collection: EmbeddingCollection, exchange: Exchange, *, is_exact: bool) -> None:
        self.exchange = exchange
        self._features = collection.features
        self._groups, self._matrices = _grouped(collection, exchange.pooled)
        self._occurring = self._in_backward_order() if is_exact else []

    def begin(self, jagged: Jagged, *, is_trained: bool, stream: KeyStream | None = None) -> PendingLookups:
        """Begin to send the keys of a batch; errors in them are raised where its rows are looked up.

        Args:
            jagged: The keys.
            is_trained: Whether gradients will come.
            stream: Stream of the keys and of this call; None for that of the step.
        """
        is_valid, is_here = None, jagged.keys.is_cpu
        try:
            # Those of a device are checked there, and told to the host with the numbers of distinct keys.
            if is_here:
                check_offsets(jagged)
            parts = self._parts(jagged)
            if is_here:
                self._check_keys(parts)
            else:
                is_valid = self._is_valid(jagged, parts)
            wanted, places, occurring = self._distinct(parts)
        except Exception as error:
            # The other ranks wait for counts of this one, so that it reports the error to them before it raises.
            # As many as with valid keys: the counts of all ranks have one length.
            none = [None] * (len(self._occurring) if is_trained else 0)
            failed = KeyRequest(self.exchange, None, is_trained=is_trained, occurrences=none, stream=stream)
            return PendingLookups(jagged, [], [], failed, error)
        request = KeyRequest(
            self.exchange,
            wanted,
            is_trained=is_trained,
            is_valid=is_valid,
            occurrences=occurring if is_trained else (),
            stream=stream,
        )
        return PendingLookups(jagged, parts, places, request, check=partial(self._check, jagged, parts))

    def _parts(self, jagged: Jagged) -> list[Jagged]:
        """Return the bags of each group of features."""
        parts = [bags_of(jagged, group.lookup) for group in self._groups]
        for group, part in zip(self._groups, parts, strict=True):
            # Gradients of weights need the vector of each key, which stays where it is pooled.
            has_gradient = part.weights is not None and part.weights.requires_grad
            if group.is_pooled_on_rows and has_gradient:
                raise ConfigError(
                    f"plan.tables: table {self.exchange.tables[group.tables[0]].spec.name!r}",
                    "got pooling 'rows' and weights of keys that need gradients, expected 'samples'",
                )
        return parts

    def _check(self, jagged: Jagged, parts: Sequence[Jagged]) -> None:
        check_offsets(jagged)
        self._check_keys(parts)

    def _check_keys(self, parts: Sequence[Jagged]) -> None:
        for group, part in zip(self._groups, parts, strict=True):
            # A dynamic table takes any key.
            if isinstance(self.exchange.tables[group.tables[0]].spec, TableSpec):
                check_keys(part, group.lookup.layout)

    def _is_valid(self, jagged: Jagged, parts: Sequence[Jagged]) -> Tensor:
        """Return whether `_check` would raise no error, bool[] on the device."""
        lengths = jagged.offsets.diff()
        checks = [jagged.offsets[0] == 0, jagged.offsets[-1] == jagged.keys.numel(), (lengths >= 0).all()]
        for group, part in zip(self._groups, parts, strict=True):
            for (first, stop), table in zip(pairwise(feature_ends(part)), group.tables, strict=True):
                spec = self.exchange.tables[table].spec
                if isinstance(spec, TableSpec):
                    keys = part.keys[first:stop]
                    checks.append(((keys >= 0) & (keys < spec.rows)).all())
        # One number, which goes with the counts: the host waits for the device no further time.
        return torch.stack(checks).all()

    def output(self, pending: PendingLookups, jagged: Jagged, rows: Tensor | None) -> EmbeddingOutput:
        """Return the output of a batch whose vectors have arrived.

        Args:
            pending: Its lookups.
            jagged: Its keys.
            rows: Parameter that represents the tables; None without gradients.
        """
        fetched = pending.look_up()
        pooled_on_rows = [
            PooledOnRows(group.lookup, group.tables, part, factors_of(part, group.lookup.layout))
            for group, part in zip(self._groups, pending.parts, strict=True)
            if group.is_pooled_on_rows
        ]
        matrices = [
            _stacked([part for table in tables for part in fetched.vectors[table]], self._width(tables[0]), jagged.keys)
            if tables
            # Of an arena whose tables are all pooled on the ranks of the rows nothing is looked up here.
            else jagged.keys.new_empty(0, 0, dtype=torch.float32)
            for tables in self._matrices
        ]
        lookups = [
            _Lookup(
                group,
                part,
                keys,
                placed(group.lookup.layout, found_rows(matrices[group.vectors])),
                part.weights if group.lookup.layout.takes_key_weights else None,
            )
            for group, part, keys in zip(self._groups, pending.parts, pending.places, strict=True)
            if not group.is_pooled_on_rows
        ]
        step = _Step(self, lookups, matrices, fetched, pending.request.wanted, pooled_on_rows)
        pooled: Sequence[Tensor]
        if rows is None:
            pooled = step.pooled()
        else:
            # `rows` is a `TableParameter`, whose functions refuse to compute with it.
            with torch._C.DisableTorchFunctionSubclass():
                factors = [lookup.key_weights for lookup in lookups]
                pooled = _Pool.apply(rows, step, *factors)  # type: ignore[no-untyped-call]
        every = [(one.group.lookup, one.part) for one in lookups] + [(one.lookup, one.part) for one in pooled_on_rows]
        results = [(lookup, part, vectors) for (lookup, part), vectors in zip(every, pooled, strict=True)]
        return assemble(self._features, results, jagged)

    def _width(self, table: int) -> int:
        return self.exchange.tables[table].spec.width

    def _in_backward_order(self) -> list[tuple[int, int, int]]:
        """Return number of the group, of the feature in it and of its table of all features.

        They are in the order in which autograd's backward of one process keeps their gradients, arena by arena: all
        ranks send them in it.
        """
        # The lookup that was made last is the first whose gradient comes.
        features = [
            (number, feature, table)
            for number in reversed(range(len(self._groups)))
            for feature, table in enumerate(self._groups[number].tables)
        ]
        tables = [table for of_arena in self.exchange.arena_tables() for table in of_arena]
        return sorted(features, key=lambda feature: tables.index(feature[2]))

    def _distinct(self, parts: Sequence[Jagged]) -> tuple[StepKeys, list[Tensor], list[Occurrences]]:
        """Return the distinct keys of the tables.

        Also, for each group, the row of each key's vector in its matrix, and the occurrences of the keys of features
        whose gradients are sent one by one.
        """
        spans: list[list[_Span]] = [[] for _ in self.exchange.tables]
        for number, (group, part) in enumerate(zip(self._groups, parts, strict=True)):
            for feature, (of_table, (first, stop)) in enumerate(
                zip(group.tables, pairwise(feature_ends(part)), strict=True)
            ):
                spans[of_table].append(_Span(number, feature, slice(first, stop)))
        of_bags = {
            number: _bags_of_keys(parts[number]) for number, one in enumerate(self._groups) if one.is_pooled_on_rows
        }
        keys = [self._keys_of(number, of_table, parts, of_bags) for number, of_table in enumerate(spans)]
        distinct_keys = hashed_keys if keys[0].keys.is_cpu else sorted_keys
        exchange = self.exchange
        wanted = distinct_keys(exchange.tables, keys, exchange.ranks.size, takes_counts=exchange.takes_counts)
        places = [torch.empty_like(part.keys) for part in parts]
        of_features: dict[tuple[int, int], Tensor] = {}
        for tables in self._matrices:
            # Tables of an arena share a matrix, in which the vectors of one come after those of another.
            filled: int | Tensor = 0
            for table in tables:
                places_of_keys, first = wanted.places[table] + filled, 0
                filled = filled + wanted.totals[table]
                for group_number, feature, span in spans[table]:
                    stop = first + span.stop - span.start
                    places[group_number][span] = places_of_keys[first:stop]
                    of_features[group_number, feature] = wanted.places[table][first:stop]
                    first = stop
        occurring = [
            occurrences(table, exchange.tables[table], wanted.rows[:, table], of_features[group_number, feature])
            for group_number, feature, table in self._occurring
        ]
        return wanted, places, occurring

    def _keys_of(
        self, table: int, spans: Sequence[_Span], parts: Sequence[Jagged], of_bags: Mapping[int, Tensor]
    ) -> TableKeys:
        """Return the keys of a table, which groups have in `spans`; those that the ranks of rows pool with bags."""
        pieces = [parts[group].keys[span] for group, _, span in spans]
        if len(pieces) == 1:
            keys = pieces[0]
        else:
            keys = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=self.exchange.device)
        if table not in self.exchange.pooled:
            return TableKeys(keys)
        bags = [of_bags[group][span] for group, _, span in spans]
        every = [(parts[group].weights, span) for group, _, span in spans]
        weights = [values[span] for values, span in every if values is not None]
        return TableKeys(keys, torch.cat(bags), torch.cat(weights).detach() if weights else None)

    def keep(self, step: _Step, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a step's pooled vectors to the ranks of the rows.

        Args:
            step: The step.
            gradients: Gradients of the result of each lookup; None for results that nothing was computed from.
        """
        # Zeros for results that no loss used: the other ranks expect gradients of all keys that this one requested.
        kept = [
            BagGradient(
                lookup.keys,
                lookup.part.offsets,
                (_no_gradient(step, lookup) if grad is None else grad).float().contiguous(),
                lookup.layout,
                None if lookup.key_weights is None else lookup.key_weights.detach(),
            )
            for lookup, grad in zip(step.lookups, gradients, strict=False)
        ]
        if self._occurring:
            of_keys = [
                key_gradients(gradient, step.matrices[lookup.group.vectors])
                for lookup, gradient in zip(step.lookups, kept, strict=True)
            ]
            ends = [feature_ends(lookup.part) for lookup in step.lookups]
            step.fetched.return_occurrences(
                [
                    of_keys[group][ends[group][feature] : ends[group][feature + 1]]
                    for group, feature, _ in self._occurring
                ]
            )
            return
        # Each distinct key's gradients are summed here, so that one vector travels for it.
        sums: list[Tensor] = [torch.empty(0, device=self.exchange.device)] * len(self.exchange.tables)
        for number, tables in enumerate(self._matrices):
            mine = [
                gradient for lookup, gradient in zip(step.lookups, kept, strict=True) if lookup.group.vectors == number
            ]
            matrix = step.matrices[number]
            summed = summed_gradients(mine, matrix) if matrix.shape[0] else matrix
            sizes = [step.wanted[table].keys.numel() for table in tables]
            for table, part in zip(tables, torch.split(summed, sizes), strict=True):
                sums[table] = part
        of_bags: dict[int, list[Tensor]] = {}
        for lookup, grad in zip(step.pooled_on_rows, gradients[len(step.lookups) :], strict=True):
            of_bags |= lookup.gradients(grad, step.wanted)
        finish = step.fetched.return_sums(sums, of_bags)
        # Called at the end of this backward pass: gradients travel while the layers below the tables compute theirs.
        torch.autograd.Variable._execution_engine.queue_callback(finish)


class _Step:
    """One forward pass of a sharded collection, until its backward pass."""

    def __init__(
        self,
        owner: Lookups,
        lookups: Sequence[_Lookup],
        matrices: Sequence[Tensor],
        fetched: FetchedVectors,
        wanted: Sequence[Routed],
        pooled_on_rows: Sequence[PooledOnRows],
    ) -> None:
        self.owner = owner
        self.lookups = lookups
        self.matrices = matrices
        self.fetched = fetched
        self.wanted = wanted
        self.pooled_on_rows = pooled_on_rows

    def pooled(self) -> list[Tensor]:
        """Return the vectors of each lookup, including those that the ranks of the rows pooled."""
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
        return [*here, *(lookup.joined(self.fetched.vectors, self.wanted) for lookup in self.pooled_on_rows)]


class _Pool(torch.autograd.Function):
    """All lookups of a step: one backward pass with the gradients of all, so that they travel together."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: _Step, *key_weights: Tensor | None) -> tuple[Tensor, ...]:
        # None for results that no loss used: `Lookups.keep` makes zeros where other ranks wait for them.
        ctx.set_materialize_grads(False)
        ctx.step = step
        return tuple(step.pooled())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step: _Step = ctx.step
        ctx.step = None  # its vectors are freed with this call, though the graph may live on
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
        with step.owner.exchange.named_memory():
            step.owner.keep(step, grads)
        return None, None, *of_weights


def _no_gradient(step: _Step, lookup: _Lookup) -> Tensor:
    width, layout, device = lookup.layout.width, lookup.layout, lookup.keys.device
    if layout.is_pooled:
        return torch.zeros(lookup.part.batch_size, width * len(layout.feature_names), device=device)
    return torch.zeros(lookup.keys.numel(), width, device=device)


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
    groups_of_rows = []
    features = collection.features
    pooled_on_rows = [feature for feature in features if numbers[feature.table] in pooled]
    others = [feature for feature in features if numbers[feature.table] not in pooled]
    groups = [
        (group, is_pooled_on_rows)
        for is_pooled_on_rows, some in ((False, others), (True, pooled_on_rows))
        for group in lookup_groups(collection.arenas, some)
    ]
    for group, is_pooled_on_rows in groups:
        layout = group.layout
        names = [layout.table_names[table] for table in layout.feature_table]
        whole = [specs[name] for name in layout.table_names]
        # Keys are those of the whole tables, of which this rank may have few rows.
        rows = tuple(spec.rows if isinstance(spec, TableSpec) else 1 for spec in whole)
        lookup = replace(group, layout=replace(layout, table_base=(0,) * len(rows), table_rows=rows))
        groups_of_rows.append(_Group(lookup, tuple(numbers[name] for name in names), group.arena, is_pooled_on_rows))

    # In one process static tables of one memory are looked up before all others.
    def comes_later(group: _Group) -> bool:
        spec = collection.specs[group.tables[0]]
        return isinstance(spec, DynamicTableSpec) or spec.tiers is not None

    return sorted(groups_of_rows, key=comes_later), matrices


def _bags_of_keys(part: Jagged) -> Tensor:
    """Return the bag int64[N] of each key; on a device that of the last one if offsets do not rise from 0 to N."""
    lengths, num_keys = part.offsets.diff(), part.keys.numel()
    if lengths.is_cpu:
        return numbered_bags(lengths, num_keys)
    # Those of a device are checked later, and by others it would write behind the bags, which ends the process.
    is_valid = ((lengths >= 0) & (lengths <= num_keys)).all() & (lengths.sum() == num_keys)
    others = torch.zeros_like(lengths)
    others[-1:] = num_keys
    return numbered_bags(torch.where(is_valid, lengths, others), num_keys)


def _stacked(parts: Sequence[Tensor], width: int, keys: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(list(parts)) if parts else torch.empty(0, width, device=keys.device)
