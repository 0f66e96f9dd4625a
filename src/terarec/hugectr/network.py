"""What a script adds to a model, as a `GraphSpec` with the optimizers of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.embeddings import HAS_STATIC_TABLES, capacity, collection_graph, sparse_embedding
from terarec.hugectr.errors import IllegalCallError, WrongInputError, as_hugectr_errors
from terarec.hugectr.graph_json import Part
from terarec.hugectr.layer_kinds import LOSSES, fused_layers, graph_layer
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
from terarec.hugectr.optimizer import embedding_optimizer, optimizer_rule
from terarec.spec import GraphEmbedding, GraphLabel, GraphLayer, GraphSpec, SparseOptimizerSpec

PartType = TypeVar("PartType", bound=Part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a model is compiled from.

    Attributes:
        spec: the graph.
        rules: update rules of tables, by the names that the graph's embeddings give them.
        capacities: `SparseEmbedding` -> most keys.
        collections: for each embedding collection, the names of its embeddings in the graph.
        adds_offsets: whether readers add the sizes of slots to keys.
        is_one_hot: whether embeddings take one key a slot alone.
    """

    spec: GraphSpec
    rules: Mapping[str, SparseOptimizerSpec]
    capacities: Mapping[str, int]
    collections: Sequence[Sequence[str]]
    adds_offsets: bool
    is_one_hot: bool


class Network:
    """The parts of a model in the order in which they were added.

    Attributes:
        parts: what was added.

    Args:
        solver: what `CreateSolver` made.
        optimizer: the model's optimizer, which embeddings without one of their own take.
    """

    def __init__(self, solver: Solver, optimizer: OptParamsPy) -> None:
        self.parts: list[Part] = []
        self._solver, self._optimizer = solver, optimizer
        self._known: list[str] = []

    @property
    def inputs(self) -> Input:
        """The `Input`.

        Raises:
            IllegalCallError: none was added yet.
        """
        if not self.parts:
            raise IllegalCallError("Model: got no Input, expected one before everything else")
        first = self.parts[0]
        assert isinstance(first, Input)
        return first

    def of_type(self, cls: type[PartType]) -> list[PartType]:
        """Return the parts of a class, in their order."""
        return [part for part in self.parts if isinstance(part, cls)]

    def add(self, part: Part | GroupDenseLayer) -> None:
        """Add a part on top of those that are there; a group of layers as the layers that it stands for.

        Raises:
            WrongInputError: another kind of object, a bottom that is not there, or a top that is.
            IllegalCallError: a part before the `Input`, or a second one.
        """
        if isinstance(part, Input) == bool(self.parts):
            name = type(part).__name__
            raise IllegalCallError(f"add: got {name} as part {len(self.parts) + 1}, expected one Input, the first part")
        known, parts = list(self._known), list(self.parts)
        try:
            for one in fused_layers(part) if isinstance(part, GroupDenseLayer) else [part]:
                self._add(one)
        except WrongInputError:
            self._known, self.parts = known, parts
            raise

    def _add(self, part: Part) -> None:
        reads, makes = _names(part)
        sparse = [slots.top_name for slots in self.inputs.data_reader_sparse_param_array] if self.parts else []
        known = sparse if isinstance(part, SparseEmbedding | EmbeddingCollectionConfig) else self._known
        for name in reads:
            if name not in known:
                raise WrongInputError(
                    f"add: {_title(part)} reads {name!r}, expected one of {', '.join(known) or 'none'}"
                )
        for name in makes:
            if name in self._known or makes.count(name) > 1:
                raise WrongInputError(
                    f"add: {_title(part)} makes {name!r}, which is there already, expected a new name"
                )
        self._known += makes
        self.parts.append(part)

    @as_hugectr_errors("compile")
    def plan(self, loss_weights: Mapping[str, float]) -> Plan:
        """The graph of all parts.

        Args:
            loss_weights: label -> weight of its loss, in place of what the `Input` says.

        Raises:
            WrongInputError: names, labels, slots or regularizers that do not fit.
        """
        rules: dict[str, SparseOptimizerSpec] = {}
        embeddings = self._sparse_embeddings(rules)
        joins: list[GraphLayer] = []
        collections: list[list[str]] = []
        for number, part in enumerate(self.of_type(EmbeddingCollectionConfig)):
            keys = {lookup.table.name: self._key_of_table(lookup.table, rules) for lookup in part.lookups}
            found, joined = collection_graph(part, number=number, optimizers=keys, hotness=self._hotness())
            embeddings += found
            joins += joined
            collections.append([embedding.name for embedding in found])
        layers = [self._layer(part) for part in self.of_type(DenseLayer)]
        sorts = self._sorts_of_keys()
        spec = GraphSpec(
            labels=self._labels(loss_weights),
            dense_name=self.inputs.dense_name,
            dense_dim=self.inputs.dense_dim,
            embeddings=tuple(embeddings),
            layers=(*joins, *layers),
        )
        return Plan(
            spec=spec,
            rules=rules,
            capacities=self._capacities(),
            collections=collections,
            adds_offsets=sorts == {False},
            is_one_hot=True in sorts,
        )

    def _sparse_embeddings(self, rules: dict[str, SparseOptimizerSpec]) -> list[GraphEmbedding]:
        """Every `SparseEmbedding`; the rules of their tables are put into `rules`."""
        return [
            sparse_embedding(
                part,
                slots=self._slots(part.bottom_name),
                optimizer=_key_of(embedding_optimizer(part.optimizer or self._optimizer, self._solver.lr), rules),
            )
            for part in self.of_type(SparseEmbedding)
        ]

    def _key_of_table(self, table: EmbeddingTableConfig, rules: dict[str, SparseOptimizerSpec]) -> str:
        return _key_of(optimizer_rule(table.opt_params or self._optimizer, self._solver.lr), rules)

    def _capacities(self) -> dict[str, int]:
        devices = sum(map(len, self._solver.vvgpu))
        return {
            part.sparse_embedding_name: capacity(part, part.optimizer or self._optimizer, devices)
            for part in self.of_type(SparseEmbedding)
            if part.embedding_type not in HAS_STATIC_TABLES
        }

    def _labels(self, loss_weights: Mapping[str, float]) -> tuple[GraphLabel, ...]:
        """The labels by name, as HugeCTR cuts the columns."""
        inputs = self.inputs
        weights = dict(zip(inputs.label_names, inputs.label_weights, strict=True))
        for name in loss_weights:
            if name not in weights:
                raise WrongInputError(f"compile: loss_names: got {name!r}, expected labels: {', '.join(weights)}")
        weights |= loss_weights
        dims = dict(zip(inputs.label_names, inputs.label_dims, strict=True))
        return tuple(GraphLabel(name=name, dim=dims[name], weight=weights[name]) for name in sorted(dims))

    def _layer(self, part: DenseLayer) -> GraphLayer:
        losses = [other for other in self.of_type(DenseLayer) if other.layer_type in LOSSES]
        if part.layer_type in LOSSES and part.use_regularizer and len(losses) > 1:
            raise WrongInputError(f"{_title(part)}: got a regularizer beside other losses, expected none with several")
        return graph_layer(part)

    def _sorts_of_keys(self) -> set[bool]:
        """Whether keys of `SparseEmbedding` objects count from 0 in each slot: of one sort, or none without any."""
        sorts = {part.embedding_type in HAS_STATIC_TABLES for part in self.of_type(SparseEmbedding)}
        if len(sorts) == 2:
            raise WrongInputError(
                "compile: got OneHot or Hybrid embeddings, whose keys count from 0 in each slot, beside hash "
                "embeddings, expected one sort"
            )
        return sorts

    def _slots(self, bottom: str) -> int:
        return next(slots.slot_num for slots in self._sparse() if slots.top_name == bottom)

    def _hotness(self) -> dict[str, int]:
        return {slots.top_name: slots.nnz_per_slot[0] for slots in self._sparse()}

    def _sparse(self) -> Sequence[DataReaderSparseParam]:
        return self.inputs.data_reader_sparse_param_array


def _names(part: Part) -> tuple[list[str], list[str]]:
    """What `part` reads and what it makes.

    Raises:
        WrongInputError: an object that is no part of a model.
    """
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
        f"add: got {type(part).__name__}, expected Input, SparseEmbedding, EmbeddingCollectionConfig, DenseLayer or "
        "GroupDenseLayer"
    )


def _title(part: Part) -> str:
    kind = part.layer_type.name if isinstance(part, DenseLayer) else type(part).__name__
    return f"{kind} {', '.join(map(repr, _names(part)[1]))}"


def _key_of(rule: SparseOptimizerSpec, rules: dict[str, SparseOptimizerSpec]) -> str:
    """The name of `rule` in `rules`, where it is put if it is new."""
    for name, held in rules.items():
        if held == rule:
            return name
    name = f"rows{len(rules)}"
    rules[name] = rule
    return name
