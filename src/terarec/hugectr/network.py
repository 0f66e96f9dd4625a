# SPDX-License-Identifier: Apache-2.0
"""The parts of a model in the order of their calls, and their `GraphSpec` with optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig, EmbeddingLookup
from terarec.hugectr.enums import Embedding_t, Optimizer_t, Update_t
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import Part
from terarec.hugectr.layers import LOSSES, fused_layers, graph_layer
from terarec.hugectr.objects import (
    DataReaderSparseParam,
    DenseLayer,
    EmbeddingTableConfig,
    GroupDenseLayer,
    Input,
    OptParamsPy,
    Solver,
    SparseEmbedding,
)
from terarec.hugectr.optimizer import STATES, embedding_optimizer, optimizer_rule
from terarec.hugectr.release import release_number
from terarec.hugectr.schedule import base_rate
from terarec.spec import (
    DynamicTableSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    SparseOptimizerSpec,
    TableSpec,
)

PartType = TypeVar("PartType", bound=Part)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPlan:
    """Parts from which a model is compiled.

    Attributes:
        spec: The graph.
        rules: Update rules of tables, by the names that the graph's embeddings give them.
        capacities: `SparseEmbedding` -> most keys.
        collections: For each embedding collection, the names of its embeddings in the graph.
        adds_offsets: Whether readers add the sizes of slots to keys.
        is_one_hot: Whether embeddings take one key a slot alone.
    """

    spec: GraphSpec
    rules: Mapping[str, SparseOptimizerSpec]
    capacities: Mapping[str, int]
    collections: Sequence[Sequence[str]]
    adds_offsets: bool
    is_one_hot: bool


class Network:
    """The parts of a model in the order in which they were added.

    Args:
        solver: The `CreateSolver` object.
        optimizer: The model's optimizer, which embeddings without one of their own take.
    """

    def __init__(self, solver: Solver, optimizer: OptParamsPy) -> None:
        self.parts: list[Part] = []
        self._solver, self._optimizer = solver, optimizer
        self._known: list[str] = []

    @property
    def inputs(self) -> Input:
        """The `Input`."""
        if not self.parts:
            raise IllegalCallError("Model", "got no Input, expected one before everything else")
        first = self.parts[0]
        assert isinstance(first, Input)
        return first

    def of_type(self, cls: type[PartType]) -> list[PartType]:
        """Return the parts of a class, in their order."""
        return [part for part in self.parts if isinstance(part, cls)]

    def add(self, part: Part | GroupDenseLayer) -> None:
        """Add a part on top of the others; a group of layers is added as its layers.

        Raises:
            WrongInputError: Another kind of object, an unknown bottom, or a top that exists already.
            IllegalCallError: A part before the `Input`, or a second one.
        """
        if isinstance(part, Input) == bool(self.parts):
            name = type(part).__name__
            raise IllegalCallError(
                "add", f"got {name} as part {len(self.parts) + 1}, expected one Input, the first part"
            )
        known, parts = list(self._known), list(self.parts)
        try:
            for one in fused_layers(part) if isinstance(part, GroupDenseLayer) else [part]:
                self._add(one)
        except WrongInputError:
            # A group of layers is added as a whole or not at all.
            self._known, self.parts = known, parts
            raise

    def _add(self, part: Part) -> None:
        reads, makes = tensors_of(part)
        sparse = [slots.top_name for slots in self.inputs.data_reader_sparse_param_array] if self.parts else []
        # Embeddings read sparse inputs, all other parts dense tensors.
        known = sparse if isinstance(part, SparseEmbedding | EmbeddingCollectionConfig) else self._known
        for name in reads:
            if name not in known:
                raise WrongInputError(
                    "add", f"{_title(part)} reads {name!r}, expected one of {', '.join(known) or 'none'}"
                )
        for name in makes:
            if name in self._known or makes.count(name) > 1:
                raise WrongInputError(
                    "add", f"{_title(part)} makes {name!r}, which is there already, expected a new name"
                )
        self._known += makes
        self.parts.append(part)

    @as_hugectr_errors("compile")
    def plan(self, loss_weights: Mapping[str, float]) -> NetworkPlan:
        """Return the graph of all parts.

        Args:
            loss_weights: Label -> weight of its loss, in place of what the `Input` says.
        """
        rules: dict[str, SparseOptimizerSpec] = {}
        embeddings = self._sparse_embeddings(rules)
        joins: list[GraphLayer] = []
        collections: list[list[str]] = []
        for number, part in enumerate(self.of_type(EmbeddingCollectionConfig)):
            keys = {lookup.table.name: self._key_of_table(lookup.table, rules) for lookup in part.lookups}
            hotness = {bottom: self._hotness(bottom) for bottom in tensors_of(part)[0]}
            embeddings_of_part, joined = collection_graph(part, number=number, optimizers=keys, hotness=hotness)
            embeddings += embeddings_of_part
            joins += joined
            collections.append([embedding.name for embedding in embeddings_of_part])
        layers = [self._layer(part) for part in self.of_type(DenseLayer)]
        sorts = self._key_sorts()
        spec = GraphSpec(
            labels=self._labels(loss_weights),
            dense_name=self.inputs.dense_name,
            dense_dim=self.inputs.dense_dim,
            embeddings=tuple(embeddings),
            layers=(*joins, *layers),
        )
        return NetworkPlan(
            spec=spec,
            rules=rules,
            capacities=self._capacities(),
            collections=collections,
            # Without any `SparseEmbedding` none: tables of a collection have keys of their own, which files hold as
            # they are.
            adds_offsets=sorts == {False},
            is_one_hot=True in sorts,
        )

    def _sparse_embeddings(self, rules: dict[str, SparseOptimizerSpec]) -> list[GraphEmbedding]:
        """Return every `SparseEmbedding`; the rules of their tables are added to `rules`."""
        lr = base_rate(self._solver, self._optimizer)
        return [
            sparse_embedding(
                part,
                slots=self._sparse(part.bottom_name).slot_num,
                optimizer=_key_of(embedding_optimizer(part.optimizer or self._optimizer, lr), rules),
            )
            for part in self.of_type(SparseEmbedding)
        ]

    def _key_of_table(self, table: EmbeddingTableConfig, rules: dict[str, SparseOptimizerSpec]) -> str:
        lr = base_rate(self._solver, self._optimizer)
        return _key_of(optimizer_rule(table.opt_params or self._optimizer, lr), rules)

    def _capacities(self) -> dict[str, int]:
        devices = num_devices(self._solver)
        return {
            part.sparse_embedding_name: capacity(part, part.optimizer or self._optimizer, devices)
            for part in self.of_type(SparseEmbedding)
            if part.embedding_type not in HAS_STATIC_TABLES
        }

    def _labels(self, loss_weights: Mapping[str, float]) -> tuple[GraphLabel, ...]:
        """Return the labels in the order of their names, as HugeCTR splits the columns."""
        inputs = self.inputs
        weights = dict(zip(inputs.label_names, inputs.label_weights, strict=True))
        for name in loss_weights:
            if name not in weights:
                raise WrongInputError("compile: loss_names", f"got {name!r}, expected labels: {', '.join(weights)}")
        weights |= loss_weights
        dims = dict(zip(inputs.label_names, inputs.label_dims, strict=True))
        return tuple(GraphLabel(name=name, dim=dims[name], weight=weights[name]) for name in sorted(dims))

    def _layer(self, part: DenseLayer) -> GraphLayer:
        losses = [other for other in self.of_type(DenseLayer) if other.layer_type in LOSSES]
        if part.layer_type in LOSSES and part.use_regularizer and len(losses) > 1:
            raise WrongInputError(_title(part), "got a regularizer besides other losses, expected none with several")
        return graph_layer(part, release_number(self._solver.compat_release))

    def _key_sorts(self) -> set[bool]:
        """Return whether keys of `SparseEmbedding` objects start at 0 in each slot; empty without such objects."""
        sorts = {part.embedding_type in HAS_STATIC_TABLES for part in self.of_type(SparseEmbedding)}
        if len(sorts) == 2:
            raise WrongInputError(
                "compile",
                "got OneHot or Hybrid embeddings, whose keys count from 0 in each slot, besides hash "
                "embeddings, expected one sort",
            )
        return sorts

    def _hotness(self, bottom: str) -> int:
        """Return the most keys of a sample in the one slot of an input that a collection reads."""
        slots = self._sparse(bottom)
        if slots.slot_num != 1:
            raise WrongInputError(
                f"EmbeddingCollectionConfig: bottom_name {bottom!r}",
                f"got a sparse input of {slots.slot_num} slots, expected one of one slot: separate them into several",
            )
        return int(slots.nnz_per_slot[0])

    def _sparse(self, bottom: str) -> DataReaderSparseParam:
        return next(slots for slots in self.inputs.data_reader_sparse_param_array if slots.top_name == bottom)


def tensors_of(part: Part) -> tuple[list[str], list[str]]:
    """Return the tensors that `part` reads, and those that it makes."""
    if isinstance(part, Input):
        return [], [*part.label_names, *([part.dense_name] if part.dense_dim else [])]
    if isinstance(part, SparseEmbedding):
        return [part.bottom_name], [part.sparse_embedding_name]
    if isinstance(part, EmbeddingCollectionConfig):
        tops = [part.concatenated_name] if part.concatenated_name else [lookup.top_name for lookup in part.lookups]
        return [lookup.bottom_name for lookup in part.lookups], tops
    if isinstance(part, DenseLayer):
        return list(part.bottom_names), list(part.top_names)
    raise WrongInputError(
        "add",
        f"got {type(part).__name__}, expected Input, SparseEmbedding, EmbeddingCollectionConfig, DenseLayer or "
        "GroupDenseLayer",
    )


def _title(part: Part) -> str:
    kind = part.layer_type.name if isinstance(part, DenseLayer) else type(part).__name__
    return f"{kind} {', '.join(map(repr, tensors_of(part)[1]))}"


def _key_of(rule: SparseOptimizerSpec, rules: dict[str, SparseOptimizerSpec]) -> str:
    """Return the name of `rule` in `rules`, to which it is added if it is new."""
    # By value, so that embeddings with equal optimizers share one, and its step count.
    for name, own in rules.items():
        if own == rule:
            return name
    name = f"rows{len(rules)}"
    rules[name] = rule
    return name


HAS_STATIC_TABLES = (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, Embedding_t.HybridSparseEmbedding)
"""Embeddings whose keys count from 0 in each slot."""

LOCALIZED = (Embedding_t.LocalizedSlotSparseEmbeddingHash, Embedding_t.LocalizedSlotSparseEmbeddingOneHot)
"""Embeddings that place complete slots on a device, so that their files name the slot of each key."""

_POOLING: Mapping[str, Literal["sum", "mean", "concat"]] = {"sum": "sum", "average": "mean", "concat": "concat"}


def num_devices(solver: Solver) -> int:
    """Return the number of devices in ``vvgpu``."""
    return sum(map(len, solver.vvgpu))


def is_sized_by_slots(params: SparseEmbedding) -> bool:
    """Return whether an embedding has room for ``slot_size_array``; HugeCTR ignores its workspace then."""
    has_room = params.max_vocabulary_size_per_gpu or params.workspace_size_per_gpu_in_mb
    has_slots = params.embedding_type is not Embedding_t.DistributedSlotSparseEmbeddingHash
    return bool(params.slot_size_array) and (has_slots or not has_room)


def capacity(params: SparseEmbedding, optimizer: OptParamsPy, devices: int) -> int:
    """Return the maximum number of keys of a `SparseEmbedding`.

    Of slots with tables of their own this is the sum of ``slot_size_array``, if it is there. Otherwise it is
    `workspace_rows`.
    """
    return sum(params.slot_size_array) if is_sized_by_slots(params) else workspace_rows(params, optimizer, devices)


def workspace_rows(params: SparseEmbedding, optimizer: OptParamsPy, devices: int) -> int:
    """Return the number of keys that the workspaces of all devices have room for; 0 without one.

    For each device it is the given number, or the workspace's bytes divided by HugeCTR's bytes of a row with its
    optimizer states.
    """
    if params.max_vocabulary_size_per_gpu:
        return int(params.max_vocabulary_size_per_gpu) * devices
    # Float32 weights and states, for any precision here: a script expects the same overflow as in HugeCTR.
    rows = params.workspace_size_per_gpu_in_mb * 2**20 // (4 * params.embedding_vec_size * row_copies(optimizer))
    return int(rows) * devices


def row_copies(optimizer: OptParamsPy) -> int:
    """Return the size of a row with its optimizer states, as a multiple of that of its weights."""
    copies = 1 + STATES[optimizer.optimizer_type]
    if optimizer.optimizer_type is Optimizer_t.Adam and optimizer.update_type is Update_t.LazyGlobal:
        # The time of the last update of each number, which the lazy rule of HugeCTR keeps.
        copies += 1
    return copies


def sparse_embedding(params: SparseEmbedding, *, slots: int, optimizer: str) -> GraphEmbedding:
    """Return a `SparseEmbedding` over the `slots` slots of its input.

    Hash embeddings are dynamic tables: one for all slots of a distributed embedding, one a slot for a localized one,
    whose slots have initial weights of their own. One-hot and hybrid embeddings are a static table a slot.

    Raises:
        WrongInputError: A ``slot_size_array`` of another length, where each slot has its own table.
    """
    name = params.sparse_embedding_name
    tables: list[TableSpec | DynamicTableSpec]
    if params.embedding_type in HAS_STATIC_TABLES:
        sizes = slot_sizes(params, slots)
        tables = [_static(f"{name}.{slot}", size, params) for slot, size in enumerate(sizes)]
    elif params.embedding_type is Embedding_t.LocalizedSlotSparseEmbeddingHash:
        sizes = slot_sizes(params, slots) if params.slot_size_array else [0] * slots
        tables = [_dynamic(f"{name}.{slot}", size, params) for slot, size in enumerate(sizes)]
    else:
        tables = [_dynamic(name, 0, params)]
    features = tuple(
        GraphFeature(
            name=f"{params.bottom_name}.{slot}", table=tables[slot % len(tables)].name, pooling=params.combiner
        )
        for slot in range(slots)
    )
    return GraphEmbedding(name=name, tables=tuple(tables), features=features, optimizer=optimizer)


def slot_sizes(params: SparseEmbedding, slots: int) -> Sequence[int]:
    """Return ``slot_size_array`` of an embedding over an input of `slots` slots."""
    sizes: Sequence[int] = params.slot_size_array
    if len(sizes) != slots:
        raise WrongInputError(
            f"SparseEmbedding {params.sparse_embedding_name!r}: slot_size_array",
            f"got {len(sizes)} sizes, expected {slots}, one for each slot of {params.bottom_name!r}",
        )
    return sizes


def _dynamic(name: str, size: int, params: SparseEmbedding) -> DynamicTableSpec:
    """Return a table whose rows are initialized within 1 / sqrt(size) around 0, or 0.05 for an unknown size."""
    scale = 1 / math.sqrt(size) if size else 0.05
    # Nothing here takes evicted keys, which would pile up.
    return DynamicTableSpec(name=name, width=params.embedding_vec_size, init_scale=scale, report_evicted=False)


def _static(name: str, size: int, params: SparseEmbedding) -> TableSpec:
    # A slot of size 0 has no keys, but a table has a row.
    return TableSpec(name=name, rows=max(1, size), width=params.embedding_vec_size)


def collection_graph(
    config: EmbeddingCollectionConfig, *, number: int, optimizers: Mapping[str, str], hotness: Mapping[str, int]
) -> tuple[list[GraphEmbedding], list[GraphLayer]]:
    """Return the embeddings of a collection, one for each optimizer of its tables, and the layers that join their tops.

    Args:
        config: The collection.
        number: Number of the collection in the model.
        optimizers: Table -> name of its optimizer.
        hotness: Sparse input -> most keys of a sample.
    """
    # A `GraphEmbedding` has one optimizer, so tables of several become several, whose outputs are joined behind them.
    keys = list(dict.fromkeys(optimizers[lookup.table.name] for lookup in config.lookups))
    output: Literal["flat", "apart"] = "flat" if config.concatenated_name and len(keys) == 1 else "apart"
    embeddings = []
    for key in keys:
        lookups = [lookup for lookup in config.lookups if optimizers[lookup.table.name] == key]
        tables = {lookup.table.name: _collection_table(lookup.table) for lookup in lookups}
        name = config.concatenated_name if output == "flat" else f"embedding_collection_{number}_{key}"
        features = tuple(_feature_of(lookup, hotness[lookup.bottom_name]) for lookup in lookups)
        embeddings.append(
            GraphEmbedding(name=name, tables=tuple(tables.values()), features=features, output=output, optimizer=key)
        )
    if config.concatenated_name:
        return embeddings, _joined(config, embeddings) if output == "apart" else []
    return embeddings, _flattened(config, embeddings)


def _joined(config: EmbeddingCollectionConfig, embeddings: Sequence[GraphEmbedding]) -> list[GraphLayer]:
    """Return the layers that concatenate the tops of several embeddings, in the order of the lookups."""
    tops = tuple(map(_vector_name, config.lookups))
    width = sum(embedding.width_of(feature) for embedding in embeddings for feature in embedding.features)
    # [B, 1, width] of each lookup -> [B, 1, sum of widths] -> [B, sum of widths]
    joined = f"{config.concatenated_name}_concat"
    return [
        GraphLayer(kind="concat", bottoms=tops, tops=(joined,), options={"axis": 2}),
        GraphLayer(kind="reshape", bottoms=(joined,), tops=(config.concatenated_name,), options={"leading_dim": width}),
    ]


def _flattened(config: EmbeddingCollectionConfig, embeddings: Sequence[GraphEmbedding]) -> list[GraphLayer]:
    """Return the layers that reshape the vectors of flat lookups to [B, width]."""
    widths = {feature.name: embedding.width_of(feature) for embedding in embeddings for feature in embedding.features}
    return [
        GraphLayer(
            kind="reshape",
            bottoms=(_vector_name(lookup),),
            tops=(lookup.top_name,),
            options={"leading_dim": widths[_vector_name(lookup)]},
        )
        for lookup in config.lookups
        if lookup.is_flat
    ]


def _vector_name(lookup: EmbeddingLookup) -> str:
    """Return the name of the tensor [B, 1, width] that a lookup gives."""
    return f"{lookup.top_name}_3d" if lookup.is_flat else lookup.top_name


def _collection_table(table: EmbeddingTableConfig) -> TableSpec | DynamicTableSpec:
    if table.max_vocabulary_size < 0:
        return DynamicTableSpec(name=table.name, width=table.ev_size, report_evicted=False)
    return TableSpec(name=table.name, rows=table.max_vocabulary_size, width=table.ev_size)


def _feature_of(lookup: EmbeddingLookup, hotness: int) -> GraphFeature:
    return GraphFeature(
        name=_vector_name(lookup),
        table=lookup.table.name,
        pooling=_POOLING[lookup.combiner],
        column=f"{lookup.bottom_name}.0",
        max_keys=hotness if lookup.combiner == "concat" else None,
    )
