# SPDX-License-Identifier: Apache-2.0
"""Names, places and defaults of the objects for serving, release by release, as HugeCTR's bindings have them."""

import inspect
from typing import Any

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.inference import (
    CPUMemoryDatabaseParams,
    DistributedDatabaseParams,
    EmbeddingCacheType_t,
    InferenceParams,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from terarec.hugectr.inference.parameter_server import served_model, tiers_of
from terarec.hugectr.schema.table import forms
from terarec.parallel import available_threads
from terarec.spec import RedisSpec, RocksDBSpec

LEAST: dict[str, Any] = {
    "model_name": "m",
    "max_batchsize": 8,
    "hit_rate_threshold": 1.0,
    "dense_model_file": "",
    "sparse_model_files": ["a"],
    "use_gpu_embedding_cache": False,
    "cache_size_percentage": 0.5,
    "i64_input_key": True,
}
POLICIES = hugectr.DatabaseOverflowPolicy_t


@pytest.fixture
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", request.param)
    return str(request.param)


@pytest.mark.parametrize(
    ("release", "percentage", "dense_features"),
    [("3.2", 0.1, 20), ("3.6", 0.1, 20), ("3.9", 0.1, 26), ("4.0", 0.0, 26), ("24.06", 0.0, 26)],
    indirect=["release"],
)
def test_defaults_of_a_model(release: str, percentage: float, dense_features: int) -> None:
    """Finding M9: a refresh reads a tenth of the cache at a time up to 3.9."""
    params = InferenceParams(**LEAST)
    assert params.cache_refresh_percentage_per_iteration == percentage
    assert params.maxnum_des_feature_per_sample == dense_features


@pytest.mark.parametrize(
    ("release", "policy", "batch", "filters", "updates"),
    [
        ("3.3", "evict_oldest", 10_000, [".+"], 1_000),
        ("3.7", "evict_oldest", 10_000, ["^hps_.+$"], 8_192),
        ("4.2", "evict_oldest", 65_536, ["^hps_.+$"], 8_192),
        ("4.3", "evict_random", 65_536, ["^hps_.+$"], 8_192),
        ("25.03", "evict_random", 65_536, ["^hps_.+$"], 8_192),
    ],
    indirect=["release"],
)
def test_defaults_of_databases(release: str, policy: str, batch: int, filters: list[str], updates: int) -> None:
    """Finding M9: the policy of a full partition, batches, and the tables that receive updates."""
    volatile, persistent = VolatileDatabaseParams(), PersistentDatabaseParams()
    assert (volatile.overflow_policy.name, volatile.max_batch_size, volatile.update_filters) == (policy, batch, filters)
    assert (persistent.max_batch_size, persistent.update_filters) == (batch, filters)
    assert UpdateSourceParams().max_batch_size == updates
    assert volatile.num_partitions == min(16, available_threads())


def test_the_newest_release_counts_where_none_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERAREC_HUGECTR_RELEASE", raising=False)
    assert VolatileDatabaseParams().overflow_policy is POLICIES.evict_random
    assert InferenceParams(**LEAST).cache_refresh_percentage_per_iteration == 0.0


POSITIONS = {
    "3.1": "use_mixed_precision scaler use_algorithm_search use_cuda_graph",
    "3.2": "use_cuda_graph db_type redis_ip rocksdb_path cache_size_percentage_redis "
    "number_of_worker_buffers_in_pool number_of_refresh_buffers_in_pool "
    "cache_refresh_percentage_per_iteration deployed_devices default_value_for_each_table",
    "3.4": "number_of_refresh_buffers_in_pool cache_refresh_percentage_per_iteration deployed_devices "
    "default_value_for_each_table volatile_db persistent_db update_source",
    "3.5": "update_source maxnum_des_feature_per_sample refresh_delay refresh_interval "
    "maxnum_catfeature_query_per_table_per_sample embedding_vecsize_per_table embedding_table_names",
    "3.9": "number_of_refresh_buffers_in_pool thread_pool_size cache_refresh_percentage_per_iteration",
    "4.2": "embedding_table_names network_file label_dim slot_num non_trainable_params_file",
    "4.3": "non_trainable_params_file use_static_table use_context_stream",
    "23.05": "use_static_table embedding_cache_type use_context_stream fuse_embedding_table "
    "use_hctr_cache_implementation",
    "24.06": "use_hctr_cache_implementation init_ec enable_pagelock fp8_quant",
}
"""Release -> parameters of InferenceParams in their places, the last of which has no successor in most of them."""


@pytest.mark.parametrize(("release", "names"), POSITIONS.items(), indirect=["release"])
def test_the_places_of_a_model_s_parameters(release: str, names: str) -> None:
    """Finding M9: a positional call has the parameters of its release."""
    (form,) = forms()["InferenceParams"]
    places = [one.name for one in form.positional(form.release())]
    wanted = names.split()
    assert places[:5] == ["model_name", "max_batchsize", "hit_rate_threshold", "dense_model_file", "sparse_model_files"]
    first = places.index(wanted[0])
    assert places[first : first + len(wanted)] == wanted
    if release not in ("3.9",):
        assert places[-1] == wanted[-1]


DATABASE_POSITIONS = {
    ("3.3", "VolatileDatabaseParams"): "num_partitions max_get_batch_size max_set_batch_size overflow_margin",
    ("3.6", "VolatileDatabaseParams"): "algorithm num_partitions max_get_batch_size max_set_batch_size "
    "refresh_time_after_fetch overflow_margin",
    ("4.2", "VolatileDatabaseParams"): "num_node_connections max_get_batch_size max_set_batch_size "
    "refresh_time_after_fetch overflow_margin",
    ("4.3", "VolatileDatabaseParams"): "num_node_connections max_batch_size enable_tls",
    ("3.6", "PersistentDatabaseParams"): "read_only max_get_batch_size max_set_batch_size update_filters",
    ("24.06", "PersistentDatabaseParams"): "read_only max_batch_size initialize_after_startup update_filters",
}


@pytest.mark.parametrize(("release", "call"), DATABASE_POSITIONS, indirect=["release"])
def test_the_places_of_a_database_s_parameters(release: str, call: str) -> None:
    (form,) = forms()[call]
    places = " ".join(one.name for one in form.positional(form.release()))
    assert DATABASE_POSITIONS[release, call] in places


def test_a_model_without_a_device() -> None:
    """Finding M4: `device_id` is 0 since 3.4; required parameters follow it by position."""
    assert InferenceParams(**LEAST).device_id == 0
    names = ["model_name", "max_batchsize", "hit_rate_threshold", "dense_model_file", "sparse_model_files"]
    by_place = InferenceParams(*[LEAST[name] for name in names], 1, False, 0.5, True)
    assert (by_place.device_id, by_place.i64_input_key) == (1, True)
    assert "device_id" in inspect.signature(InferenceParams).parameters


def test_names_of_databases() -> None:
    """Finding M9: `backend`, the keyword of all releases; bounds of reads and writes; algorithms."""
    disk = PersistentDatabaseParams(backend=hugectr.DatabaseType_t.rocks_db, path="/data")
    assert disk == PersistentDatabaseParams(hugectr.DatabaseType_t.rocks_db, "/data")
    older = VolatileDatabaseParams(
        algorithm=hugectr.DatabaseHashMapAlgorithm_t.phm,
        refresh_time_after_fetch=True,
        max_get_batch_size=10,
        max_set_batch_size=20,
    )
    assert older.max_batch_size == 20
    assert hugectr.UpdateSourceParams(max_receive_buffer_size=3).max_receive_buffer_size == 3
    params = InferenceParams(**LEAST, enable_pagelock=True, fp8_quant=True)
    assert params.embedding_cache_type is hugectr.inference.EmbeddingCacheType_t.Dynamic
    assert EmbeddingCacheType_t.stochastic.name == "stochastic"


def test_attributes_of_databases_may_be_set() -> None:
    """As the documentation of all releases sets them."""
    params = VolatileDatabaseParams()
    params.max_get_batch_size = 7
    params.overflow_policy = POLICIES.evict_oldest
    assert (params.max_batch_size, params.overflow_policy.name) == (7, "evict_oldest")
    source = UpdateSourceParams()
    source.type = hugectr.UpdateSourceType_t.kafka_message_queue
    assert source.type.name == "kafka_message_queue"
    params.overflow_margin = 100
    with pytest.raises(WrongInputError):
        params.type = hugectr.DatabaseType_t.multi_process_hash_map


@pytest.mark.parametrize(
    ("kind", "kinds", "share"),
    [("Redis", [RedisSpec], 1.0), ("RocksDB", [RocksDBSpec], 1.0), ("Hierarchy", [RedisSpec, RocksDBSpec], 0.25)],
)
def test_databases_of_release_3_2(kind: str, kinds: list[type], share: float) -> None:
    """Finding M9: `db_type` with an address, a path, and the share of rows in Redis."""
    params = InferenceParams(
        **LEAST,
        db_type=hugectr.Database_t[kind],
        redis_ip="127.0.0.1:7003",
        rocksdb_path="/data/rocks",
        cache_size_percentage_redis=0.25,
    )
    tiers = tiers_of(params.volatile_db, params.persistent_db)
    assert [type(tier) for tier in tiers] == kinds
    assert tiers[0].load_share == share
    places = [tier.address if isinstance(tier, RedisSpec) else getattr(tier, "path", "") for tier in tiers]
    assert set(places) <= {"127.0.0.1:7003", "/data/rocks"}
    assert InferenceParams(**LEAST, db_type=hugectr.Database_t.Local).volatile_db is None


def test_databases_of_release_3_3() -> None:
    """The memory of the process and a server apart; 3.3.1 made one object of both."""
    memory = CPUMemoryDatabaseParams(
        hugectr.DatabaseType_t.hash_map, hugectr.CPUMemoryHashMapAlgorithm_t.stl, 4, 1_000, POLICIES.evict_oldest, 0.5
    )
    server = DistributedDatabaseParams(hugectr.DatabaseType_t.redis_cluster, "127.0.0.1:7003", "u", "p", 2, 300, 200)
    assert (memory.num_partitions, memory.overflow_margin, memory.overflow_resolution_target) == (4, 1_000, 0.5)
    for databases, chosen in (
        ({"cpu_memory_db": memory}, memory),
        ({"cpu_memory_db": memory, "distributed_db": DistributedDatabaseParams()}, memory),
        ({"distributed_db": DistributedDatabaseParams()}, None),  # 3.3 keeps rows in the process by default
        ({"cpu_memory_db": memory, "distributed_db": server}, server),
    ):
        params = InferenceParams(**LEAST, **databases)
        assert params.volatile_db == chosen
    (tier,) = tiers_of(params.volatile_db, params.persistent_db)
    assert isinstance(tier, RedisSpec)
    assert (tier.address, tier.num_partitions, server.max_batch_size) == ("127.0.0.1:7003", 2, 300)
    assert (server.overflow_policy, server.update_filters) == (POLICIES.evict_oldest, [".+"])


def test_a_value_that_is_set_is_not_undone_by_those_of_older_releases() -> None:
    databases = [CPUMemoryDatabaseParams(num_partitions=count) for count in (2, 3, 4)]
    params = InferenceParams(**LEAST, cpu_memory_db=databases[0])
    params.volatile_db = databases[1]
    params.hit_rate_threshold = 0.5
    assert params.volatile_db == databases[1]
    params.cpu_memory_db = databases[2]
    assert params.volatile_db == databases[2]
    server = VolatileDatabaseParams(num_partitions=2, max_get_batch_size=300)
    server.max_batch_size, server.num_partitions = 50, 0
    assert server.max_batch_size == 50
    assert server.num_partitions > 0
    server.max_get_batch_size = 20_000
    assert server.max_batch_size == 20_000


def test_one_default_for_all_tables() -> None:
    params = InferenceParams(**{**LEAST, "sparse_model_files": ["a", "b"], "default_value_for_each_table": [0.5]})
    assert [table.default for table in served_model(params, [4, 4]).tables] == [0.5, 0.5]
