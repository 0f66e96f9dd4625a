"""Embedding tables and lookups in ONNX: the sorted keys and their rows as constants, and a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.export.inputs import NO_KEY, KeyInput
from terarec.export.onnx_graph import OnnxGraph
from terarec.spec import GraphEmbedding, GraphFeature
from terarec.storage import DynamicTable, Store

_FLOAT = 1  # element type, as an attribute of Cast


class OnnxTable:
    """A table in a graph.

    ONNX has no hash table. Keys 0 to n - 1 are their own rows; others are searched in the sorted keys by halving, which
    takes ceil(log2 n) steps for all keys of a batch together.

    Args:
        graph: Graph that receives the constants.
        table: What it holds now.
    """

    def __init__(self, graph: OnnxGraph, table: Store) -> None:
        pieces = list(table.export_chunks(max(1, len(table))))
        keys = np.concatenate([piece.keys.cpu().numpy() for piece in pieces])
        order = np.argsort(keys)
        self.width = table.width
        self._graph = graph
        self._count = len(keys)
        self._is_dense = bool((keys[order] == np.arange(self._count)).all())
        weights = np.concatenate([piece.weights.float().cpu().numpy() for piece in pieces])
        default = table.spec.default if isinstance(table, DynamicTable) else 0.0
        absent = np.zeros((2, self.width), np.float32)  # of no key, and of a key that is not there
        absent[1] = default
        self._has_default = bool(absent.any())
        self._rows = graph.constant(np.concatenate([absent, weights[order]]))
        if not self._is_dense:
            self._keys = graph.constant(_padded(keys[order]))

    def look_up(self, keys: str) -> str:
        """Return float32[..., D] for the keys ``int64[...]``; the default for one that the table does not hold.

        `NO_KEY` gives zeros.
        """
        graph = self._graph
        rows = graph.node("Sub", keys, keys)
        if self._has_default:
            rows = graph.node(
                "Where", graph.node("Equal", keys, graph.integers(NO_KEY)), graph.integers(0), graph.integers(1)
            )
        if self._count:
            found, places = self._dense_places(keys) if self._is_dense else self._search(keys)
            rows = graph.node("Where", found, graph.node("Add", places, graph.integers(2)), rows)
        return graph.node("Gather", self._rows, rows, axis=0)

    def _dense_places(self, keys: str) -> tuple[str, str]:
        graph = self._graph
        low = graph.node("GreaterOrEqual", keys, graph.integers(0))
        high = graph.node("Less", keys, graph.integers(self._count))
        return graph.node("And", low, high), keys

    def _search(self, keys: str) -> tuple[str, str]:
        """Return whether each key is there, and the place of the last one that is not greater."""
        graph = self._graph
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
    """Sum or mean of ``vectors [B, n, K, D]`` over K; a mean counts the ``keys [B, n, K]`` other than `NO_KEY`."""
    total = graph.node("ReduceSum", vectors, graph.integers(2), keepdims=0)
    if not is_mean:
        return total
    is_key = graph.node("Not", graph.node("Equal", keys, graph.integers(NO_KEY)))
    counts = graph.node("ReduceSum", graph.node("Cast", is_key, to=_FLOAT), graph.integers(2), keepdims=1)
    return graph.node("Div", total, graph.node("Max", counts, graph.number(1.0)))


def _padded(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `keys` up to a power of two, so that no step of the search leaves them."""
    size = 1 << (len(keys) - 1).bit_length() if len(keys) else 1
    return np.concatenate([keys, np.full(size - len(keys), np.iinfo(np.int64).max)])


Places = Mapping[str, tuple[KeyInput, int]]
"""Column -> the input that has its keys, and its place there."""


def emit_embedding(
    graph: OnnxGraph, spec: GraphEmbedding, collection: EmbeddingCollection, inputs: Sequence[KeyInput]
) -> dict[str, str]:
    """Add the tables and lookups of `spec`.

    Args:
        graph: That has `inputs` as its inputs.
        spec: The embedding.
        collection: Its tables.
        inputs: Source of the keys of each column.

    Returns:
        Top -> name of the value.

    Raises:
        ConfigError: A column that no input has, or fewer keys than a feature lays side by side.
    """
    graph.scope = spec.name
    places = {column: (source, place) for source in inputs for place, column in enumerate(source.columns)}
    tables = {name: OnnxTable(graph, table) for name, table in collection.tables.items()}
    parts = []
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
    """Return what features of one lookup have in common: among others the length of their bags in the input."""
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
