# SPDX-License-Identifier: Apache-2.0
"""The configuration of parameter servers, ``ps.json``: every key, and what is wrong with a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from terarec.hugectr.inference import HPS
from terarec.hugectr.inference.parameter_server import cache_of, served_model, tiers_of
from terarec.hugectr.inference.server_file import read_parameter_server
from terarec.spec import CacheSpec, HostMemorySpec, OverflowSpec, RedisSpec, RocksDBSpec
from terarec.spec.parameter_server import TLSSpec
from tests.ps.redis_processes import needs_redis, running

MODEL: dict[str, Any] = {
    "model": "dcn",
    "sparse_files": ["a.model", "b.model"],
    "dense_file": "d.model",
    "network_file": "g.json",
    "num_of_worker_buffer_in_pool": 3,
    "num_of_refresher_buffer_in_pool": 2,
    "deployed_device_list": [0, 1],
    "max_batch_size": 128,
    "default_value_for_each_table": [0.5, -1],
    "maxnum_des_feature_per_sample": 13,
    "maxnum_catfeature_query_per_table_per_sample": [2, 26],
    "embedding_vecsize_per_table": [1, 16],
    "embedding_table_names": ["wide", "deep"],
    "refresh_delay": 1.5,
    "refresh_interval": 20,
    "hit_rate_threshold": 0.7,
    "gpucacheper": 0.4,
    "gpucache": True,
    "cache_refresh_percentage_per_iteration": 0.2,
    "label_dim": 1,
    "slot_num": 28,
    "use_static_table": False,
    "embedding_cache_type": "uvm",
    "use_context_stream": False,
    "use_hctr_cache_implementation": False,
    "init_ec": False,
    "thread_pool_size": 8,
    "fuse_embedding_table": False,
    "enable_pagelock": True,
    "fp8_quant": True,
}
VOLATILE: dict[str, Any] = {
    "type": "redis_cluster",
    "address": "127.0.0.1:7000,127.0.0.1:7001",
    "user_name": "me",
    "password": "secret",
    "num_partitions": 12,
    "allocation_rate": 1 << 20,
    "shared_memory_size": 1 << 30,
    "shared_memory_name": "memory",
    "shared_memory_auto_remove": False,
    "num_node_connections": 7,
    "max_batch_size": 1000,
    "enable_tls": True,
    "tls_ca_certificate": "ca",
    "tls_client_certificate": "crt",
    "tls_client_key": "key",
    "tls_server_name_identification": "host",
    "overflow_margin": 5000,
    "overflow_policy": "evict_oldest",
    "overflow_resolution_target": 0.6,
    "initialize_after_startup": True,
    "initial_cache_rate": 0.25,
    "cache_missed_embeddings": True,
    "update_filters": ["^hps_.+$"],
}
PERSISTENT: dict[str, Any] = {
    "type": "rocks_db",
    "path": "/data/rocks",
    "num_threads": 4,
    "read_only": True,
    "max_batch_size": 999,
    "initialize_after_startup": False,
    "update_filters": [".*"],
}
UPDATES: dict[str, Any] = {
    "type": "null",
    "brokers": "host:9092",
    "metadata_refresh_interval_ms": 1,
    "receive_buffer_size": 2,
    "poll_timeout_ms": 3,
    "max_batch_size": 4,
    "failure_backoff_ms": 5,
    "max_commit_interval": 6,
}
EVERYTHING: dict[str, Any] = {
    "supportlonglong": True,
    "fuse_embedding_table": True,
    "models": [MODEL],
    "volatile_db": VOLATILE,
    "persistent_db": PERSISTENT,
    "update_source": UPDATES,
}
LEAST: dict[str, Any] = {
    "supportlonglong": False,
    "models": [
        {
            "model": "dcn",
            "deployed_device_list": [0],
            "default_value_for_each_table": [0],
            "maxnum_catfeature_query_per_table_per_sample": [26],
            "embedding_vecsize_per_table": [4],
        }
    ],
}


def write(path: Path, data: object) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def test_every_key(tmp_path: Path) -> None:
    config = read_parameter_server(write(tmp_path / "ps.json", EVERYTHING))
    (params,) = config.inference_params_array
    assert tiers_of(config.volatile_db, config.persistent_db) == (
        RedisSpec(
            address="127.0.0.1:7000,127.0.0.1:7001",
            user="me",
            password="secret",
            num_partitions=12,
            num_connections=7,
            batch_rows=1000,
            tls=TLSSpec(ca_certificates="ca", certificate="crt", key="key", server_name="host"),
            overflow=OverflowSpec(max_rows=5000, evict="lru", keep=0.6),
            load_share=0.25,
            keeps_found=True,
        ),
        RocksDBSpec(path="/data/rocks", read_only=True, load_share=0.0),
    )
    assert cache_of(params) == CacheSpec(
        share=0.4, hit_rate_threshold=0.7, refresh_delay_seconds=1.5, refresh_seconds=20.0, refresh_share=0.2
    )
    model = served_model(params, config.embedding_vec_size["dcn"], config.emb_table_name["dcn"])
    assert [(table.name, table.width, table.default, table.source) for table in model.tables] == [
        ("wide", 1, 0.5, "a.model"),
        ("deep", 16, -1.0, "b.model"),
    ]
    found = params.values()
    assert (found["max_batchsize"], found["deployed_devices"], found["i64_input_key"]) == (128, [0, 1], True)
    assert found["embedding_cache_type"] is hugectr.EmbeddingCacheType_t.UVM


def test_defaults(tmp_path: Path) -> None:
    config = read_parameter_server(write(tmp_path / "ps.json", LEAST))
    (params,) = config.inference_params_array
    assert tiers_of(config.volatile_db, config.persistent_db) == (HostMemorySpec(),)
    assert cache_of(params) == CacheSpec(share=0.2, hit_rate_threshold=0.9, refresh_share=1.0)
    assert (params.max_batchsize, params.i64_input_key) == (64, False)
    assert config.emb_table_name == {"dcn": ["sparse_embedding0"]}


def changed(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `data` with another value at a path, or without it where that is None."""
    copy = json.loads(json.dumps(data))
    *parents, last = path.split(".")
    place = copy
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("models.0.deployed_device_list", None, "ps.json.models[0]: no deployed_device_list"),
        ("models.0.default_value_for_each_table", None, "ps.json.models[0]: no default_value_for_each_table"),
        ("models.0.embedding_vecsize_per_table", None, "ps.json.models[0]: no embedding_vecsize_per_table"),
        ("models.0.maxnum_catfeature_query_per_table_per_sample", None, "ps.json.models[0]: no maxnum"),
        ("models.0.sparse_files", ["a"], "ps.json.models[0].sparse_files: got 1"),
        ("models.0.embedding_cache_type", "lru", "ps.json.models[0].embedding_cache_type: got"),
        ("models.0.gpucache", "yes", "ps.json.models[0].gpucache: got"),
        ("models", {}, "ps.json.models: got"),
        ("models.0.max_batch_size", 0, "ps.json.models[0].max_batch_size: got"),
        ("volatile_db.type", "memory", "ps.json.volatile_db.type: got"),
        ("volatile_db.type", "multi_process_map", "ps.json.volatile_db: VolatileDatabaseParams: overflow_margin: got"),
        ("volatile_db.overflow_policy", "lru", "ps.json.volatile_db.overflow_policy: got"),
        ("update_source.type", "rabbit", "ps.json.update_source.type: got"),
        ("supportlonglong", 1, "ps.json.supportlonglong: got"),
    ],
)
def test_an_error_has_the_path_and_what_is_accepted(tmp_path: Path, path: str, value: object, where: str) -> None:
    file = write(tmp_path / "ps.json", changed(EVERYTHING, path, value))
    with pytest.raises(WrongInputError) as caught:
        read_parameter_server(file)
    assert str(caught.value).startswith(f"{tmp_path}/{where}")
    assert "expected" in str(caught.value) or "did you mean" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("no_such", "expected one of"),
        ("models.0.gpucachepr", "'gpucacheper'"),
        ("volatile_db.adress", "'address'"),
        ("persistent_db.pth", "'path'"),
        ("update_source.broker", "'brokers'"),
    ],
)
def test_an_unknown_key_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, hint: str
) -> None:
    """Finding M10: HugeCTR reads the keys that it knows."""
    expected = read_parameter_server(write(tmp_path / "ps.json", EVERYTHING))
    assert not caplog.records
    found = read_parameter_server(write(tmp_path / "ps.json", changed(EVERYTHING, path, 1)))
    assert found.inference_params_array == expected.inference_params_array
    (record,) = caplog.records
    assert repr(path.split(".")[-1]) in record.getMessage()
    assert hint in record.getMessage()


@pytest.mark.parametrize(("defaults", "expected"), [([0.5], [0.5, 0.0]), ([], [0, 0]), ([1, 2, 3], [1, 2])])
def test_missing_defaults_are_zeros_and_further_ones_are_cut(
    tmp_path: Path, defaults: list[float], expected: list[float]
) -> None:
    """Finding M10: one default for several tables, as the tests of `hps_torch` have it."""
    file = write(tmp_path / "ps.json", changed(EVERYTHING, "models.0.default_value_for_each_table", defaults))
    config = read_parameter_server(file)
    (params,) = config.inference_params_array
    assert params.default_value_for_each_table == expected
    model = served_model(params, config.embedding_vec_size["dcn"], config.emb_table_name["dcn"])
    assert [table.default for table in model.tables] == expected


def test_keys_of_older_and_newer_releases(tmp_path: Path) -> None:
    """Finding M10: both bounds of a batch, hash maps by algorithm, a queue's old bound, 8-bit floats."""
    older = {**VOLATILE, "type": "redis", "algorithm": "stl", "refresh_time_after_fetch": True}
    del older["max_batch_size"]
    older |= {"max_get_batch_size": 300, "max_set_batch_size": 200, "overflow_policy": "oldest"}
    data = {**EVERYTHING, "volatile_db": older, "update_source": {"type": "none", "max_receive_buffer_size": 7}}
    config = read_parameter_server(write(tmp_path / "ps.json", data))
    assert config.volatile_db is not None
    assert config.update_source is not None
    assert (config.volatile_db.max_batch_size, config.update_source.max_receive_buffer_size) == (300, 7)
    assert config.volatile_db.overflow_policy is hugectr.DatabaseOverflowPolicy_t.evict_oldest
    assert config.inference_params_array[0].fp8_quant


@pytest.mark.parametrize(
    ("databases", "volatile", "persistent"),
    [
        ({"volatile_db": {"num_partitions": 3}}, "parallel_hash_map", None),
        ({"volatile_db": {}, "persistent_db": {"type": "rocks"}}, "disabled", "rocks_db"),
        ({"cpu_memory_db": {"type": "hash_map"}, "distributed_db": {}}, "hash_map", None),
        ({"cpu_memory_db": {}, "distributed_db": {"type": "redis_cluster"}}, "redis_cluster", None),
        ({"volatile_db": {"type": "none"}, "persistent_db": {"type": "rocksdb"}}, "disabled", "rocks_db"),
    ],
)
def test_databases_without_a_type(
    tmp_path: Path, databases: dict[str, Any], volatile: str, persistent: str | None
) -> None:
    config = read_parameter_server(write(tmp_path / "ps.json", {**LEAST, **databases}))
    assert config.volatile_db is not None
    assert config.volatile_db.type.name == volatile
    assert (None if config.persistent_db is None else config.persistent_db.type.name) == persistent


def test_a_file_whose_server_is_off_keeps_rows_in_the_process(tmp_path: Path) -> None:
    assert read_parameter_server(write(tmp_path / "ps.json", {**LEAST, "distributed_db": {}})).volatile_db is None


def test_a_queue_without_a_type_is_kafka_up_to_4_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "ps.json", {**LEAST, "update_source": {"brokers": "host:9092"}})
    for release, kind in (("24.06", "null"), ("4.2", "kafka_message_queue")):
        monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", release)
        source = read_parameter_server(file).update_source
        assert source is not None
        assert source.type.name == kind


def test_two_models_of_one_name_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(WrongInputError):
        read_parameter_server(write(tmp_path / "ps.json", {**LEAST, "models": LEAST["models"] * 2}))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "ps.json").write_text("{")
    with pytest.raises(BrokenFileError):
        read_parameter_server(str(tmp_path / "ps.json"))
    with pytest.raises(FileCannotOpenError):
        read_parameter_server(str(tmp_path / "other.json"))


@pytest.mark.parametrize("spelling", ["hash_map", "hashmap", "hash", "map", "parallel_hash_map", "parallel_map"])
def test_a_server_of_a_file_in_memory(tmp_path: Path, spelling: str) -> None:
    keys = np.arange(50)
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    write_sparse_folder(tmp_path / "s.model", [SparseRows(keys, vectors)])
    data = changed(LEAST, "models.0.sparse_files", [str(tmp_path / "s.model")])
    data["volatile_db"] = {"type": spelling, "max_get_batch_size": 10, "max_set_batch_size": 20}
    hps = HPS(write(tmp_path / "ps.json", data))
    assert np.array_equal(hps.lookup(keys, "dcn", 0), vectors)
    hps.server.close()


@needs_redis
def test_a_server_of_a_file_in_redis_serves_after_a_restart_without_its_files(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    keys = np.arange(50)
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    write_sparse_folder(tmp_path / "s.model", [SparseRows(keys, vectors)])
    data = changed(LEAST, "models.0.sparse_files", [str(tmp_path / "s.model")])
    with running(tmp_path / "redis") as server:
        data["volatile_db"] = {"type": "redis", "address": server.address, "num_partitions": 3}
        hps = HPS(write(tmp_path / "ps.json", data))
        assert np.array_equal(hps.lookup(keys, "dcn", 0), vectors)
        hps.server.close()
        data["volatile_db"]["initialize_after_startup"] = False
        del data["models"][0]["sparse_files"]
        again = HPS(hps_json_config_file=write(tmp_path / "ps.json", data))
        assert np.array_equal(again.lookup(keys, "dcn", 0), vectors)
        again.server.close()
