# SPDX-License-Identifier: Apache-2.0
"""The configuration of a parameter server in a file, ``ps.json``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from terarec.hugectr.enums import (
    DatabaseHashMapAlgorithm_t,
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    UpdateSourceType_t,
)
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_files import JsonObject, read_json
from terarec.hugectr.objects import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from terarec.hugectr.schema.table import forms

# What files call a member, besides its own name.
_DATABASES: dict[str, DatabaseType_t] = {
    **DatabaseType_t.__members__,
    **dict.fromkeys(("disable", "none"), DatabaseType_t.disabled),
    **dict.fromkeys(("hashmap", "hash", "map"), DatabaseType_t.hash_map),
    **dict.fromkeys(("parallel_hashmap", "parallel_hash", "parallel_map"), DatabaseType_t.parallel_hash_map),
    **dict.fromkeys(
        ("multi_process_hashmap", "multi_process_hash", "multi_process_map"), DatabaseType_t.multi_process_hash_map
    ),
    "redis": DatabaseType_t.redis_cluster,
    **dict.fromkeys(("rocksdb", "rocks"), DatabaseType_t.rocks_db),
}
_POLICIES = {
    **DatabaseOverflowPolicy_t.__members__,
    **{name.removeprefix("evict_"): policy for name, policy in DatabaseOverflowPolicy_t.__members__.items()},
}
_VOLATILE_MEMBERS: dict[str, Mapping[str, Enum]] = {
    "type": _DATABASES,
    "overflow_policy": _POLICIES,
    "algorithm": DatabaseHashMapAlgorithm_t.__members__,
}
_QUEUES = {
    **UpdateSourceType_t.__members__,
    "none": UpdateSourceType_t.null,
    **dict.fromkeys(("kafka_mq", "kafka"), UpdateSourceType_t.kafka_message_queue),
}
_CACHES = {name.lower(): kind for name, kind in EmbeddingCacheType_t.__members__.items()}


def read_parameter_server(path: str) -> ParameterServerConfig:
    """Return the configuration in the file `path`. Unknown keys are ignored, with a warning for each.

    Raises:
        FileCannotOpenError: No such file.
        BrokenFileError: No JSON.
        WrongInputError: A missing key, or a value that is not accepted; the message has its path.
    """
    data = read_json(path)
    values = _take(data, "ps.json")
    persistent = _persistent_database(data)
    # All models of a file share its databases and its queue.
    databases: dict[str, Any] = {
        "volatile_db": _volatile_database(data, persistent),
        "persistent_db": persistent,
        "update_source": _update_source(data),
    }
    models = [_model(one, is_long=values["supportlonglong"], databases=databases) for one in data.children("models")]
    data.warn_unknown()
    names = [model.model_name for model in models]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise WrongInputError(f"{data.where}.models", f"got {repeated[0]!r} twice, expected distinct names of models")
    return ParameterServerConfig(
        emb_table_name={model.model_name: model.embedding_table_names for model in models},
        embedding_vec_size={model.model_name: model.embedding_vecsize_per_table for model in models},
        max_feature_num_per_sample_per_emb_table={
            model.model_name: model.maxnum_catfeature_query_per_table_per_sample for model in models
        },
        inference_params_array=models,
        **databases,
    )


def _take(data: JsonObject, form_name: str) -> dict[str, Any]:
    """Return the value of every key, or its default in the selected release, and the values that these derive."""
    form = forms()[form_name][0]
    release = form.release()
    values = {one.name: data.take(one.name, one.type, one.default_in(release)) for one in form.parameters}
    return {**values, **form.derive(values)}


def _model(data: JsonObject, *, is_long: bool, databases: dict[str, Any]) -> InferenceParams:
    values = _take(data, "ps.json.models")
    data.warn_unknown()
    tables = len(values["embedding_vecsize_per_table"])
    if values["embedding_table_names"] is None:
        # As `served_model` names tables that have no name.
        values["embedding_table_names"] = [f"sparse_embedding{number}" for number in range(tables)]
    elif len(values["embedding_table_names"]) != tables:
        got = f"got {len(values['embedding_table_names'])} names for {tables} tables"
        where = f"{data.where}.embedding_table_names"
        raise WrongInputError(where, f"{got}, expected one for each", field="embedding_table_names")
    if len(values["sparse_files"]) not in (0, tables):
        got = f"got {len(values['sparse_files'])} paths for {tables} tables"
        where = f"{data.where}.sparse_files"
        raise WrongInputError(where, f"{got}, expected one for each, or none", field="sparse_files")
    defaults = values["default_value_for_each_table"][:tables]
    values |= {
        **databases,
        "i64_input_key": is_long,
        "device_id": (values["deployed_devices"] or [0])[0],
        "default_value_for_each_table": defaults + [0.0] * (tables - len(defaults)),
        "embedding_cache_type": _CACHES[values["embedding_cache_type"]],
    }
    return data.make(InferenceParams, {name: values[name] for name in InferenceParams.names() & values.keys()})


def _volatile_database(data: JsonObject, persistent: PersistentDatabaseParams | None) -> VolatileDatabaseParams | None:
    chosen: VolatileDatabaseParams | None = None
    # Files of 3.3 have two clauses instead of one: rows of a server need no second copy in memory.
    for name in filter(data.has, ("volatile_db", "distributed_db", "cpu_memory_db")):
        clause = data.child(name)
        # HugeCTR has no database without a type. A file without any database would have nowhere to load its rows to.
        has_disk = persistent is not None and persistent.type is not DatabaseType_t.disabled
        is_off = has_disk or name == "distributed_db"
        kind = DatabaseType_t.disabled if is_off else DatabaseType_t.parallel_hash_map
        made = clause.make(
            VolatileDatabaseParams, {"type": kind} | _clause(clause, "ps.json.volatile_db", _VOLATILE_MEMBERS)
        )
        # A server that is off leaves the memory of the process, as 3.3 has it without a clause of its own.
        is_none = name == "distributed_db" and made.type is DatabaseType_t.disabled
        if not is_none and (chosen is None or chosen.type is DatabaseType_t.disabled):
            chosen = made
    return chosen


def _persistent_database(data: JsonObject) -> PersistentDatabaseParams | None:
    if not data.has("persistent_db"):
        return None
    clause = data.child("persistent_db")
    return clause.make(PersistentDatabaseParams, _clause(clause, "ps.json.persistent_db", {"type": _DATABASES}))


def _update_source(data: JsonObject) -> UpdateSourceParams | None:
    if not data.has("update_source"):
        return None
    clause = data.child("update_source")
    form = forms()["ps.json.update_source"][0]
    kind = next(one for one in form.parameters if one.name == "type")
    # Unlike a call, a file without a type means Kafka up to 4.2.
    members = {"type": _QUEUES[kind.default_in(form.release())]}
    return clause.make(UpdateSourceParams, members | _clause(clause, form.name, {"type": _QUEUES}))


def _clause(clause: JsonObject, form_name: str, members: Mapping[str, Mapping[str, Enum]]) -> dict[str, Any]:
    """Return the values of the keys that `clause` has, those of `members` as members of enumerations."""
    values: dict[str, Any] = {}
    for one in forms()[form_name][0].parameters:
        clause.accept(one.name)
        if clause.has(one.name):
            value = clause.take(one.name, one.type)
            values[one.name] = members[one.name][value] if one.name in members else value
    clause.warn_unknown()
    return values
