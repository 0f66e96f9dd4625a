# SPDX-License-Identifier: Apache-2.0
"""A model's graph as JSON, which `Model.graph_to_json` writes and `Model.construct_from_json` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import (
    CommunicationStrategy,
    CompressionStrategy,
    Embedding_t,
)
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_files import JsonObject, optimizer_to_json, read_optimizer
from terarec.hugectr.layers import layer_to_json, read_layer
from terarec.hugectr.objects import (
    DataReaderSparseParam,
    DenseLayer,
    EmbeddingTableConfig,
    EmbeddingTablePlaceHolder,
    Input,
    OptParamsPy,
    SparseEmbedding,
)
from terarec.hugectr.schema.table import forms
from terarec.hugectr.schema.types import (
    BOOL,
    STRING,
    dict_of,
    integer,
    list_of,
    member_name,
    number,
    one_of,
    scalar_or_list,
)

Part = Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer

DATA, COLLECTION = "Data", "EmbeddingCollection"
# Files of tests and of older releases hold these, too, for other readers than the graph's.
_OF_OTHERS = ("solver", "optimizer", "inference")
_OF_READERS = (
    "name", "format", "source", "eval_source", "check", "cache_eval_data", "num_workers", "num_samples",
    "eval_num_samples", "slot_size_array", "float_label_dense",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """The content of a graph's file.

    Attributes:
        model_name: Name from the solver.
        parts: The `Input`, the embeddings and the layers, in their order.
    """

    model_name: str
    parts: tuple[Part, ...]


def kind_name(part: Part) -> str:
    """Return the kind of a part, as files and the log name it."""
    if isinstance(part, SparseEmbedding):
        return part.embedding_type.name
    if isinstance(part, DenseLayer):
        return part.layer_type.name
    return COLLECTION if isinstance(part, EmbeddingCollectionConfig) else DATA


def graph_to_json(
    graph: Graph,
    optimizer: OptParamsPy,
    capacity_of: Callable[[SparseEmbedding], int],
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """Return `graph` for `json.dumps`.

    Args:
        graph: A model.
        optimizer: The model's, which embeddings without one of their own have.
        capacity_of: Function that returns the maximum number of keys of an embedding, over all devices.
        widths: Last dimension of each tensor.
    """
    layers: list[dict[str, Any]] = []
    dense: list[dict[str, Any]] = []
    for part in graph.parts:
        if isinstance(part, Input):
            layers.append(_input_to_json(part))
        elif isinstance(part, SparseEmbedding):
            layers.append(embedding_to_json(part, optimizer, capacity_of(part)))
        elif isinstance(part, EmbeddingCollectionConfig):
            layers.append({"type": COLLECTION, **collection_to_json(part)})
        else:
            dense.append(layer_to_json(part))
    return {"layers": [*layers, *with_copies(dense, widths)], "model_name": graph.model_name}


def read_graph(data: JsonObject) -> Graph:
    """Return the graph in a file."""
    model_name = data.take("model_name", STRING, "")
    parts = read_parts(data.children("layers"))
    data.finish(_OF_OTHERS)
    return Graph(model_name=model_name, parts=parts)


def read_parts(layers: Sequence[JsonObject]) -> tuple[Part, ...]:
    """Return the parts in the list ``layers`` of a graph's or a training file.

    Raises:
        WrongInputError: As `read_graph`.
    """
    if not layers or layers[0].take("type", STRING, "") != DATA:
        where = layers[0].where if layers else "layers"
        raise WrongInputError(where, f"expected the first layer to be of type {DATA}")
    parts: list[Part] = [read_input(layers[0])]
    copied: dict[str, str] = {}
    for layer in layers[1:]:
        is_copy = layer.take(IS_COPY, BOOL, False)
        # A Slice that `graph_to_json` put in is left out: its readers get the tensor itself.
        part = _read_part(layer)
        if is_copy and isinstance(part, DenseLayer):
            copied |= dict.fromkeys(part.top_names, part.bottom_names[0])
        elif isinstance(part, DenseLayer) and copied:
            parts.append(part.with_values(bottom_names=[copied.get(name, name) for name in part.bottom_names]))
        else:
            parts.append(part)
    return tuple(parts)


def _read_part(layer: JsonObject) -> Part:
    kind = layer.take("type", STRING)
    if kind in EMBEDDING_TYPES:
        return read_embedding(layer, EMBEDDING_TYPES[kind])
    if kind == COLLECTION:
        return read_collection(layer)
    return read_layer(layer, kind)


def _input_to_json(part: Input) -> dict[str, Any]:
    # An `Input` of one label has a name and a number, others have lists: files keep the form, which readers expect.
    has_one = "label_name" in part.values()
    names, dims = part.label_names, part.label_dims
    label: dict[str, Any] = {"top": names[0] if has_one else names, "label_dim": dims[0] if has_one else dims}
    # Releases before 3.5 know no weights, and files without them stay readable there.
    if set(part.label_weights) != {1.0}:
        label["label_weights"] = part.label_weights
    return {
        "type": DATA,
        "label": label,
        "dense": {"top": part.dense_name, "dense_dim": part.dense_dim},
        "sparse": [
            {
                "top": slots.top_name,
                "nnz_per_slot": slots.nnz_per_slot,
                "is_fixed_length": slots.is_fixed_length,
                "slot_num": slots.slot_num,
            }
            for slots in part.data_reader_sparse_param_array
        ],
    }


def read_input(data: JsonObject) -> Input:
    """Return the `Input` in a layer of type Data; keys of a reader are left to `training_json`.

    Raises:
        WrongInputError: As `read_graph`.
    """
    label, dense = data.child("label"), data.child("dense")
    tops, dims = label.take("top", scalar_or_list(STRING)), label.take("label_dim", scalar_or_list(integer(1)))
    weights = label.take("label_weights", list_of(number()), [])
    values: dict[str, Any] = {"label_dims": dims, "label_names": tops}
    if weights:
        values["label_weights"] = weights
    if len(tops) == 1 and not weights:
        values = {"label_dim": dims[0], "label_name": tops[0]}
    part = Input(
        **values,
        dense_name=dense.take("top", STRING),
        dense_dim=dense.take("dense_dim", integer(0)),
        data_reader_sparse_param_array=[_read_slots(slots) for slots in data.children("sparse")],
    )
    for clause in (label, dense):
        clause.finish()
    data.finish(_OF_READERS)
    return part


def _read_slots(data: JsonObject) -> DataReaderSparseParam:
    name, slots = data.take("top", STRING), data.take("slot_num", integer(1))
    # Files of release 2.3 and 3.0: most keys of a sample in all slots, and `max_nnz` of a slot.
    if data.has("max_feature_num_per_sample"):
        most = data.take("max_feature_num_per_sample", integer(1))
        hotness, is_fixed = [data.take("max_nnz", integer(1), most)], False
    else:
        hotness, is_fixed = (
            data.take("nnz_per_slot", scalar_or_list(integer(1))),
            data.take("is_fixed_length", BOOL, False),
        )
    data.finish(("type",))
    return DataReaderSparseParam(name, hotness, is_fixed, slots)


IS_COPY = "is_copy"
"""Marks such a Slice, so that terarec leaves it out again; HugeCTR's readers pass over keys that they do not know."""


def with_copies(layers: Sequence[dict[str, Any]], widths: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield `layers` with a Slice before the first reader of each tensor that several read.

    Each of its outputs is the complete tensor, named ``<tensor>_slice<n>``, one for every time it is read.

    Args:
        layers: Dense layers of a graph's JSON.
        widths: Last dimension of each tensor.
    """
    # In HugeCTR a tensor has one reader; its own `graph_to_json` puts in the same Slices.
    uses = Counter(name for layer in layers for name in _bottoms(layer))
    served: Counter[str] = Counter()
    for layer in layers:
        bottoms = []
        for name in _bottoms(layer):
            if uses[name] > 1 and not served[name]:
                yield _copies(name, uses[name], widths[name])
            bottoms.append(f"{name}_slice{served[name]}" if uses[name] > 1 else name)
            served[name] += 1
        yield {**layer, "bottom": bottoms[0] if len(bottoms) == 1 else bottoms}


def _copies(name: str, count: int, width: int) -> dict[str, Any]:
    tops = [f"{name}_slice{number}" for number in range(count)]
    return {"type": "Slice", "bottom": name, "top": tops, "ranges": [[0, width]] * count, IS_COPY: True}


def _bottoms(layer: Mapping[str, Any]) -> list[str]:
    bottom = layer["bottom"]
    return [bottom] if isinstance(bottom, str) else list(bottom)


EMBEDDING_TYPES = dict(Embedding_t.__members__)
"""Embeddings by their type in JSON."""

_COMBINERS = {0: "sum", 1: "mean", "sum": "sum", "mean": "mean"}
_ROOM = ("workspace_size_per_gpu_in_mb", "max_vocabulary_size_per_gpu")
# Communication between GPUs: without effect on results.
_IGNORED = ("name", "plan_file", "plan_file1")


def embedding_to_json(embedding: SparseEmbedding, optimizer: OptParamsPy, capacity: int) -> dict[str, Any]:
    """Return `embedding` for `json.dumps`.

    Args:
        embedding: Embedding to write.
        optimizer: The model's.
        capacity: Maximum number of keys over all devices.
    """
    room = {key: getattr(embedding, key) for key in _ROOM}
    if not room["max_vocabulary_size_per_gpu"]:
        del room["max_vocabulary_size_per_gpu"]
    hyperparameters: dict[str, Any] = {
        **room,
        "max_vocabulary_size_global": capacity,
        "embedding_vec_size": embedding.embedding_vec_size,
        "combiner": embedding.combiner,
    }
    if embedding.slot_size_array:
        hyperparameters["slot_size_array"] = embedding.slot_size_array
    return {
        "type": embedding.embedding_type.name,
        "bottom": embedding.bottom_name,
        "top": embedding.sparse_embedding_name,
        "sparse_embedding_hparam": hyperparameters,
        "optimizer": optimizer_to_json(embedding.optimizer or optimizer),
    }


def read_embedding(data: JsonObject, kind: Embedding_t) -> SparseEmbedding:
    """Return the embedding of `kind` in `data`."""
    values = data.child("sparse_embedding_hparam")
    room = {key: values.take(key, integer(0)) for key in _ROOM if values.has(key)}
    # Files may hold both, where a call has one form for MiB and one for rows: the rows are the exact number.
    if room.get("max_vocabulary_size_per_gpu"):
        room.pop("workspace_size_per_gpu_in_mb", None)
    arguments: dict[str, Any] = {
        **room,
        "embedding_type": kind,
        "embedding_vec_size": values.take("embedding_vec_size", integer(1)),
        "combiner": _COMBINERS[values.take("combiner", one_of(*_COMBINERS))],
        "slot_size_array": values.take("slot_size_array", list_of(integer(0)), []),
        "bottom_name": data.take("bottom", scalar_or_list(STRING))[0],
        "sparse_embedding_name": data.take("top", scalar_or_list(STRING))[0],
    }
    if data.has("optimizer"):
        arguments["optimizer"] = read_optimizer(data.child("optimizer"))
    values.finish(("max_vocabulary_size_global", "plan_file"))
    data.finish(_IGNORED)
    return data.make(SparseEmbedding, arguments)


def collection_to_json(config: EmbeddingCollectionConfig) -> dict[str, Any]:
    """Return `config` for `json.dumps`, in terarec's own layout, as HugeCTR's files have none."""
    tables = {lookup.table.name: lookup.table for lookup in config.lookups}
    plan = config.plan
    written: dict[str, Any] = {
        "use_exclusive_keys": config.use_exclusive_keys,
        "comm_strategy": config.comm_strategy.name,
        "top": config.concatenated_name,
        "tables": [_table_to_json(table) for table in tables.values()],
        "lookups": [
            {"table": one.table.name, "bottom": one.bottom_name, "top": one.top_name, "combiner": one.combiner}
            for one in config.lookups
        ],
    }
    if plan is not None:
        written["plan"] = {
            "shard_matrix": plan.matrix,
            "shard_strategy": plan.strategy,
            "compression_strategy": {kind.name: names for kind, names in plan.compression.items()},
        }
    return written


def _table_to_json(table: EmbeddingTableConfig) -> dict[str, Any]:
    written = {"name": table.name, "max_vocabulary_size": table.max_vocabulary_size, "ev_size": table.ev_size}
    if isinstance(table, EmbeddingTablePlaceHolder):  # which makes outputs of two dimensions
        written["id_space"] = table.id_space
    return {**written, "optimizer": optimizer_to_json(table.opt_params)} if table.opt_params else written


def read_collection(data: JsonObject) -> EmbeddingCollectionConfig:
    """Return the embedding collection in `data`."""
    config = EmbeddingCollectionConfig(
        data.take("use_exclusive_keys", BOOL, False),
        data.take("comm_strategy", member_name(CommunicationStrategy), CommunicationStrategy.Uniform),
    )
    top = data.take("top", STRING, "")
    tables = {table.name: table for table in map(_read_table, data.children("tables"))}
    lookups = [_read_lookup(lookup, tables) for lookup in data.children("lookups")]
    if top:
        columns = {name: [lookup[name] for lookup in lookups] for name in ("table_config", "bottom_name", "combiner")}
        config.embedding_lookup(**columns, top_name=top)
    else:
        for lookup in lookups:
            config.embedding_lookup(**lookup)
    if data.has("plan"):
        plan = data.child("plan")
        (shard,) = forms()["EmbeddingCollectionConfig.shard"]
        kinds = {one.name: one.type for one in shard.parameters}
        # In a file members of enumerations are names; the call takes the members themselves.
        kinds["compression_strategy"] = dict_of(member_name(CompressionStrategy), list_of(STRING))
        config.shard(**{name: plan.take(name, kind) for name, kind in kinds.items()})
        plan.finish()
    data.finish()
    return config


def _read_table(data: JsonObject) -> EmbeddingTableConfig:
    name = data.take("name", STRING)
    rows, width = data.take("max_vocabulary_size", integer(-1)), data.take("ev_size", integer(1))
    optimizer = read_optimizer(data.child("optimizer")) if data.has("optimizer") else None
    config = EmbeddingTableConfig(name, rows, width, optimizer)
    if data.has("id_space"):
        config = EmbeddingTablePlaceHolder(data.take("id_space", integer(0)), rows, width, opt_params=optimizer)
    data.finish()
    return config


def _read_lookup(data: JsonObject, tables: dict[str, EmbeddingTableConfig]) -> dict[str, Any]:
    table = data.take("table", one_of(*tables))
    values = {
        "table_config": tables[table],
        "bottom_name": data.take("bottom", STRING),
        "top_name": data.take("top", STRING),
        "combiner": data.take("combiner", STRING),
    }
    data.finish()
    return values
