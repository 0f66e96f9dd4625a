"""`SparseEmbedding` and embedding collections as JSON."""

from __future__ import annotations

from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import CommunicationStrategy, CompressionStrategy, Embedding_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_object import JsonObject
from terarec.hugectr.optimizer_json import optimizer_to_json, read_optimizer
from terarec.hugectr.tables.embedding_collection import SHARD
from terarec.hugectr.tables.embedding_table import EmbeddingTableConfig, EmbeddingTablePlaceHolder
from terarec.hugectr.tables.kinds import TEXT, TRUTH, listed, mapped, named_member, one_of, one_or_list, whole
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.sparse_embedding import SparseEmbedding

EMBEDDING_TYPES = dict(Embedding_t.__members__)
"""Embeddings by their type in JSON."""

_COMBINERS = {0: "sum", 1: "mean", "sum": "sum", "mean": "mean"}
_ROOM = ("workspace_size_per_gpu_in_mb", "max_vocabulary_size_per_gpu")
# Which GPU talks to which: without effect on results.
_IGNORED = ("name", "plan_file", "plan_file1")


def embedding_to_json(embedding: SparseEmbedding, optimizer: OptParamsPy, capacity: int) -> dict[str, Any]:
    """`embedding` as what `json.dumps` takes.

    Args:
        embedding: what to write.
        optimizer: the model's.
        capacity: most keys over all devices.
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
    """The embedding of `kind` in `data`.

    Raises:
        WrongInputError: an unknown key, or a value that is not accepted.
    """
    values = data.child("sparse_embedding_hparam")
    room = {key: values.take(key, whole(0)) for key in _ROOM if values.has(key)}
    if room.get("max_vocabulary_size_per_gpu"):
        room.pop("workspace_size_per_gpu_in_mb", None)
    given: dict[str, Any] = {
        **room,
        "embedding_type": kind,
        "embedding_vec_size": values.take("embedding_vec_size", whole(1)),
        "combiner": _COMBINERS[values.take("combiner", one_of(*_COMBINERS))],
        "slot_size_array": values.take("slot_size_array", listed(whole(0)), []),
        "bottom_name": data.take("bottom", one_or_list(TEXT))[0],
        "sparse_embedding_name": data.take("top", one_or_list(TEXT))[0],
    }
    if data.has("optimizer"):
        given["optimizer"] = read_optimizer(data.child("optimizer"))
    values.finish(("max_vocabulary_size_global", "plan_file"))
    data.finish(_IGNORED)
    try:
        return SparseEmbedding(**given)
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def collection_to_json(config: EmbeddingCollectionConfig) -> dict[str, Any]:
    """`config` as what `json.dumps` takes: a layout of terarec's own, as HugeCTR's files have none for it."""
    tables = {lookup.table.name: lookup.table for lookup in config.lookups}
    plan = config.plan
    written: dict[str, Any] = {
        "use_exclusive_keys": config.use_exclusive_keys,
        "comm_strategy": config.comm_strategy.name,
        "top": config.concatenated_name,
        "tables": [_table_to_json(table) for table in tables.values()],
        "lookups": [
            {"table": look.table.name, "bottom": look.bottom_name, "top": look.top_name, "combiner": look.combiner}
            for look in config.lookups
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
    """The embedding collection in `data`.

    Raises:
        WrongInputError: an unknown key, or a value that is not accepted.
    """
    config = EmbeddingCollectionConfig(
        data.take("use_exclusive_keys", TRUTH, False),
        data.take("comm_strategy", named_member(CommunicationStrategy), CommunicationStrategy.Uniform),
    )
    top = data.take("top", TEXT, "")
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
        kinds = {row.name: row.kind for row in SHARD.rows}
        kinds["compression_strategy"] = mapped(named_member(CompressionStrategy), listed(TEXT))
        config.shard(**{name: plan.take(name, kind) for name, kind in kinds.items()})
        plan.finish()
    data.finish()
    return config


def _read_table(data: JsonObject) -> EmbeddingTableConfig:
    first: tuple[Any, ...] = (data.take("name", TEXT),)
    kind = EmbeddingTableConfig
    if data.has("id_space"):
        kind, first = EmbeddingTablePlaceHolder, (data.take("id_space", whole(0)),)
    made = kind(
        *first,
        max_vocabulary_size=data.take("max_vocabulary_size", whole(-1)),
        ev_size=data.take("ev_size", whole(1)),
        opt_params=read_optimizer(data.child("optimizer")) if data.has("optimizer") else None,
    )
    data.finish()
    return made


def _read_lookup(data: JsonObject, tables: dict[str, EmbeddingTableConfig]) -> dict[str, Any]:
    table = data.take("table", one_of(*tables))
    found = {
        "table_config": tables[table],
        "bottom_name": data.take("bottom", TEXT),
        "top_name": data.take("top", TEXT),
        "combiner": data.take("combiner", TEXT),
    }
    data.finish()
    return found
