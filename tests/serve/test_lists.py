# SPDX-License-Identifier: Apache-2.0
"""The same records through every path to a score: lists, padding and missing values."""

import http.client
import json
import math
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tritonclient import http as triton_http
from tritonclient.utils import np_to_triton_dtype

from terarec.apps.triton import export_triton
from terarec.apps.triton_models import DATASET, PROGRAM, DenseStage, LookupStage, RunStage, WorkflowStage, raw_values
from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ops import Bucketize, Categorify, FillMissing, HashBucket, ListSlice, Normalize
from terarec.etl.workflow import Workflow
from terarec.ps import ParameterServer
from terarec.serve import (
    InferenceClient,
    InferenceError,
    InferenceSession,
    RunningServer,
    ServedTables,
    score_files,
    serve,
)
from terarec.serve.columns import ColumnReader
from terarec.serve.protocol import InferRequest, Tensor
from terarec.serve.session import InputColumn
from terarec.spec import (
    DynamicTablesSpec,
    LabelSpec,
    ParameterServerSpec,
    RunSpec,
    ServingSpec,
    SourceColumn,
    SourceSpec,
    TrainingSpec,
    TritonSpec,
    WatchingSpec,
    WideDeepSpec,
)
from terarec.spec.dataset import MISSING_KEY
from terarec.train.run import build
from tests.errors import at
from tests.params import examples
from tests.serve.conftest import running
from tests.waiting import PATIENCE

Records = dict[str, list[Any]]
TYPES = {
    "price": pa.float64(),
    "user": pa.int64(),
    "shop": pa.string(),
    "tags": pa.list_(pa.string()),
    "items": pa.list_(pa.int64()),
    "seen": pa.list_(pa.int64()),
    "sizes": pa.list_(pa.float64()),
}
TAGS, ITEMS = ["a", "b", "\u00fc", "unseen", "", None], [3, 2**53 + 1, -7, None, MISSING_KEY]


def lists_of(values: list[Any]) -> Any:
    return st.none() | st.lists(st.sampled_from(values), max_size=4)


RECORD = st.fixed_dictionaries(
    {
        "price": st.sampled_from([0.5, -2.0, None]),
        "user": st.sampled_from([1, 2**60 + 1, None, MISSING_KEY]),
        "shop": st.sampled_from(["x", "y", "", None]),
        "tags": lists_of(TAGS),
        "items": lists_of(ITEMS),
        "seen": lists_of(ITEMS),
        "sizes": lists_of([0.5, -2.0, None, math.nan]),
    }
)


def log(rows: int) -> pa.Table:
    generator = np.random.default_rng(5)

    def lists(values: list[Any]) -> list[Any]:
        return [[values[i] for i in generator.integers(0, len(values), generator.integers(0, 4))] for _ in range(rows)]

    records = {
        "price": generator.normal(size=rows).tolist(),
        "user": generator.choice([1, 2**60 + 1, 5], rows).tolist(),
        "shop": generator.choice(["x", "y", "z"], rows).tolist(),
        "tags": lists(["a", "b", "\u00fc", None]),
        "items": lists([3, 2**53 + 1, -7, None]),
        "seen": lists([3, 2**53 + 1, -7, 11, None]),
        "sizes": lists([0.5, -2.0, 7.0, None]),
    }
    table = pa.table({name: pa.array(values, TYPES[name]) for name, values in records.items()})
    return table.append_column("bought", pa.array(generator.integers(0, 2, rows)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on lists of texts, of ids, and of keys of a dynamic table."""
    root = tmp_path_factory.mktemp("lists")
    pq.write_table(log(300), root / "log.parquet")
    kinds = {"price": "number", "shop": "text", "tags": "text", "sizes": "number"}
    separators = dict.fromkeys(("tags", "items", "seen", "sizes"), "|")
    columns = tuple(
        SourceColumn(name=name, type=kinds.get(name, "integer"), separator=separators.get(name))  # type: ignore[arg-type]
        for name in (*TYPES, "bought")
    )
    workflow = Workflow(
        [
            FillMissing(columns=("price",), value=0.0),
            Normalize(columns=("price",)),
            ListSlice(columns=("tags", "seen", "sizes"), stop=4),
            Bucketize(columns=("sizes",), boundaries=(0.0, 1.0)),
            HashBucket(columns=("items",), buckets=50),
            ListSlice(columns=("items",), stop=4),
            Categorify(columns=("user", "shop", "tags")),
        ],
        source=SourceSpec(format="parquet", columns=columns),
        labels=[LabelSpec(name="bought")],
        dense=["price"],
        categorical=["user", "shop", "tags", "items", "sizes"],
        keys=["seen"],
        name="lists",
    )
    prepare(workflow, [root / "log.parquet"], root / "data")
    spec = RunSpec(
        data=str(root / "data"),
        model=WideDeepSpec(width=4, hidden=(8,), tables=DynamicTablesSpec()),
        training=TrainingSpec(batch_size=50, epochs=1, reader_threads=1),
    )
    build(spec, root / "run").fit()
    return root / "run"


@pytest.fixture(scope="module")
def session(run: Path) -> InferenceSession:
    return InferenceSession.open(run)


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[RunningServer]:
    servers: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(running: RunningServer) -> None:
        servers.append(running)
        is_ready.set()

    thread = threading.Thread(target=serve, args=(run, ServingSpec(name="lists", port=0), ready))
    thread.start()
    try:
        assert is_ready.wait(timeout=60)
        yield servers[0]
    finally:
        for running in servers:
            running.stop()
        thread.join(timeout=PATIENCE)


class TritonStages:
    """The stages of an exported repository, as Triton calls them."""

    def __init__(self, run: Path, repository: Path, session: InferenceSession) -> None:
        export_triton(run, repository, TritonSpec(form="ensemble"))
        self._inputs = session.inputs
        self._model = RunStage(session, {"bought": 1})  # the one model of a repository that is no ensemble
        self._workflow = WorkflowStage(repository / "terarec_workflow" / "1" / DATASET)
        self._server = ParameterServer(ParameterServerSpec())
        self._lookup = LookupStage(run, session.step, ServedTables(server=self._server))
        program = repository / "terarec_dense" / "1" / PROGRAM
        self._dense = cache(lambda vectors: DenseStage(program, ["dense", *vectors], ["bought"]))

    def close(self) -> None:
        self._server.close()

    def tensors(self, records: Records, *, says_missing: bool) -> dict[str, np.ndarray]:
        return (missing_tensors if says_missing else triton_tensors)(self._inputs, records)

    def predict(self, records: Records, *, says_missing: bool = False) -> np.ndarray:
        return self._model(self.tensors(records, says_missing=says_missing))["bought"]

    def predict_in_stages(self, records: Records, *, says_missing: bool = False) -> np.ndarray:
        encoded = self._workflow(self.tensors(records, says_missing=says_missing))
        vectors = self._lookup({name: keys for name, keys in encoded.items() if name != "dense"})
        return self._dense(tuple(vectors))({"dense": encoded["dense"], **vectors})["bought"]


def triton_tensors(columns: tuple[InputColumn, ...], records: Records) -> dict[str, np.ndarray]:
    """Raw records as a client of Triton sends them, which has no null."""
    fill = {"number": np.nan, "integer": MISSING_KEY, "string": ""}
    dtypes = {"number": np.float64, "integer": np.int64, "string": object}
    tensors = {}
    for column in columns:
        is_list = column.hotness != 1
        rows = [(value or []) if is_list else [value] for value in records[column.name]]
        width = max(map(len, rows)) + is_list  # one place more than the longest list needs
        filled = [[fill[column.kind] if v is None else v for v in row] for row in rows]
        padded = [row + [fill[column.kind]] * (width - len(row)) for row in filled]
        tensors[column.name] = np.array(padded, dtypes[column.kind])
        if is_list:
            tensors[f"{column.name}.lengths"] = np.array([[len(row)] for row in rows])
    return tensors


def missing_tensors(columns: tuple[InputColumn, ...], records: Records) -> dict[str, np.ndarray]:
    """Raw records as a client sends them that says beside each column what is missing there."""
    # Values that would be scored as such if nothing said that they are missing.
    fill = {"number": (1e6, np.float64), "integer": (3, np.int64), "string": ("a", object)}
    tensors = {}
    for column in columns:
        is_list = column.hotness != 1
        rows = [(value or []) if is_list else [value] for value in records[column.name]]
        width = max(map(len, rows)) + is_list
        padded = [row + [None] * (width - len(row)) for row in rows]
        value, dtype = fill[column.kind]
        tensors[column.name] = np.array([[value if v is None else v for v in row] for row in padded], dtype)
        tensors[f"{column.name}.missing"] = np.array([[v is None for v in row] for row in padded])
        # Else the padding says where lists end: NaN, an empty text and the lowest integer are items.
        if is_list and any(row and row[-1] is None for row in rows):
            tensors[f"{column.name}.lengths"] = np.array([[len(row)] for row in rows])
    return tensors


@pytest.fixture(scope="module")
def triton(run: Path, session: InferenceSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonStages]:
    stages = TritonStages(run, tmp_path_factory.mktemp("triton") / "repository", session)
    yield stages
    stages.close()


EDGES: list[dict[str, Any]] = [
    {
        "price": None,
        "user": None,
        "shop": "",
        "tags": ["", ""],
        "items": [MISSING_KEY],
        "seen": [MISSING_KEY],
        "sizes": [1.0, math.nan],
    },
    {
        "price": 0.5,
        "user": MISSING_KEY,
        "shop": None,
        "tags": [None, "a", None],
        "items": [None, 3],
        "seen": [3, None],
        "sizes": [math.nan],
    },
    {"price": 0.5, "user": 1, "shop": "x", "tags": None, "items": [], "seen": None, "sizes": [None, 0.5]},
]


def test_lists_are_the_same_in_served_records(run: Path, session: InferenceSession, tmp_path: Path) -> None:
    columns = {name: [record[name] for record in EDGES] for name in TYPES}
    watching = WatchingSpec(record_directory=str(tmp_path / "served"), record_share=1.0)
    with running(run, ServingSpec(name="lists", port=0, watching=watching)) as server:
        scores = InferenceClient(server.url, "lists").infer(columns)["score"][:, 0]
    score_files(session, [tmp_path / "served"], tmp_path / "scores.parquet")
    np.testing.assert_allclose(pq.read_table(tmp_path / "scores.parquet")["score"], scores, rtol=0, atol=1e-6)
    (file,) = (tmp_path / "served" / "lists").iterdir()
    table = pq.read_table(file)
    assert table["tags"].to_pylist() == [[None, None], [None, "a", None], []]
    assert table["items"].to_pylist() == [[None], [None, 3], []]
    assert table["user"].to_pylist() == [None, None, 1]


def scored_from_bytes(server: RunningServer, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The scores of a stock client that sends tensors as bytes."""
    inputs = []
    for name, values in tensors.items():
        inputs.append(triton_http.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)))
        inputs[-1].set_data_from_numpy(values)
    with triton_http.InferenceServerClient(f"{server.host}:{server.port}") as client:
        return np.asarray(client.infer("lists", inputs).as_numpy("score"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(24))
@example(records=EDGES)
@example(records=EDGES[:1])
@given(records=st.lists(RECORD, min_size=1, max_size=5))
def test_every_path_gives_the_same_scores(
    records: list[dict[str, Any]],
    session: InferenceSession,
    server: RunningServer,
    triton: TritonStages,
    tmp_path: Path,
) -> None:
    """Findings N7 and N8: lists, padding and missing values mean the same on every path."""
    columns = {name: [record[name] for record in records] for name in TYPES}
    table = pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})
    expected = np.concatenate([session.predict({name: [record[name]] for name in TYPES}) for record in records])
    client = InferenceClient(server.url, "lists")
    pq.write_table(table, tmp_path / "records.parquet")
    score_files(session, [tmp_path / "records.parquet"], tmp_path / "scores.parquet", replace=True)
    many = pa.concat_tables([table] * 130)
    many_lists = {name: values * 130 for name, values in columns.items()}
    scores = {
        "lists": session.predict(columns),
        "arrow": session.predict({name: table[name] for name in TYPES}),
        "table": session.predict(table),
        "many rows": session.predict({name: many[name] for name in TYPES})[-len(records) :],
        "many rows in bytes": scored_from_bytes(server, triton.tensors(many_lists, says_missing=True))[-len(records) :],
        "file": pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()[:, None],
        "client": client.infer(columns)["score"],
        "client, arrow": client.infer({name: table[name] for name in TYPES})["score"],
        "triton": triton.predict(columns),
        "triton, missing": triton.predict(columns, says_missing=True),
        "triton ensemble": triton.predict_in_stages(columns),
        "triton ensemble, missing": triton.predict_in_stages(columns, says_missing=True),
    }
    differences = {path: float(np.abs(found - expected).max()) for path, found in scores.items()}
    assert {path: difference for path, difference in differences.items() if difference > 2e-6} == {}


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def request(*others: dict[str, Any], tags: list[Any], width: int) -> dict[str, Any]:
    count = len(tags) // width if width else 1
    inputs = [
        tensor("price", "FP32", [count], [0.5] * count),
        tensor("user", "INT64", [count], [1] * count),
        tensor("shop", "BYTES", [count], ["x"] * count),
        tensor("tags", "BYTES", [count, width], tags),
        tensor("items", "INT64", [count, 0], []),
        tensor("seen", "INT64", [count, 0], []),
        tensor("sizes", "FP32", [count, 0], []),
    ]
    return {"inputs": [*inputs, *others]}


def post(server: RunningServer, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
    connection.request("POST", "/v2/models/lists/infer", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer.get("error") or answer["outputs"][0]["data"]


@pytest.mark.parametrize(
    ("tags", "lengths", "meant"),
    [
        (["a", None, None], None, ["a"]),
        ([None, "a", None], None, [None, "a"]),
        (["a", "", None], None, ["a", ""]),
        (["a", None, None], 2, ["a", None]),
        ([None, None, None], 3, [None] * 3),
        ([None, None, None], 0, []),
    ],
)
def test_padding_of_a_request(
    server: RunningServer, session: InferenceSession, tags: list[Any], lengths: int | None, meant: list[Any]
) -> None:
    """Finding N8: trailing nulls pad, unless the lengths say that they are items."""
    given_lengths = [] if lengths is None else [tensor("tags.lengths", "INT64", [1], [lengths])]
    records = {"price": [0.5], "user": [1], "shop": ["x"], "tags": [meant], "items": [[]], "seen": [[]], "sizes": [[]]}
    (score,) = post(server, request(*given_lengths, tags=tags, width=3))
    assert score == pytest.approx(float(session.predict(records)[0, 0]), abs=1e-6)


@pytest.mark.parametrize(
    ("lengths", "where"),
    [
        (tensor("tags.lengths", "INT64", [1], [3]), "inputs[7].data[0]"),
        (tensor("tags.lengths", "INT64", [1], [-1]), "inputs[7].data[0]"),
        (tensor("tags.lengths", "INT64", [1], [None]), "inputs[7].data[0]"),
        (tensor("tags.lengths", "INT64", [1], [1]), "inputs[3].data[1]"),
        (tensor("tags.lengths", "INT64", [2], [1, 2]), "inputs[7].data"),
        (tensor("tags.lengths", "FP32", [1], [2.0]), "inputs[7].datatype"),
        (tensor("tags.lengths", "INT64", [1, 2], [1, 2]), "inputs[7].shape"),
        (tensor("shop.lengths", "INT64", [1], [1]), "inputs[7].name"),
    ],
)
def test_lengths_that_do_not_fit(server: RunningServer, lengths: dict[str, Any], where: str) -> None:
    assert post(server, request(lengths, tags=["a", "b"], width=2)).startswith(f"{where}: ")


def test_the_client_names_a_value_that_is_no_list(server: RunningServer) -> None:
    columns = {name: [value] for name, value in EDGES[2].items()}
    with pytest.raises(ConfigError, check=at("column 'tags', row 0")):
        InferenceClient(server.url, "lists").infer({**columns, "tags": ["a|b"]})


def test_two_dimensional_arrays(server: RunningServer, session: InferenceSession) -> None:
    """Finding N7: the client takes the arrays that a session takes."""
    columns = {
        "price": np.array([[0.5], [np.nan]]),
        "user": np.array([1.0, np.nan]),
        "shop": np.array(["x", None], object),
        "tags": np.array([["a", "b"], ["", None]], object),
        "items": np.array([[3, -7], [MISSING_KEY, 3]]),
        "seen": pa.array([[3, 3], [None, 3]], pa.list_(pa.int64(), 2)),
        "sizes": np.array([[0.5, np.nan], [np.nan, np.nan]]),
    }
    scores = InferenceClient(server.url, "lists").infer(columns)["score"]
    assert np.abs(scores - session.predict(columns)).max() <= 1e-6
    with pytest.raises(InferenceError):
        InferenceClient(server.url, "lists").infer({"price": columns["price"]})


def test_the_client_rejects_rounded_ids(server: RunningServer) -> None:
    columns = {name: [value] for name, value in EDGES[2].items()}
    with pytest.raises(ConfigError, check=at("column 'user'")):
        InferenceClient(server.url, "lists").infer({**columns, "user": np.array([2**24], np.float32)})


def test_triton_lists_without_lengths() -> None:
    column = InputColumn(name="c", kind="integer", hotness=None)
    given_keys = np.array([[4, MISSING_KEY, 5, MISSING_KEY], [MISSING_KEY] * 4])
    assert raw_values(column, given_keys) == [[4, None, 5], []]
    assert raw_values(column, given_keys, np.array([[4], [1]])) == [[4, None, 5, None], [None]]


def test_triton_missing_values_of_lists_and_texts() -> None:
    keys = InputColumn(name="c", kind="integer", hotness=None)
    mask = np.array([[False, True, False, True], [True] * 4])
    assert raw_values(keys, np.full((2, 4), 7), None, mask) == [[7, None, 7], []]
    assert raw_values(keys, np.full((2, 4), 7), np.array([[4], [1]]), mask) == [[7, None, 7, None], [None]]
    texts = InputColumn(name="c", kind="string", hotness=None)
    encoded = np.full((2, 4, 1), ord("x"), np.uint8)  # UTF-8, whose mask is that of the texts and not of the bytes
    assert raw_values(texts, encoded, None, mask) == [["x", None, "x"], []]
    with pytest.raises(ConfigError, check=at("c.missing")):
        raw_values(keys, np.full((2, 4), 7), None, mask[:, :2])


@pytest.mark.parametrize(
    ("kind", "datatype", "values"),
    [
        ("number", "FP64", np.array([[1.0, np.nan, np.nan]])),
        ("integer", "INT64", np.array([[1, MISSING_KEY, MISSING_KEY]])),
        ("string", "BYTES", np.array([["a", "", ""]], object)),
    ],
)
def test_what_a_mask_says_is_there_is_an_item_on_both_sides(kind: Any, datatype: str, values: np.ndarray) -> None:
    column = InputColumn(name="c", kind=kind, hotness=None)
    mask = np.array([[False, False, True]])
    sent = Tensor(name="c", datatype=datatype, shape=(1, 3), data=values.reshape(-1).tolist())
    masked = Tensor(name="c.missing", datatype="BOOL", shape=(1, 3), data=mask.reshape(-1))
    (items,) = ColumnReader((column,), max_batch=1)(InferRequest(inputs=(sent, masked))).columns["c"]
    np.testing.assert_array_equal(raw_values(column, values, None, mask), [items])
    assert len(items) == 2
