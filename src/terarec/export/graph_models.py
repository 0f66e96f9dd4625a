"""Graph models as ONNX files, layer by layer: their inputs, tables and lookups, and the file.

A table is the sorted keys and their rows as constants, and a search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.batch import Batch
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.export.inputs import NO_KEY, KeyInput, ModelInput, dense_input, key_input
from terarec.export.layers import emit
from terarec.export.onnx_graph import MOST_BYTES, OnnxGraph, onnx_library
from terarec.io import atomic_entries
from terarec.models.graph import GraphModel
from terarec.nn.layer import Layer
from terarec.nn.registry import LAYERS
from terarec.ops.bag_lookup import quantize_rows
from terarec.spec import GraphEmbedding, GraphFeature, GraphLayer, GraphSpec
from terarec.storage import DynamicTable, Store

_FLOAT = 1  # element type, as an attribute of Cast


def export_onnx(
    model: GraphModel,
    path: Path,
    *,
    embeddings: bool = True,
    key_inputs: Sequence[KeyInput] = (),
    name: str = "terarec",
    row_type: str = "fp32",
) -> None:
    """Write the predictions of `model` in evaluation as an ONNX file, in float32.

    Inputs, in this order: the dense tensor float32[batch, F] if there is one; with `embeddings` the key inputs
    int64[batch, n, K], else the embeddings' tops float32[batch, ...], each under its own name. A bag of fewer than K
    keys is filled up with `NO_KEY`. Outputs: the predictions of each label under its name. The length of the batch is
    open. Constants of more than 2 GiB are in a file next to it, ``<path>.data``.

    Args:
        model: The model, with its weights as they are now.
        path: The file.
        embeddings: Whether the tables are in the file.
        key_inputs: Sources of the keys; by default an input for each column that an embedding reads.
        name: Name of the graph.
        row_type: "fp32", or "int8" for rows of 8-bit codes with a scale and an offset each.

    Raises:
        ConfigError: A model that is not a graph, a layer that ONNX files cannot hold, or key inputs that lack a column.
        MissingDependencyError: ``onnx`` is not installed.
        StorageError: The disk is full; nothing is left behind.
    """
    if not isinstance(model, GraphModel):
        raise ConfigError(
            "export_onnx",
            f"got a {type(model).__name__}, expected a GraphModel; terarec.export.export_model takes any model",
        )
    graph = OnnxGraph()
    needed = needed_layers(model.spec)
    values: dict[str, str] = {}
    sources = key_inputs or default_key_inputs(model.spec) if embeddings else ()
    for given in graph_inputs(model, sources if embeddings else None):
        values[given.name] = graph.input(given.name, np.dtype(given.dtype).type, given.dims)
    if embeddings:
        for embedding in read_embeddings(model.spec):
            values |= emit_embedding(graph, embedding, model.collection(embedding.name), sources, row_type)
    _emit_layers(graph, model, needed, values)
    _save(graph.model(name), path)


def _emit_layers(graph: OnnxGraph, model: GraphModel, needed: list[GraphLayer], values: dict[str, str]) -> None:
    modules = dict(zip((layer.tops[0] for layer in model.spec.layers), model.layers, strict=True))
    for layer in needed:
        graph.scope = layer.tops[0]
        module = cast(Layer, modules[layer.tops[0]])
        is_loss = LAYERS[layer.kind].is_loss
        bottoms = layer.bottoms[:1] if is_loss else layer.bottoms
        absent = [bottom for bottom in bottoms if bottom not in values]
        if absent:
            raise ConfigError(
                f"layer {layer.tops[0]!r}", f"reads the label {absent[0]!r}, which predictions do not have"
            )
        found = emit(graph, layer.kind, module, [values[bottom] for bottom in bottoms])
        if is_loss:
            graph.output(layer.bottoms[1], found[0], model.shapes[bottoms[0]].dims)
        else:
            values.update(zip(layer.tops, found, strict=True))


def _save(model: Any, path: Path) -> None:
    onnx = onnx_library()
    # Before anything is written: a runtime would report an invalid graph only when it loads the file.
    onnx.checker.check_model(model)
    with atomic_entries(path.parent) as folder:
        data = f"{path.name}.data"
        is_large = model.ByteSize() > MOST_BYTES
        onnx.save_model(model, folder / path.name, save_as_external_data=is_large, location=data)


def needed_layers(spec: GraphSpec) -> list[GraphLayer]:
    """Return the layers that predictions depend on, the losses among them."""
    wanted: set[str] = set()
    needed = []
    # Layers are in an order in which each reads what came before: one backward pass finds all that is needed.
    for layer in reversed(spec.layers):
        if LAYERS[layer.kind].is_loss:
            wanted.add(layer.bottoms[0])
        elif wanted.isdisjoint(layer.tops):
            continue
        else:
            wanted.update(layer.bottoms)
        needed.append(layer)
    return needed[::-1]


def read_embeddings(spec: GraphSpec) -> list[GraphEmbedding]:
    """Return the embeddings that predictions depend on."""
    read = {bottom for layer in needed_layers(spec) for bottom in layer.bottoms}
    return [embedding for embedding in spec.embeddings if not read.isdisjoint(embedding.tops)]


def default_key_inputs(spec: GraphSpec) -> list[KeyInput]:
    """Return an input for each column; its length is fixed where vectors are laid side by side."""
    most: dict[str, int | None] = {}
    for embedding in read_embeddings(spec):
        for feature in embedding.features:
            limit = feature.vectors if feature.pooling == "concat" else None
            known = most.get(feature.read_column)
            most[feature.read_column] = max(limit, known) if limit and known else limit or known
    return [KeyInput(name=column, columns=(column,), max_keys=limit) for column, limit in most.items()]


def graph_inputs(
    model: GraphModel, sources: Sequence[KeyInput] | None, *, dense: Sequence[str] = ()
) -> list[ModelInput]:
    """Return the inputs of an exported graph model: the dense tensor, then the keys or the outputs of the embeddings.

    Args:
        model: The model.
        sources: Sources of the keys; None for tables outside the file, whose tops are inputs.
        dense: Names of the dense columns, where they are known.
    """
    spec = model.spec
    found = []
    if spec.dense_dim:
        found.append(dense_input(spec.dense_name, dense, width=spec.dense_dim))
    if sources is not None:
        return found + [key_input(source) for source in sources]
    read = {bottom for layer in needed_layers(spec) for bottom in layer.bottoms}
    for embedding in spec.embeddings:
        columns = tuple(feature.read_column for feature in embedding.features)
        found += [
            ModelInput(
                name=top,
                dtype="float32",
                dims=model.shapes[top].dims,
                columns=columns,
                read=_reader(model, top),
            )
            for top in embedding.tops
            if top in read
        ]
    return found


def _reader(model: GraphModel, top: str) -> Callable[[Batch], NDArray[np.generic]]:
    # A function that binds `top`: a lambda in the loop above would read its last value.
    return lambda batch: model.tensor(batch, top).detach().cpu().numpy()


class OnnxTable:
    """A table in a graph.

    ONNX has no hash table. Keys 0 to n - 1 are their own rows; others are searched in the sorted keys by halving, which
    takes ceil(log2 n) steps for all keys of a batch together.

    Args:
        graph: Graph that receives the constants.
        table: The table.
        row_type: Numbers of the rows as for `export_onnx`.
    """

    def __init__(self, graph: OnnxGraph, table: Store, row_type: str = "fp32") -> None:
        pieces = list(table.export_chunks(max(1, len(table))))
        keys = np.concatenate([piece.keys.cpu().numpy() for piece in pieces])
        # ONNX has no search of its own: the keys are halved, which needs them sorted, and rows go along.
        order = np.argsort(keys)
        self.width = table.width
        self._graph = graph
        self._count = len(keys)
        # True of static tables, and of dynamic ones whose keys are ids: no search, and no second constant.
        self._is_dense = bool((keys[order] == np.arange(self._count)).all())
        weights = np.concatenate([piece.weights.float().cpu().numpy() for piece in pieces])
        default = table.spec.default if isinstance(table, DynamicTable) else 0.0
        absent = np.zeros((2, self.width), np.float32)  # of no key, and of a key that is not there
        absent[1] = default
        # Where both are zeros, a key that is not there needs no row of its own, and the graph no comparison.
        self._has_default = bool(absent.any())
        rows = np.concatenate([absent, weights[order]])
        self._ranges: tuple[str, str] | None = None  # constants [rows, 1]
        if row_type == "int8":
            packed = quantize_rows(torch.from_numpy(rows))
            scale, offset = torch.split(packed[:, self.width :].contiguous().view(torch.float32), 1, dim=1)
            self._rows = graph.constant(packed[:, : self.width].contiguous().numpy())
            self._ranges = graph.constant(scale.contiguous().numpy()), graph.constant(offset.contiguous().numpy())
        else:
            self._rows = graph.constant(rows)
        if not self._is_dense:
            self._keys = graph.constant(_padded(keys[order]))

    def look_up(self, keys: str) -> str:
        """Return float32[..., D] for the keys ``int64[...]``; the default for one that the table does not hold.

        `NO_KEY` gives zeros.
        """
        graph = self._graph
        # Zeros of the shape of the keys, whose lengths are open.
        rows = graph.node("Sub", keys, keys)
        if self._has_default:
            rows = graph.node(
                "Where", graph.node("Equal", keys, graph.integers(NO_KEY)), graph.integers(0), graph.integers(1)
            )
        if self._count:
            found, places = self._dense_places(keys) if self._is_dense else self._search(keys)
            rows = graph.node("Where", found, graph.node("Add", places, graph.integers(2)), rows)
        found = graph.node("Gather", self._rows, rows, axis=0)
        if self._ranges is None:
            return found
        scale, offset = (graph.node("Gather", part, rows, axis=0) for part in self._ranges)
        return graph.node("Add", graph.node("Mul", graph.node("Cast", found, to=_FLOAT), scale), offset)

    def _dense_places(self, keys: str) -> tuple[str, str]:
        graph = self._graph
        low = graph.node("GreaterOrEqual", keys, graph.integers(0))
        high = graph.node("Less", keys, graph.integers(self._count))
        return graph.node("And", low, high), keys

    def _search(self, keys: str) -> tuple[str, str]:
        """Return whether each key is there, and the place of the last one that is not greater."""
        graph = self._graph
        # All keys of a batch take the same number of steps, so that the loop is unrolled and the graph has no branch.
        places = graph.node("Sub", keys, keys)
        step = 1 << (self._count - 1).bit_length()
        while step > 1:
            step //= 2
            further = graph.node("Add", places, graph.integers(step))
            reached = graph.node("LessOrEqual", graph.node("Gather", self._keys, further, axis=0), keys)
            places = graph.node("Where", reached, further, places)
        places = graph.node("Min", places, graph.integers(self._count - 1))  # not into the padding
        return graph.node("Equal", graph.node("Gather", self._keys, places, axis=0), keys), places


def pool(graph: OnnxGraph, vectors: str, keys: str, *, is_mean: bool) -> str:
    """Return sum or mean of ``vectors [B, n, K, D]`` over K; a mean counts ``keys [B, n, K]`` but `NO_KEY`."""
    total = graph.node("ReduceSum", vectors, graph.integers(2), keepdims=0)
    if not is_mean:
        return total
    is_key = graph.node("Not", graph.node("Equal", keys, graph.integers(NO_KEY)))
    counts = graph.node("ReduceSum", graph.node("Cast", is_key, to=_FLOAT), graph.integers(2), keepdims=1)
    # At least 1: an empty bag gives zeros rather than NaN.
    return graph.node("Div", total, graph.node("Max", counts, graph.number(1.0)))


def _padded(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `keys` up to a power of two, so that no step of the search leaves them."""
    size = 1 << (len(keys) - 1).bit_length() if len(keys) else 1
    return np.concatenate([keys, np.full(size - len(keys), np.iinfo(np.int64).max)])


Places = Mapping[str, tuple[KeyInput, int]]
"""Column -> the input that has its keys, and its place there."""


def emit_embedding(
    graph: OnnxGraph,
    spec: GraphEmbedding,
    collection: EmbeddingCollection,
    inputs: Sequence[KeyInput],
    row_type: str = "fp32",
) -> dict[str, str]:
    """Add the tables and lookups of `spec`.

    Args:
        graph: Graph whose inputs are `inputs`.
        spec: The embedding.
        collection: Tables of the embedding.
        inputs: Source of the keys of each column.
        row_type: Numbers of the rows as for `export_onnx`.

    Returns:
        Top -> name of the value.

    Raises:
        ConfigError: A column that no input has, or fewer keys than a feature lays side by side.
    """
    graph.scope = spec.name
    places = {column: (source, place) for source in inputs for place, column in enumerate(source.columns)}
    tables = {name: OnnxTable(graph, table, row_type) for name, table in collection.tables.items()}
    parts = []
    # Neighbours alone, as `groupby` does: the parts then are in the order of the features without another operation.
    for (table, pooling, limit, _), members in groupby(spec.features, key=lambda f: _together(f, places)):
        features = list(members)
        keys = _keys(graph, features, places)
        keys = keys if limit is None else graph.slice(keys, 0, limit, axis=2)
        vectors = tables[table].look_up(keys)
        if pooling == "concat":
            parts.append(graph.node("Reshape", vectors, graph.integers(0, 0, -1)))
        else:
            parts.append(pool(graph, vectors, keys, is_mean=pooling == "mean"))
    return _tops(graph, spec, parts)


def _together(feature: GraphFeature, places: Places) -> tuple[str, str, int | None, int | str]:
    """Return the key by which features share a lookup: among others the length of their bags in the input."""
    if feature.read_column not in places:
        raise ConfigError("key inputs", f"none has column {feature.read_column!r}, expected those of the embeddings")
    source, _ = places[feature.read_column]
    if feature.pooling == "concat" and (source.max_keys or 0) < feature.vectors:
        raise ConfigError(
            "key inputs",
            f"{feature.read_column!r} has max_keys={source.max_keys}, expected at least {feature.vectors} for 'concat'",
        )
    return feature.table, feature.pooling, feature.max_keys, source.max_keys or source.name


def _keys(graph: OnnxGraph, features: Sequence[GraphFeature], places: Places) -> str:
    """Return the keys int64[B, len(features), K]."""
    runs = []
    for source, members in groupby((places[feature.read_column] for feature in features), key=lambda place: place[0]):
        order = [place for _, place in members]
        is_whole = order == list(range(len(source.columns)))
        runs.append(source.name if is_whole else graph.node("Gather", source.name, graph.integers(*order), axis=1))
    return _concat(graph, runs)


def _tops(graph: OnnxGraph, spec: GraphEmbedding, parts: list[str]) -> dict[str, str]:
    """Return the values of the tops from parts [B, n, width] in the order of the features."""
    if spec.output == "stacked":
        return {spec.name: _concat(graph, parts)}
    row = _concat(graph, [graph.node("Flatten", part, axis=1) for part in parts])
    if spec.output == "flat":
        return {spec.name: row}
    tops, start = {}, 0
    for top, feature in zip(spec.tops, spec.features, strict=True):
        stop = start + spec.width_of(feature)
        tops[top] = graph.node("Unsqueeze", graph.slice(row, start, stop, axis=1), graph.integers(1))
        start = stop
    return tops


def _concat(graph: OnnxGraph, values: list[str]) -> str:
    return values[0] if len(values) == 1 else graph.node("Concat", *values, axis=1)
