"""A model's graph as JSON, as `Model.graph_to_json` writes and `Model.construct_from_json` reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.embedding_json import (
    EMBEDDING_TYPES,
    collection_to_json,
    embedding_to_json,
    read_collection,
    read_embedding,
)
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_object import JsonObject
from terarec.hugectr.layer_copies import IS_COPY, with_copies
from terarec.hugectr.layer_json import layer_to_json, read_layer
from terarec.hugectr.tables.data_input import DataReaderSparseParam, Input
from terarec.hugectr.tables.dense_layer import DenseLayer
from terarec.hugectr.tables.kinds import TEXT, TRUTH, listed, number, one_or_list, whole
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.sparse_embedding import SparseEmbedding

Part = Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer

DATA, COLLECTION = "Data", "EmbeddingCollection"
# Files of tests and of older releases hold these besides, for other readers than the graph's.
_BESIDE = ("solver", "optimizer", "inference")
_OF_READERS = (
    "name", "format", "source", "eval_source", "check", "cache_eval_data", "num_workers", "num_samples",
    "eval_num_samples", "slot_size_array", "float_label_dense",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What a graph's file holds.

    Attributes:
        model_name: as the solver named it.
        parts: the `Input`, the embeddings and the layers, in their order.
    """

    model_name: str
    parts: tuple[Part, ...]


def graph_to_json(
    graph: Graph,
    optimizer: OptParamsPy,
    capacity_of: Callable[[SparseEmbedding], int],
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """`graph` as what `json.dumps` takes.

    Args:
        graph: a model.
        optimizer: the model's, which embeddings without one of their own have.
        capacity_of: most keys of an embedding over all devices.
        widths: last dimension of each tensor.
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
    """The graph in a file.

    Raises:
        WrongInputError: an unknown kind or key, or a value that is not accepted; the message has its path.
    """
    model_name = data.take("model_name", TEXT, "")
    parts = read_parts(data.children("layers"))
    data.finish(_BESIDE)
    return Graph(model_name=model_name, parts=parts)


def read_parts(layers: Sequence[JsonObject]) -> tuple[Part, ...]:
    """The parts in the list ``layers`` of a graph's or a training file.

    Raises:
        WrongInputError: as `read_graph`.
    """
    if not layers or layers[0].take("type", TEXT, "") != DATA:
        where = layers[0].where if layers else "layers"
        raise WrongInputError(f"{where}: expected the first layer to be of type {DATA}")
    parts: list[Part] = [read_input(layers[0])]
    copied: dict[str, str] = {}
    for layer in layers[1:]:
        is_copy = layer.take(IS_COPY, TRUTH, False)
        part = _read_part(layer)
        if is_copy and isinstance(part, DenseLayer):
            copied |= dict.fromkeys(part.top_names, part.bottom_names[0])
        elif isinstance(part, DenseLayer) and copied:
            parts.append(part.with_values(bottom_names=[copied.get(name, name) for name in part.bottom_names]))
        else:
            parts.append(part)
    return tuple(parts)


def _read_part(layer: JsonObject) -> Part:
    kind = layer.take("type", TEXT)
    if kind in EMBEDDING_TYPES:
        return read_embedding(layer, EMBEDDING_TYPES[kind])
    if kind == COLLECTION:
        return read_collection(layer)
    return read_layer(layer, kind)


def _input_to_json(part: Input) -> dict[str, Any]:
    has_one = "label_name" in part.values()
    names, dims = part.label_names, part.label_dims
    label: dict[str, Any] = {"top": names[0] if has_one else names, "label_dim": dims[0] if has_one else dims}
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
    """The `Input` in a layer of type Data; keys of a reader are left to `training_json`.

    Raises:
        WrongInputError: as `read_graph`.
    """
    label, dense = data.child("label"), data.child("dense")
    tops, dims = label.take("top", one_or_list(TEXT)), label.take("label_dim", one_or_list(whole(1)))
    weights = label.take("label_weights", listed(number()), [])
    given: dict[str, Any] = {"label_dims": dims, "label_names": tops}
    if weights:
        given["label_weights"] = weights
    if len(tops) == 1 and not weights:
        given = {"label_dim": dims[0], "label_name": tops[0]}
    made = Input(
        **given,
        dense_name=dense.take("top", TEXT),
        dense_dim=dense.take("dense_dim", whole(0)),
        data_reader_sparse_param_array=[_read_slots(slots) for slots in data.children("sparse")],
    )
    for clause in (label, dense):
        clause.finish()
    data.finish(_OF_READERS)
    return made


def _read_slots(data: JsonObject) -> DataReaderSparseParam:
    name, slots = data.take("top", TEXT), data.take("slot_num", whole(1))
    if data.has("max_feature_num_per_sample"):
        most = data.take("max_feature_num_per_sample", whole(1))
        hotness, is_fixed = [data.take("max_nnz", whole(1), most)], False
    else:
        hotness, is_fixed = data.take("nnz_per_slot", one_or_list(whole(1))), data.take("is_fixed_length", TRUTH, False)
    data.finish(("type",))
    return DataReaderSparseParam(name, hotness, is_fixed, slots)
