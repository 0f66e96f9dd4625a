# SPDX-License-Identifier: Apache-2.0
"""Rows of a queue of Kafka reach the tables of a parameter server, those that were sent before and after its start."""

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import terarec.hugectr as hugectr
from terarec.errors import StorageError
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.hugectr.errors import IllegalCallError, ServerUnreachableError, WrongInputError
from terarec.hugectr.inference import HPS, update_source
from terarec.ps import ParameterServer
from tests.errors import at
from tests.hugectr.planted import ROWS, Planted, write_norm
from tests.hugectr.scripts import build_dcn, norm_reader, solver
from tests.serve.update_servers import KafkaBroker, kafka_broker
from tests.waiting import wait_for

KEYS = np.arange(50)


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with kafka_broker() as running:
        yield running


def send(broker: KafkaBroker, topic: str, *contents: bytes, key: bytes | None = None, partition: int = 0) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address, "log_level": 0})
    for content in contents:
        producer.produce(topic, content, key=key, partition=partition)
    assert producer.flush(120) == 0


def message(rows: dict[int, float], width: int = 4) -> bytes:
    """A message as HugeCTR's trainer writes it, each vector of one value."""
    pairs = (struct.pack(f"<q{width}f", key, *[value] * width) for key, value in rows.items())
    return b"HCTR" + struct.pack("<I", 4 * width) + b"".join(pairs)


def server_file(folder: Path, brokers: str, model: str, **sections: dict[str, Any]) -> str:
    """Write a ps.json of a model with tables `a` and `b` of 50 rows of zeros."""
    files = []
    for table in ("a", "b"):
        write_sparse_folder(folder / f"{table}.model", [SparseRows(KEYS, np.zeros((50, 4), np.float32))])
        files.append(str(folder / f"{table}.model"))
    described = {
        "model": model,
        "sparse_files": files,
        "deployed_device_list": [0],
        "default_value_for_each_table": [0, 0],
        "maxnum_catfeature_query_per_table_per_sample": [1, 1],
        "embedding_vecsize_per_table": [4, 4],
        "embedding_table_names": ["a", "b"],
        "gpucache": True,
        "gpucacheper": 0.5,
        "hit_rate_threshold": 1.0,
    }
    source = {"type": "kafka", "brokers": brokers, "poll_timeout_ms": 50, "metadata_refresh_interval_ms": 100}
    data = {"supportlonglong": True, "models": [described], "update_source": source, **sections}
    (folder / "ps.json").write_text(json.dumps(data))
    return str(folder / "ps.json")


def first_values(hps: HPS, model: str, table: int, keys: NDArray[np.int64] = KEYS) -> list[float]:
    rows = hps.lookup(keys, model, table)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


def test_rows_that_were_sent_before_and_after_the_start(broker: KafkaBroker, tmp_path: Path) -> None:
    topic = broker.create("hps_et.m.a", partitions=2)
    send(broker, topic, message({}), message({3: 1.0, 4: 1.0}), message({3: 2.0}))
    send(broker, topic, message({5: 5.0, 1000: 6.0}), partition=1)
    hps = HPS(server_file(tmp_path, broker.address, "m"))
    # No wait: what was there is applied when the call returns.
    assert first_values(hps, "m", 0, np.array([2, 3, 4, 5, 1000])) == [0.0, 2.0, 1.0, 5.0, 6.0]
    assert first_values(hps, "m", 1) == [0.0] * 50
    # Rows that the cache on the device has are changed, too.
    send(broker, topic, message({3: 7.0}))
    wait_for(lambda: first_values(hps, "m", 0, np.array([3])) == [7.0])
    # A topic that comes later.
    send(broker, broker.create("hps_et.m.b"), message({9: 8.0}))
    wait_for(lambda: first_values(hps, "m", 1, np.array([9])) == [8.0])
    hps.server.close()


def test_other_messages_are_skipped_and_named_once(
    broker: KafkaBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = broker.create("hps_et.skips.a")
    send(broker, topic, b"", b"HCT", message({1: 1.0}, width=3), message({2: 1.0})[:-1], message({2: 1.0})[:-1])
    send(broker, topic, message({3: 1.0}), key=b"key")
    send(broker, topic, message({4: 1.0}))
    hps = HPS(server_file(tmp_path, broker.address, "skips"))
    assert first_values(hps, "skips", 0, np.array([1, 2, 3, 4])) == [0.0, 0.0, 0.0, 1.0]
    problems = [record.getMessage() for record in caplog.records if "hps_et.skips.a" in record.getMessage()]
    assert sum("a multiple of" in one for one in problems) == 1
    assert all("offset" in one and "skipped" in one for one in problems)
    hps.server.close()


@pytest.fixture(scope="module")
def filtered_topics(broker: KafkaBroker) -> None:
    for table in ("a", "b"):
        send(broker, broker.create(f"hps_et.filtered.{table}"), message({0: 1.0}))


@pytest.mark.parametrize(
    ("filters", "values"),
    [
        (["^hps_.+$"], [1.0, 1.0]),
        ([".+"], [1.0, 1.0]),
        (["filtered"], [1.0, 1.0]),
        ([r"^hps_et\.filtered\.a$"], [1.0, 0.0]),
        (["other"], [0.0, 0.0]),
        ([], [0.0, 0.0]),
    ],
)
@pytest.mark.usefixtures("filtered_topics")
def test_filters_choose_tables(broker: KafkaBroker, tmp_path: Path, filters: list[str], values: list[float]) -> None:
    volatile = {"type": "hash_map", "update_filters": filters}
    hps = HPS(server_file(tmp_path, broker.address, "filtered", volatile_db=volatile))
    assert [first_values(hps, "filtered", table, np.array([0]))[0] for table in (0, 1)] == values
    hps.server.close()


@pytest.mark.slow
def test_a_broker_that_is_not_there_yet(tmp_path: Path) -> None:
    with kafka_broker() as broker:
        broker.kill()
        hps = HPS(server_file(tmp_path, broker.address, "later"))
        assert first_values(hps, "later", 0) == [0.0] * 50
        broker.start()
        send(broker, broker.create("hps_et.later.a"), message({1: 3.0}))
        wait_for(lambda: first_values(hps, "later", 0, np.array([1])) == [3.0])
        hps.server.close()


@pytest.mark.parametrize(
    "error", [pytest.param(StorageError("disk", "is full"), marks=pytest.mark.slow), RuntimeError("odd")]
)
def test_a_table_that_takes_no_rows_keeps_no_other_waiting(
    broker: KafkaBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    model = f"full{type(error).__name__}"
    update, decode = ParameterServer.update, update_source.decode_message
    is_full, decoded = threading.Event(), list[bytes]()

    def update_some(self: ParameterServer, model: str, table: str, *rest: Any) -> None:
        if table == "a" and is_full.is_set():
            raise error
        update(self, model, table, *rest)

    def decode_counted(content: bytes, width: int) -> Any:
        decoded.append(content)
        return decode(content, width)

    monkeypatch.setattr(ParameterServer, "update", update_some)
    monkeypatch.setattr(update_source, "decode_message", decode_counted)
    is_full.set()
    a, b = (broker.create(f"hps_et.{model}.{table}") for table in ("a", "b"))
    send(broker, a, message({1: 1.0}))
    send(broker, b, message({1: 2.0}))
    hps = HPS(server_file(tmp_path, broker.address, model))
    assert [first_values(hps, model, table, np.array([1])) for table in (0, 1)] == [[0.0], [2.0]]
    send(broker, a, message({1: 3.0}), message({2: 3.0}))
    for value in (4.0, 5.0):
        send(broker, b, message({1: value}))
        wait_for(lambda value=value: first_values(hps, model, 1, np.array([1])) == [value])
    assert len(decoded) == 4  # no more of what cannot be applied
    is_full.clear()
    wait_for(lambda: first_values(hps, model, 0, np.array([1, 2])) == [3.0, 3.0])
    assert len(decoded) == 6
    assert len([record for record in caplog.records if "update source" in record.getMessage()]) == 1
    hps.server.close()


def test_patterns_that_are_none_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    volatile = {"type": "hash_map", "update_filters": ["("]}
    with pytest.raises(WrongInputError, check=at("update_filters", "regular expression")):
        HPS(server_file(tmp_path, "127.0.0.1:1", "m", volatile_db=volatile))


def test_a_trainer_sends_what_a_server_reads(broker: KafkaBroker, tmp_path: Path) -> None:
    sources = [write_norm(tmp_path / "train", Planted(2_000, seed=1))]
    keyset = tmp_path / "keyset"
    write_keyset(keyset, np.arange(4 * ROWS), 8)
    model = build_dcn(
        hugectr.Model(
            solver(repeat_dataset=False, kafka_brockers=broker.address, model_name="trained"),
            norm_reader(sources, sources[0], keyset=[str(keyset)]),
            hugectr.CreateOptimizer(update_type=hugectr.Update_t.LazyGlobal),
            hugectr.CreateETC(ps_types=[hugectr.TrainPSType_t.Staged], sparse_models=[str(tmp_path / "rows")]),
        )
    )
    model.fit(num_epochs=1, display=0, eval_interval=0)
    name = "embedding"
    broker.create(f"hps_et.trained.{name}", partitions=3)
    model.dump_incremental_model_2kafka()
    model.save_params_to_files(str(tmp_path / "end"))
    ((nothing, _),) = model.get_incremental_model()
    assert not len(nothing)

    described = {
        "model": "trained",
        "deployed_device_list": [0],
        "default_value_for_each_table": [0],
        "maxnum_catfeature_query_per_table_per_sample": [4],
        "embedding_vecsize_per_table": [8],
        "embedding_table_names": [name],
    }
    source = {"type": "kafka", "brokers": broker.address}
    data = {"supportlonglong": True, "models": [described], "update_source": source}
    (tmp_path / "ps.json").write_text(json.dumps(data))
    hps = HPS(str(tmp_path / "ps.json"))
    # A row of the folder that training wrote: keys as int64, vectors as float32 of width 8.
    keys = np.fromfile(tmp_path / "rows" / "key", np.int64)
    vectors = np.fromfile(tmp_path / "rows" / "emb_vector", np.float32).reshape(-1, 8)
    assert len(keys) == 4 * ROWS
    assert np.array_equal(hps.lookup(keys, "trained", 0), vectors)
    hps.server.close()


def test_rows_are_sent_again_where_the_broker_did_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")
    monkeypatch.setattr("terarec.hugectr.update_messages._TIMEOUT_SECONDS", 1.0)
    sources = [write_norm(tmp_path / "train", Planted(500, seed=1))]
    keyset = tmp_path / "keyset"
    write_keyset(keyset, np.arange(4 * ROWS), 8)

    def trained(**settings: object) -> hugectr.Model:
        model = build_dcn(
            hugectr.Model(
                solver(repeat_dataset=False, **settings),
                norm_reader(sources, sources[0], keyset=[str(keyset)]),
                hugectr.CreateOptimizer(update_type=hugectr.Update_t.LazyGlobal),
                hugectr.CreateETC(ps_types=[hugectr.TrainPSType_t.Staged], sparse_models=[str(tmp_path / "rows")]),
            )
        )
        model.fit(num_epochs=1, display=0, eval_interval=0)
        return model

    model = trained(kafka_brockers="127.0.0.1:1")
    with pytest.raises(ServerUnreachableError, check=at("dump_incremental_model_2kafka: kafka 127.0.0.1:1")):
        model.dump_incremental_model_2kafka()
    ((keys, _),) = model.get_incremental_model()
    assert len(keys) == 4 * ROWS
    with pytest.raises(IllegalCallError, check=at("dump_incremental_model_2kafka", "kafka_brockers")):
        trained().dump_incremental_model_2kafka()
