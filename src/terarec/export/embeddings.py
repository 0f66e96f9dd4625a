"""The embeddings of a graph in ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.export.key_input import NO_KEY, KeyInput
from terarec.export.onnx_graph import OnnxGraph
from terarec.export.tables import OnnxTable, pool
from terarec.spec import GraphEmbedding, GraphFeature

Places = Mapping[str, tuple[KeyInput, int]]
"""Column -> the input that has its keys, and its place there."""


def emit_embedding(
    graph: OnnxGraph, spec: GraphEmbedding, collection: EmbeddingCollection, inputs: Sequence[KeyInput]
) -> dict[str, str]:
    """Add the tables and lookups of `spec`.

    Args:
        graph: that has `inputs` as its inputs.
        spec: the embedding.
        collection: its tables.
        inputs: where the keys of each column come from.

    Returns:
        Top -> name of the value.

    Raises:
        ConfigError: a column that no input has, or fewer keys than a feature lays side by side.
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
            parts.append(pool(graph, vectors, keys, is_mean=pooling == "mean", no_key=NO_KEY))
    return _tops(graph, spec, parts)


def _together(feature: GraphFeature, places: Places) -> tuple[str, str, int | None, int | str]:
    """What features have in common that one lookup serves: among others the length of their bags in the input."""
    if feature.read_column not in places:
        raise ConfigError(f"key inputs: none has column {feature.read_column!r}, expected those of the embeddings")
    source, _ = places[feature.read_column]
    if feature.pooling == "concat" and (source.max_keys or 0) < feature.vectors:
        raise ConfigError(
            f"key inputs: {feature.read_column!r} has max_keys={source.max_keys}, expected at least {feature.vectors} "
            "for 'concat'"
        )
    return feature.table, feature.pooling, feature.max_keys, source.max_keys or source.name


def _keys(graph: OnnxGraph, features: Sequence[GraphFeature], places: Places) -> str:
    """The keys int64[B, len(features), K]."""
    runs = []
    for source, members in groupby((places[feature.read_column] for feature in features), key=lambda place: place[0]):
        order = [place for _, place in members]
        is_whole = order == list(range(len(source.columns)))
        runs.append(source.name if is_whole else graph.node("Gather", source.name, graph.integers(*order), axis=1))
    return _concat(graph, runs)


def _tops(graph: OnnxGraph, spec: GraphEmbedding, parts: list[str]) -> dict[str, str]:
    """The values of the tops from parts [B, n, width] in the order of the features."""
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
