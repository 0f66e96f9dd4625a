"""`SparseEmbedding` and `EmbeddingCollectionConfig` as embeddings of a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig, EmbeddingLookup
from terarec.hugectr.enums import Embedding_t, Optimizer_t, Update_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.objects import EmbeddingTableConfig, OptParamsPy, SparseEmbedding
from terarec.hugectr.optimizer import STATES
from terarec.spec import DynamicTableSpec, GraphEmbedding, GraphFeature, GraphLayer, TableSpec

HAS_STATIC_TABLES = (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, Embedding_t.HybridSparseEmbedding)
"""Embeddings whose keys count from 0 in each slot."""

_POOLING: Mapping[str, Literal["sum", "mean", "concat"]] = {"sum": "sum", "average": "mean", "concat": "concat"}


def capacity(params: SparseEmbedding, optimizer: OptParamsPy, num_devices: int) -> int:
    """Most keys that a `SparseEmbedding` holds.

    On each device as many as it names, or the workspace's bytes over those of a row and its optimizer states, as
    HugeCTR reckons them; else as many as ``slot_size_array`` names.
    """
    if params.max_vocabulary_size_per_gpu:
        return int(params.max_vocabulary_size_per_gpu) * num_devices
    if not params.workspace_size_per_gpu_in_mb:
        return sum(params.slot_size_array)
    copies = 1 + STATES[optimizer.optimizer_type]
    if optimizer.optimizer_type is Optimizer_t.Adam and optimizer.update_type is Update_t.LazyGlobal:
        copies += 1
    rows = params.workspace_size_per_gpu_in_mb * 2**20 // (4 * params.embedding_vec_size * copies)
    return int(rows) * num_devices


def sparse_embedding(params: SparseEmbedding, *, slots: int, optimizer: str) -> GraphEmbedding:
    """A `SparseEmbedding` over the `slots` slots of its input.

    Hash embeddings are dynamic tables: one for all slots of a distributed embedding, one a slot for a localized one,
    whose slots have first weights of their own. One-hot and hybrid embeddings are a static table a slot.

    Raises:
        WrongInputError: a ``slot_size_array`` of another length, where each slot has its own table.
    """
    name = params.sparse_embedding_name
    tables: list[TableSpec | DynamicTableSpec]
    if params.embedding_type in HAS_STATIC_TABLES:
        sizes = _sizes(params, slots)
        tables = [_static(f"{name}.{slot}", size, params) for slot, size in enumerate(sizes)]
    elif params.embedding_type is Embedding_t.LocalizedSlotSparseEmbeddingHash:
        sizes = _sizes(params, slots) if params.slot_size_array else [0] * slots
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


def _sizes(params: SparseEmbedding, slots: int) -> Sequence[int]:
    sizes: Sequence[int] = params.slot_size_array
    if len(sizes) != slots:
        raise WrongInputError(
            f"SparseEmbedding {params.sparse_embedding_name!r}: slot_size_array: got {len(sizes)} sizes, expected "
            f"{slots}, one for each slot of {params.bottom_name!r}"
        )
    return sizes


def _dynamic(name: str, size: int, params: SparseEmbedding) -> DynamicTableSpec:
    """A table whose rows start within 1 / sqrt(size) around 0, or 0.05 for an unknown size."""
    scale = 1 / math.sqrt(size) if size else 0.05
    return DynamicTableSpec(name=name, width=params.embedding_vec_size, init_scale=scale, report_evicted=False)


def _static(name: str, size: int, params: SparseEmbedding) -> TableSpec:
    return TableSpec(name=name, rows=max(1, size), width=params.embedding_vec_size)


def collection_graph(
    config: EmbeddingCollectionConfig, *, number: int, optimizers: Mapping[str, str], hotness: Mapping[str, int]
) -> tuple[list[GraphEmbedding], list[GraphLayer]]:
    """An embedding collection: an embedding for each optimizer of its tables, and the layers that join their tops.

    Args:
        config: the collection.
        number: of the collection in the model.
        optimizers: table -> name of its optimizer.
        hotness: sparse input -> most keys of a sample.
    """
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
    """The layers that put the tops of several embeddings side by side, in the order of the lookups."""
    tops = tuple(map(_vector_name, config.lookups))
    width = sum(embedding.width_of(feature) for embedding in embeddings for feature in embedding.features)
    beside = f"{config.concatenated_name}_concat"
    return [
        GraphLayer(kind="concat", bottoms=tops, tops=(beside,), options={"axis": 2}),
        GraphLayer(kind="reshape", bottoms=(beside,), tops=(config.concatenated_name,), options={"leading_dim": width}),
    ]


def _flattened(config: EmbeddingCollectionConfig, embeddings: Sequence[GraphEmbedding]) -> list[GraphLayer]:
    """The layers that make [B, width] of the vectors of lookups that are flat."""
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
    """Name of the tensor [B, 1, width] that a lookup gives."""
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
