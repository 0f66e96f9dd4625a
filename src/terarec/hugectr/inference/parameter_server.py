# SPDX-License-Identifier: Apache-2.0
"""Parameter servers of HugeCTR's objects: tiers, served models and caches of `terarec.ps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terarec.embedding.lookups import RowLookup
from terarec.hugectr.enums import (
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    UpdateSourceType_t,
)
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.inference.update_source import UpdateSource
from terarec.hugectr.objects import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    VolatileDatabaseParams,
)
from terarec.memory.redis_server import RedisServer
from terarec.ps import ParameterServer
from terarec.ps.cache import EmbeddingCache
from terarec.spec import (
    CacheSpec,
    HostMemorySpec,
    OverflowSpec,
    ParameterServerSpec,
    RedisSpec,
    RocksDBSpec,
    ServedModelSpec,
    ServedTableSpec,
    SharedMemorySpec,
)
from terarec.spec.parameter_server import TierSpec, TLSSpec

# HugeCTR's default margin is the largest uint64; what reaches half of it is not a bound.
_NO_BOUND = 2**63
_EVICT: dict[DatabaseOverflowPolicy_t, Any] = {
    DatabaseOverflowPolicy_t.evict_oldest: "lru",
    DatabaseOverflowPolicy_t.evict_random: "random",
    DatabaseOverflowPolicy_t.evict_least_used: "lfu",
}


def tiers_of(
    volatile: VolatileDatabaseParams | None, persistent: PersistentDatabaseParams | None
) -> tuple[TierSpec, ...]:
    """Return the tiers of two databases; without any, the memory of this process.

    Raises:
        WrongInputError: Both are disabled, or one is of a kind that only the other can be.
    """
    tiers: list[TierSpec] = []
    with as_hugectr_errors("VolatileDatabaseParams"):
        if volatile is None:
            tiers.append(HostMemorySpec())
        elif volatile.type is DatabaseType_t.redis_cluster:
            tiers.append(_redis(volatile))
        elif volatile.type is DatabaseType_t.rocks_db:
            raise WrongInputError("type", "got rocks_db, expected a persistent database of this type", field="type")
        elif volatile.type is DatabaseType_t.multi_process_hash_map:
            tiers.append(_shared(volatile))
        elif volatile.type is not DatabaseType_t.disabled:
            tiers.append(_host(volatile))
    if persistent is not None and persistent.type is not DatabaseType_t.disabled:
        if persistent.type is not DatabaseType_t.rocks_db:
            got = persistent.type.name
            raise WrongInputError("PersistentDatabaseParams", "type", f"got {got}, expected rocks_db or disabled")
        # Without it the database holds the rows already, from an earlier server.
        share = 1.0 if persistent.initialize_after_startup else 0.0
        tiers.append(RocksDBSpec(path=persistent.path, read_only=persistent.read_only, load_share=share))
    if not tiers:
        raise WrongInputError("volatile_db", "got two disabled databases, expected one that keeps rows", field="type")
    return tuple(tiers)


def _overflow(params: VolatileDatabaseParams) -> OverflowSpec:
    most = params.overflow_margin
    policy = _EVICT[params.overflow_policy]
    if params.type is DatabaseType_t.redis_cluster and policy == "lfu":
        policy = "lru"  # Redis has times of use
    keep = params.overflow_resolution_target
    return OverflowSpec(max_rows=None if most >= _NO_BOUND else most, evict=policy, keep=keep)


def _share(params: VolatileDatabaseParams) -> float:
    return params.initial_cache_rate if params.initialize_after_startup else 0.0


def _host(params: VolatileDatabaseParams) -> HostMemorySpec:
    overflow = _overflow(params)
    return HostMemorySpec(
        # Partitions bound the rows; without a bound, one index and its threads are faster.
        num_partitions=1 if overflow.max_rows is None else params.num_partitions,
        overflow=overflow,
        load_share=_share(params),
        keeps_found=params.cache_missed_embeddings,
    )


def _shared(params: VolatileDatabaseParams) -> SharedMemorySpec:
    return SharedMemorySpec(
        name=params.shared_memory_name,
        max_bytes=params.shared_memory_size,
        removes=params.shared_memory_auto_remove,
        load_share=_share(params),
    )


def _redis(params: VolatileDatabaseParams) -> RedisSpec:
    tls = TLSSpec(
        ca_certificates=params.tls_ca_certificate,
        certificate=params.tls_client_certificate or None,
        key=params.tls_client_key or None,
        server_name=params.tls_server_name_identification or None,
    )
    return RedisSpec(
        address=params.address,
        user=params.user_name,
        password=params.password or None,
        num_partitions=params.num_partitions,
        num_connections=params.num_node_connections,
        batch_rows=params.max_batch_size,
        tls=tls if params.enable_tls else None,
        overflow=_overflow(params),
        load_share=_share(params),
        keeps_found=params.cache_missed_embeddings,
    )


def cache_of(params: InferenceParams) -> CacheSpec | None:
    """Return the cache that a model requests, or None."""
    is_static = params.use_static_table or params.embedding_cache_type is EmbeddingCacheType_t.Static
    if not params.use_gpu_embedding_cache or not (params.cache_size_percentage or is_static):
        return None
    return CacheSpec(
        form="static" if is_static else "dynamic",
        share=1.0 if is_static else min(1.0, params.cache_size_percentage),
        # HugeCTR takes any threshold. Above 1 no lookup reaches it, and 1 reads all at once, too.
        hit_rate_threshold=min(1.0, params.hit_rate_threshold),
        refresh_delay_seconds=params.refresh_delay,
        refresh_seconds=params.refresh_interval,
        # HugeCTR's 0 is the whole cache in one step.
        refresh_share=min(1.0, params.cache_refresh_percentage_per_iteration) or 1.0,
    )


def served_model(
    params: InferenceParams, widths: Sequence[int], names: Sequence[str] = (), has_slots: Sequence[bool] = ()
) -> ServedModelSpec:
    """Return the tables of a model.

    Args:
        params: The model.
        widths: Width of each table.
        names: Name of each table; those of `params` by default.
        has_slots: Whether single files of each table have slots; folders say it themselves.
    """
    files, defaults = params.sparse_model_files, params.default_value_for_each_table or [0.0]
    if len(defaults) != len(widths):  # HugeCTR's rule
        defaults = defaults[:1] * len(widths)
    if len(files) not in (0, len(widths)):
        got = f"got {len(files)} paths for {len(widths)} tables"
        raise WrongInputError("sparse_model_files", f"{got}, expected one for each", field="sparse_model_files")
    named = list(names or params.embedding_table_names)
    named += [""] * (len(widths) - len(named))
    with as_hugectr_errors("InferenceParams"):
        return ServedModelSpec(
            name=params.model_name,
            cache=cache_of(params),
            tables=tuple(
                ServedTableSpec(
                    name=named[number] or f"sparse_embedding{number}",
                    width=width,
                    default=defaults[number],
                    source=str(files[number]) if files else None,
                    key_bytes=8 if params.i64_input_key else 4,
                    has_slots=bool(has_slots) and has_slots[number],
                )
                for number, width in enumerate(widths)
            ),
        )


def lookups_of(
    server: ParameterServer, model: ServedModelSpec, device: torch.device, spec: CacheSpec | None
) -> tuple[list[RowLookup], list[EmbeddingCache]]:
    """Return the rows of each table of a model, and the caches that they are read through; no `spec`, no caches."""
    if spec is None:
        return [server.table(model.name, table.name).lookup for table in model.tables], []
    caches = [server.cache(model.name, table.name, device=device, spec=spec) for table in model.tables]
    return [cache.lookup for cache in caches], caches


def start_server(config: ParameterServerConfig) -> ParameterServer:
    """Load all models of a configuration; errors are those of `open_server`."""
    models = []
    for params in config.inference_params_array:
        name = params.model_name
        models.append(served_model(params, config.embedding_vec_size[name], config.emb_table_name[name]))
    tiers = tiers_of(config.volatile_db, config.persistent_db)
    server = open_server("ParameterServerConfig", tiers, models)
    start_updates("ParameterServerConfig", server, config, models)
    return server


def start_updates(
    call: str,
    server: ParameterServer,
    params: InferenceParams | ParameterServerConfig,
    models: Sequence[ServedModelSpec],
) -> None:
    """Let the rows of a queue reach the tables of models from now on, where there is a queue.

    All tiers take the rows of a table that the filter of any of them lets through: a tier that went without would give
    old rows where the one before it has evicted the new one.
    """
    source = params.update_source
    if source is None or source.type is UpdateSourceType_t.null:
        return
    volatile, persistent = params.volatile_db, params.persistent_db
    filters: list[str] = []
    if volatile is None or volatile.type is not DatabaseType_t.disabled:
        filters += (volatile or VolatileDatabaseParams()).update_filters
    if persistent is not None and persistent.type is not DatabaseType_t.disabled:
        filters += persistent.update_filters
    with as_hugectr_errors(call):
        UpdateSource(server, source, models, filters)


def open_server(call: str, tiers: Sequence[TierSpec], models: Sequence[ServedModelSpec]) -> ParameterServer:
    """Load models for a call.

    Raises:
        WrongInputError: Names, widths or databases that do not fit together.
        FileCannotOpenError: A file does not exist.
        BrokenFileError: A file is damaged.
        ServerUnreachableError: A server of a database does not answer.
    """
    with as_hugectr_errors(call):
        for tier in tiers:
            # Lookups skip a tier that fails, so that a script whose server was never there would not notice.
            if isinstance(tier, RedisSpec):
                server = RedisServer(tier)
                server.connect()
                server.close()
        return ParameterServer(ParameterServerSpec(tiers=tuple(tiers), models=tuple(models)))


def device_of(numbers: Sequence[int]) -> torch.device:
    """Return the first GPU that exists, or the CPU."""
    present = range(torch.cuda.device_count())
    chosen = next((number for number in numbers if number in present), None)
    return torch.device("cpu") if chosen is None else torch.device("cuda", chosen)
