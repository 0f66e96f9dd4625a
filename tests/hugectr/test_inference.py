# SPDX-License-Identifier: Apache-2.0
"""Serving in the interface of every release: scores, files, caches, parameter servers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.cli.inspect_model import describe_graph_file
from terarec.errors import DataNotFoundError
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, IllegalCallError, WrongInputError
from terarec.hugectr.inference import (
    HPS,
    CreateEmbeddingCache,
    CreateInferenceSession,
    CreateParameterServer,
    InferenceModel,
    InferenceParams,
    InferenceSession,
    ParameterServer,
    ParameterServerConfig,
    PersistentDatabaseParams,
    VolatileDatabaseParams,
)
from terarec.metrics import AUC
from terarec.serve.executor_file import graph_executors_file, this_machine
from terarec.spec.serving import EXECUTOR_NAMES
from tests.hugectr import families
from tests.hugectr.planted import Planted, write_norm
from tests.hugectr.scripts import ADAM, Layer, embed, layer, model, to_loss
from tests.serve.counted_executor import count_batches

STEPS, BATCH, SAMPLES = 30, 100, 400
TABLES = ["wide", "deep"]


class Saved:
    """A trained model of two sparse inputs, its files, and its probabilities of the evaluation data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = Planted(SAMPLES, seed=1)
        self.valid = write_norm(folder / "valid", self.data)
        train = write_norm(folder / "train", Planted(4_000))
        made = families.wide_deep(train, self.valid, optimizer=ADAM, batchsize=BATCH, batchsize_eval=BATCH)
        made.fit(max_iter=STEPS, display=0, eval_interval=0)
        made.graph_to_json(str(folder / "graph.json"))
        made.save_params_to_files(str(folder / "m"), STEPS)
        parts = []
        for _ in range(SAMPLES // BATCH):
            made.eval()
            parts.append(made._compiled("test").evaluation.predictions["label"].numpy().copy())
        self.scores = np.concatenate(parts)
        self.graph = str(folder / "graph.json")
        self.dense = str(folder / f"m_dense_{STEPS}.model")
        self.sparse = [str(folder / f"m{number}_sparse_{STEPS}.model") for number in range(2)]
        keys = self.data.keys.T + 20 * np.arange(4)  # as write_norm keeps slots apart
        self.keys = keys

    def params(self, **changes: object) -> InferenceParams:
        given = {
            "model_name": "wdl",
            "max_batchsize": BATCH,
            "hit_rate_threshold": 1.0,
            "dense_model_file": self.dense,
            "sparse_model_files": self.sparse,
            "use_gpu_embedding_cache": True,
            "cache_size_percentage": 0.5,
            "i64_input_key": True,
            **changes,
        }
        return InferenceParams(**given)

    def request(self, start: int, stop: int) -> tuple[list[float], list[int], list[int]]:
        """Dense numbers, keys table by table, and their row pointers."""
        dense = self.data.dense[start:stop].reshape(-1).tolist()
        wide, deep = self.keys[start:stop, :1], self.keys[start:stop, 1:]
        ends = [*range(wide.size + 1), *range(deep.size + 1)]
        return dense, [*wide.reshape(-1).tolist(), *deep.reshape(-1).tolist()], ends


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("inference"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of g.json, m_dense_5.model and m0_sparse_5.model, of a linear model over one embedding of width 4."""
    folder = tmp_path_factory.mktemp("small")
    train = write_norm(folder / "train", Planted(500))
    made = model(train, train, optimizer=ADAM, batchsize=100)
    embed(made, "vectors", 4)
    layer(made, Layer.Reshape, "vectors", "flat", leading_dim=16)
    layer(made, Layer.Concat, "flat dense", "all")
    made = to_loss(made, "all")
    made.fit(max_iter=5, display=0, eval_interval=0)
    made.graph_to_json(str(folder / "g.json"))
    made.save_params_to_files(str(folder / "m"), 5)
    return folder


FILES = (hugectr.DataReaderType_t.Norm, hugectr.Check_t.Sum)


def test_a_session_scores_requests_as_the_model_does(saved: Saved) -> None:
    session = CreateInferenceSession(saved.graph, saved.params())
    for start, stop in ((0, 1), (5, 105), (300, 300)):
        scores = session.predict(*saved.request(start, stop))
        assert isinstance(scores, list)
        assert np.abs(np.array(scores) - saved.scores[start:stop, 0]).max(initial=0) < 1e-6
    # As HugeCTR names their rows in Redis and RocksDB: both serve from one database.
    assert session._server is not None
    assert [table.name for table in session._server.model("wdl").tables] == TABLES
    session.close()


def test_a_model_scores_files(saved: Saved) -> None:
    model = InferenceModel(saved.graph, saved.params())
    scores = model.predict(SAMPLES // BATCH, saved.valid, *FILES)
    assert scores.shape == (SAMPLES, 1)
    assert np.abs(scores - saved.scores).max() < 1e-6
    found = model.evaluate(
        num_batches=SAMPLES // BATCH, source=saved.valid, data_reader_type=FILES[0], check_type=FILES[1]
    )
    expected = AUC().update(torch.from_numpy(saved.scores), torch.from_numpy(saved.data.label)).compute()
    assert abs(found - expected) < 1e-6
    assert np.abs(model.check_out_tensor("sum") - saved.scores[-BATCH:]).max() < 1e-6
    assert model.check_out_tensor("deep").shape == (BATCH, 3, 8)
    # Data starts over at its end.
    assert np.array_equal(model.predict(1 + SAMPLES // BATCH, saved.valid, *FILES)[-BATCH:], scores[:BATCH])
    model.close()


def test_a_session_has_one_score_a_sample_of_files(saved: Saved) -> None:
    """Finding M1: as the tests of `inference_correctness` compare them, `predictions - truth` of [n] and [n]."""
    session = CreateInferenceSession(saved.graph, saved.params())
    predictions = session.predict(
        num_batches=SAMPLES // BATCH, source=saved.valid, data_reader_type=FILES[0], check_type=FILES[1]
    )
    difference = predictions - saved.scores[:, 0]
    assert difference.shape == (SAMPLES,)
    assert np.abs(difference).max() < 1e-6
    found = session.evaluate(np.int64(SAMPLES // BATCH), saved.valid, *FILES)
    expected = AUC().update(torch.from_numpy(saved.scores), torch.from_numpy(saved.data.label)).compute()
    assert abs(found - expected) < 1e-6
    session.close()


def test_files_without_a_header_take_the_number_of_samples(saved: Saved, tmp_path: Path) -> None:
    """Finding M9: `num_samples` of a session, in the place that 3.7 on has it."""
    records = np.zeros((70, 8), np.int32)  # a label, 3 dense numbers and 4 keys
    records[:, 4:] = saved.keys[:70]
    records.tofile(tmp_path / "data.raw")
    session = CreateInferenceSession(saved.graph, saved.params(i64_input_key=False, max_batchsize=35))
    raw = (str(tmp_path / "data.raw"), hugectr.DataReaderType_t.Raw, hugectr.Check_t.Non, [])
    scores = session.predict(2, *raw, 70)
    ends = [*range(36), *range(3 * 35 + 1)]
    for batch in range(2):
        keys = saved.keys[35 * batch : 35 * (batch + 1)]
        columns = [*keys[:, 0].tolist(), *keys[:, 1:].reshape(-1).tolist()]
        expected = session.predict([0.0] * (3 * 35), columns, ends)
        assert np.allclose(scores[35 * batch : 35 * (batch + 1)], expected, atol=1e-6)
    for wrong in (lambda: session.predict(1, *raw), lambda: session.evaluate(1, *raw, num_sample=70)):  # type: ignore[call-arg]
        with pytest.raises(WrongInputError):
            wrong()
    session.close()


def test_an_executor_computes_the_layers(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by the file next to the graph, and shown by ``terarec inspect``."""
    sizes = count_batches(monkeypatch)
    graph = Path(shutil.copy(saved.graph, tmp_path / "graph.json"))
    with pytest.raises(DataNotFoundError):
        describe_graph_file(graph)
    sizes_chosen = [{"batch": 16, "executor": "onnxruntime", "seconds": {"onnxruntime": 0.1}}]
    choice = {**this_machine(), "sizes": sizes_chosen, "rejected": {}}
    content = {"format": "terarec.executors", "version": 1, "choices": [choice]}
    graph_executors_file(graph).write_text(json.dumps(content))
    session = CreateInferenceSession(str(graph), saved.params())
    sizes.clear()
    assert np.abs(np.array(session.predict(*saved.request(0, 7))) - saved.scores[:7, 0]).max() < 1e-6
    assert sizes == [7]
    assert np.abs(session.check_out_tensor("sum") - saved.scores[:7]).max() < 1e-6
    assert session.check_out_tensor("deep").shape == (7, 3, 8)
    session.close()
    (shown,) = describe_graph_file(graph)["executors"]
    assert (shown["batch"], shown["executor"], shown["onnxruntime_ms"]) == (16, "onnxruntime", 100.0)
    with pytest.raises(WrongInputError):
        saved.params(executor="tvm")
    mixed = saved.params(executor="onnxruntime", use_mixed_precision=True)
    with pytest.raises(WrongInputError):
        CreateInferenceSession(str(graph), mixed)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["measure", *EXECUTOR_NAMES[1:]])
def test_every_executor_scores_requests_and_files(saved: Saved, tmp_path: Path, executor: str) -> None:
    if executor in ("onnxruntime", "openvino"):
        pytest.importorskip(executor)
    graph = Path(shutil.copy(saved.graph, tmp_path / "graph.json"))
    model = InferenceModel(str(graph), saved.params(executor=executor))
    assert model.scorer.programs is not None
    assert np.abs(model.predict(SAMPLES // BATCH, saved.valid, *FILES) - saved.scores).max() < 1e-5
    assert np.abs(np.array(model.predict(*saved.request(0, 1))) - saved.scores[0]).max() < 1e-5
    assert graph_executors_file(graph).is_file() == (executor == "measure")
    model.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"use_gpu_embedding_cache": False},
        {"cache_size_percentage": 0.05},
        {"use_static_table": True},
        {"embedding_cache_type": hugectr.EmbeddingCacheType_t.UVM},
        {
            "volatile_db": VolatileDatabaseParams(
                hugectr.DatabaseType_t.hash_map, num_partitions=3, overflow_margin=1000
            )
        },
    ],
)
def test_caches_and_databases_change_no_score(saved: Saved, changes: dict[str, object]) -> None:
    session = CreateInferenceSession(saved.graph, saved.params(**changes))
    for start in (0, 100, 0):
        scores = session.predict(*saved.request(start, start + 100))
        assert np.abs(np.array(scores) - saved.scores[start : start + 100, 0]).max() < 1e-6
    session.refresh_embedding_cache()
    assert np.abs(np.array(session.predict(*saved.request(0, 100))) - saved.scores[:100, 0]).max() < 1e-6
    session.close()


def test_above_the_threshold_unknown_keys_get_the_default_vector_at_once(saved: Saved) -> None:
    half = saved.params(hit_rate_threshold=0.0, default_value_for_each_table=[0.0, 0.25])
    session = CreateInferenceSession(saved.graph, half)
    first = np.array(session.predict(*saved.request(0, 100)))
    for cache in session._caches:
        cache.wait()
    assert sum(cache.statistics().deferred for cache in session._caches) > 0
    assert np.abs(first - saved.scores[:100, 0]).max() > 1e-4
    # Half of the rows fit, so the others come and go.
    assert session.predict(*saved.request(0, 100))
    session.close()


def test_keys_as_floats(saved: Saved) -> None:
    """Finding N2: floats are keys as far as their type tells integers apart."""
    dense, keys, ends = saved.request(0, 7)
    session = CreateInferenceSession(saved.graph, saved.params())
    assert session.predict(dense, np.array(keys, np.float64), ends) == session.predict(dense, keys, ends)
    for wrong in (np.full(len(keys), 2**24, np.float32), [1.5] * len(keys)):
        with pytest.raises(WrongInputError) as caught:
            session.predict(dense, wrong, ends)
        assert caught.value.field == "embeddingcolumns"
    session.close()


def test_bags_of_any_length(small: Path) -> None:
    """Against the vectors of each bag, pooled one by one."""
    params = InferenceParams(
        "m", 8, 1.0, str(small / "m_dense_5.model"), [str(small / "m0_sparse_5.model")], 0, False, 0.5, True
    )
    session = CreateInferenceSession(model_config_path=str(small / "g.json"), inference_params=params)
    bags = [[0, 3], [], [45], [61, 62, 63], [7], [21, 22], [], [64]]  # of two samples, four slots each
    ends = np.cumsum([0, *map(len, bags)]).tolist()
    session.predict([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [key for bag in bags for key in bag], ends)
    vectors = session.check_out_tensor("vectors")
    folder = small / "m0_sparse_5.model"
    keys, rows = np.fromfile(folder / "key", np.int64), np.fromfile(folder / "emb_vector", np.float32).reshape(-1, 4)
    row_of = dict(zip(keys.tolist(), rows, strict=True))
    for number, bag in enumerate(bags):
        expected = np.sum([row_of[key] for key in bag], axis=0) if bag else np.zeros(4)
        assert np.allclose(vectors[number // 4, number % 4], expected, atol=1e-6)
    session.close()


def test_release_3_0(saved: Saved, tmp_path: Path) -> None:
    """Files of one stream, an activation in place of the loss, and the three objects of that release."""
    from terarec.formats.hugectr.weights import SparseFileLayout, SparseRows, open_sparse_folder, write_sparse_file

    for number, width in enumerate((1, 8)):
        chunks = open_sparse_folder(Path(saved.sparse[number]), width).chunks()
        rows = [SparseRows(chunk.keys, chunk.vectors) for chunk in chunks]
        write_sparse_file(tmp_path / f"{number}.model", SparseFileLayout(width, 8, False), rows)
    graph = json.loads(Path(saved.graph).read_text())
    layers = graph["layers"]
    assert layers[-1]["type"] == "BinaryCrossEntropyLoss"
    layers[-1] = {"name": "sigmoid", "type": "Sigmoid", "bottom": ["sum"], "top": "sigmoid"}
    clause = {
        "max_batchsize": BATCH,
        "hit_rate_threshold": 1.0,
        "dense_model_file": saved.dense,
        "sparse_model_file": [str(tmp_path / f"{number}.model") for number in range(2)],
        "input_key_type": "I64",
    }
    config = tmp_path / "wdl.json"
    config.write_text(json.dumps({"inference": clause, "layers": layers}))
    server = CreateParameterServer([str(config)], ["WDL"], True)
    for uses_cache in (True, False):
        cache = CreateEmbeddingCache(server, 0, uses_cache, 0.3, str(config), "WDL", True)
        session = InferenceSession(str(config), 0, cache)
        scores = session.predict(*saved.request(0, 100))
        assert np.abs(np.array(scores) - saved.scores[:100, 0]).max() < 1e-6
        assert session.predict(*saved.request(0, 3), True) == pytest.approx(scores[:3], abs=1e-6)
    server.close()


def test_release_3_0_takes_one_path_short_keys_and_its_defaults(small: Path, tmp_path: Path) -> None:
    """As HugeCTR's test of a DCN reads them: labels, dense numbers, keys and row pointers in four lines of text."""
    from terarec.formats.hugectr.weights import SparseFileLayout, SparseRows, open_sparse_folder, write_sparse_file

    chunks = open_sparse_folder(small / "m0_sparse_5.model", 4).chunks()
    rows = [SparseRows(chunk.keys, chunk.vectors) for chunk in chunks]
    write_sparse_file(tmp_path / "short.model", SparseFileLayout(4, 4, False), rows)
    layers = json.loads((small / "g.json").read_text())["layers"]
    layers[-1] = {"name": "sigmoid", "type": "Sigmoid", "bottom": layers[-1]["bottom"][:1], "top": "sigmoid"}
    clause = {
        "dense_model_file": str(small / "m_dense_5.model"),
        "sparse_model_file": str(tmp_path / "short.model"),
        "input_key_type": "I32",
    }
    config = tmp_path / "dcn.json"
    config.write_text(json.dumps({"inference": clause, "layers": layers}))

    samples = Planted(300, seed=2)
    keys = (samples.keys.T + 20 * np.arange(4)).reshape(-1)
    lines = [samples.label[:, 0], samples.dense.reshape(-1), keys, np.arange(len(keys) + 1)]
    text = tmp_path / "input.txt"
    text.write_text("\n".join(" ".join(str(value) for value in line.tolist()) for line in lines))
    _, dense, columns, ends = (line.split() for line in text.read_text().splitlines())
    request = list(map(float, dense)), list(map(int, columns)), list(map(int, ends))

    server = CreateParameterServer([str(config)], ["DCN"], False)
    cache = CreateEmbeddingCache(server, 0, True, 0.2, str(config), "DCN", False)
    session = InferenceSession(str(config), 0, cache)
    assert session.max_batchsize == 1024
    for lookups in cache.caches:
        lookups.wait()
    sparse = [str(small / "m0_sparse_5.model")]
    params = InferenceParams("m", 300, 1.0, str(small / "m_dense_5.model"), sparse, 0, False, 0.5, True)
    later = CreateInferenceSession(str(small / "g.json"), params)
    expected = later.predict(*request)
    # With the threshold of 0.5 keys that the cache lacks may get the default vector at first.
    for _ in range(3):
        scores = session.predict(*request)
        for lookups in cache.caches:
            lookups.wait()
    uncached = CreateEmbeddingCache(server, 0, False, 0.2, str(config), "DCN", False)
    assert np.allclose(InferenceSession(str(config), 0, uncached).predict(*request), expected, atol=1e-6)
    assert len(scores) == 300
    later.close()
    server.close()


def test_a_parameter_server_of_releases_3_2_to_3_4(saved: Saved) -> None:
    """Finding M9: `inference.ParameterServer`, its caches, and sessions that take one of them."""
    params = saved.params()
    server = ParameterServer("Other", [saved.graph], [params])
    for caches in (server.get_embedding_cache("wdl", 0), server.get_embedding_cache("wdl", device_id=0)):
        session = InferenceSession(saved.graph, params, caches)
        assert np.abs(np.array(session.predict(*saved.request(0, 100))) - saved.scores[:100, 0]).max() < 1e-6
    server.refresh_embedding_cache("wdl", 0)
    with pytest.raises(WrongInputError):
        server.get_embedding_cache("dlrm", 0)
    with pytest.raises(WrongInputError):
        ParameterServer("Other", [saved.graph], [])
    server.close()


def config_of(saved: Saved, **changes: object) -> ParameterServerConfig:
    given = {
        "emb_table_name": {"wdl": ["wide", "deep"]},
        "embedding_vec_size": {"wdl": [1, 8]},
        "max_feature_num_per_sample_per_emb_table": {"wdl": [1, 3]},
        "inference_params_array": [saved.params(default_value_for_each_table=[0.5, -1.0])],
        **changes,
    }
    return ParameterServerConfig(**given)


def test_hps_looks_keys_up(saved: Saved) -> None:
    """Finding M2: vectors are [n, D]."""
    hps = HPS(config_of(saved))
    folder = Path(saved.sparse[1])
    keys, rows = np.fromfile(folder / "key", np.int64), np.fromfile(folder / "emb_vector", np.float32).reshape(-1, 8)
    requested = np.concatenate([keys[::-1], [10**12]])
    found = hps.lookup(requested, "wdl", 1)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.concatenate([rows[::-1], np.full((1, 8), -1.0)]))
    assert hps.lookup(np.array([10**6], dtype=np.uint32), "wdl", 0, 0).tolist() == [[0.5]]
    hps.refresh_embedding_cache("wdl")
    for wrong in (
        lambda: hps.lookup(keys, "wdl", 2),
        lambda: hps.lookup(keys, "dlrm", 0),
        lambda: HPS(3),  # type: ignore[arg-type]
    ):
        with pytest.raises(WrongInputError):
            wrong()
    hps.server.close()


def test_what_does_not_fit_is_rejected(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(FileCannotOpenError):
        CreateInferenceSession(str(tmp_path / "none.json"), saved.params())
    with pytest.raises(FileCannotOpenError):
        CreateInferenceSession(saved.graph, saved.params(dense_model_file=str(tmp_path / "none.model")))
    with pytest.raises(BrokenFileError):
        CreateInferenceSession(saved.graph, saved.params(sparse_model_files=saved.sparse[::-1]))
    with pytest.raises(WrongInputError):
        CreateInferenceSession(saved.graph, saved.params(sparse_model_files=saved.sparse[:1]))
    disabled = VolatileDatabaseParams(hugectr.DatabaseType_t.disabled)
    memory = PersistentDatabaseParams(hugectr.DatabaseType_t.hash_map)
    with pytest.raises(WrongInputError):
        CreateInferenceSession(saved.graph, saved.params(volatile_db=disabled))
    with pytest.raises(WrongInputError):
        CreateInferenceSession(saved.graph, saved.params(persistent_db=memory))
    with pytest.raises(WrongInputError):
        config_of(saved, embedding_vec_size={"wdl": [1]})
    session = CreateInferenceSession(saved.graph, saved.params())
    with pytest.raises(IllegalCallError):
        session.check_out_tensor("deep")
    dense, keys, ends = saved.request(0, 4)
    for request in (
        (dense[:-1], keys, ends),
        (dense, keys[:-1], ends),
        (dense, [*keys, 1], ends),
        (dense, keys, ends[:-1]),
        (dense, keys, [1, *ends[1:]]),
        (dense, keys, [*ends[:2], 0, *ends[3:]]),
        ([float("nan"), *dense[1:]], keys, ends),
        (dense, ["a"], ends),
        saved.request(0, BATCH + 1),
        (dense, keys),
    ):
        with pytest.raises(WrongInputError):
            session.predict(*request)
    with pytest.raises(FileCannotOpenError):
        session.predict(1, str(tmp_path / "none.txt"), *FILES)
    with pytest.raises(WrongInputError):
        session.check_out_tensor("nothing")
    session.close()
