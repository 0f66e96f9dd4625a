# SPDX-License-Identifier: Apache-2.0
"""Loads on the real server, over all protocols: every request is answered, and the figures add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.apps.bench_serve.bench import (
    ServingBench,
    file_records,
    grpc_bodies,
    http_bodies,
    list_columns,
    synthetic_records,
)
from terarec.apps.bench_serve.http_sender import HttpAddress
from terarec.apps.triton_models import raw_values
from terarec.cli.app import run
from terarec.errors import ConfigError
from terarec.serve import InferenceError, RunningServer
from terarec.serve.binary_codec import decode_binary_request
from terarec.serve.columns import ColumnReader
from terarec.serve.grpc.conversion import infer_request
from terarec.serve.grpc.messages import message_class
from terarec.serve.padding import plain_values
from terarec.serve.protocol import InferRequest, ModelMetadata, TensorMetadata
from terarec.serve.session import ColumnKind, InputColumn
from terarec.spec import ServingSpec
from terarec.spec.bench_serving import LoadSpec
from terarec.spec.dataset import MISSING_KEY
from tests.serve.conftest import TrainedRun, running, train_in
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train_in(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def server(trained: TrainedRun) -> Iterator[RunningServer]:
    with running(trained.path, ServingSpec(name="dlrm", port=0, grpc_port=0)) as server:
        yield server


def load(**changes: Any) -> LoadSpec:
    known = {"model": "dlrm", "concurrency": (2,), "seconds": 0.3, "warmup_seconds": 0.0, "timeout_seconds": PATIENCE}
    return LoadSpec(**known | changes)


# Closed loops of all protocols are those of the command line below, too.
@pytest.mark.parametrize("rates", [pytest.param((), marks=pytest.mark.slow), (50.0,)], ids=["closed", "open"])
def test_figures_of_all_protocols_add_up(server: RunningServer, rates: tuple[float, ...]) -> None:
    spec = load(protocols=("http", "json", "grpc"), sizes=(1, 5), rates=rates, bodies=3)
    bench = ServingBench(spec, server.url, f"127.0.0.1:{server.grpc_port}")
    cells = [cell for cell in bench.run() if cell.figures is not None]
    assert [cell.place for cell in cells] == list(range(6))
    assert not any(cell.errors for cell in cells)
    for cell in cells:
        found = cell.figures
        assert found is not None
        assert found.requests == found.server_requests > 0
        assert found.errors == 0
        assert found.records in (1, 5)
        stages = (found.queue_ms, found.compute_input_ms, found.compute_infer_ms, found.compute_output_ms)
        assert all(stage is not None and stage >= 0 for stage in stages)
        assert sum(stage or 0 for stage in stages) + (found.network_ms or 0) == pytest.approx(found.mean_ms)
        assert (found.network_ms or 0) > 0
        assert found.p50_ms <= found.p95_ms <= found.p99_ms <= found.p99_9_ms <= found.max_ms
        assert found.records_per_second == pytest.approx(found.records * found.requests_per_second)
        assert (found.clients, found.rate) == ((None, 50.0) if rates else (2, None))
    assert {(cell.figures.protocol, cell.figures.records) for cell in cells if cell.figures} == {
        (protocol, size) for protocol in spec.protocols for size in spec.sizes
    }


def test_processes_share_the_load(server: RunningServer) -> None:
    spec = load(protocols=("http", "grpc"), concurrency=(3,), processes=2, cores=(0,))
    for cell in ServingBench(spec, server.url, f"127.0.0.1:{server.grpc_port}").run():
        if cell.figures is not None:
            assert cell.figures.requests == cell.figures.server_requests > 0
            assert cell.errors == {}


def test_a_server_of_grpc_alone(server: RunningServer) -> None:
    bench = ServingBench(load(protocols=("grpc",)), None, f"127.0.0.1:{server.grpc_port}")
    (cell,) = (cell for cell in bench.run() if cell.figures is not None)
    assert cell.figures is not None
    assert cell.figures.requests == cell.figures.server_requests > 0
    with pytest.raises(ConfigError, match="'http' without the address"):
        ServingBench(load(), None, f"127.0.0.1:{server.grpc_port}")


@pytest.mark.slow
def test_errors_are_reported_with_their_reasons(server: RunningServer) -> None:
    # More records than the server takes.
    bench = ServingBench(load(protocols=("json", "grpc"), sizes=(65537,), bodies=1, concurrency=(1,)), server.url,
                         f"127.0.0.1:{server.grpc_port}")  # fmt: skip
    http, grpc = (cell for cell in bench.run() if cell.figures is not None)
    assert http.figures is not None
    assert http.figures.requests == 0
    assert http.figures.errors > 0
    (reason,) = http.errors
    assert reason.startswith("413: ")
    (reason,) = grpc.errors
    assert reason.startswith("RESOURCE_EXHAUSTED: ")


def test_an_unknown_model_or_server_is_reported(server: RunningServer) -> None:
    with pytest.raises(InferenceError, match="404: model 'other'"):
        ServingBench(load(model="other"), server.url)
    with pytest.raises(InferenceError, match="NOT_FOUND: model 'other'"):
        ServingBench(load(model="other", protocols=("grpc",)), None, f"127.0.0.1:{server.grpc_port}")


@pytest.mark.slow
def test_real_records_from_the_command_line(
    server: RunningServer, trained: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table(trained.records(0, 40)), tmp_path / "records.parquet")
    arguments = ["bench", "serve", server.url, "--grpc", f"127.0.0.1:{server.grpc_port}", "--model", "dlrm"]
    options = {
        "records": tmp_path / "records.parquet",
        "sizes": "1,7",
        "concurrency": "1,2",
        "protocols": "http,json,grpc",
        "seconds": 0.2,
        "warmup-seconds": 0.1,
        "bodies": 2,
        "csv": tmp_path / "loads.csv",
        "plot": tmp_path / "loads.svg",
    }
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert report["errors"] == {}
    assert len(report["figures"]) == 12
    assert all(row["requests"] == row["server_requests"] > 0 for row in report["figures"])
    assert "workflow" in err
    assert len((tmp_path / "loads.csv").read_text().splitlines()) == 13
    assert "grpc, 7 records: p50" in (tmp_path / "loads.svg").read_text()
    assert run(arguments) == 2  # the files are there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "URL: got none, expected the URL of a server, or --grpc HOST:PORT"),
        (["http://x", "--protocols", "ftp"], "--protocols: got 'ftp', expected some of http, json, grpc"),
        (["http://x", "--sizes", "0"], "--sizes: got [0], expected a list, each an integer from 1"),
        (["http://x", "--rates", "fast"], "--rates: got 'fast', expected numbers with commas between"),
        (["http://x", "--plot", "x.gif"], "--plot: got x.gif, expected a name that ends in .svg, .png, .pdf"),
        (["http://x", "--header", "a b=c"], "--header: got {'a b': 'c'}, expected names of letters"),
        (["http://x", "--header", "a=\u00e9"], "--header: got {'a': '\u00e9'}, expected names of letters"),
        (["http://x", "--header", "Content-Length=1"], "--header: got 'Content-Length', expected none of"),
        (["localhost:8000"], "URL: got 'localhost:8000', expected one such as http://127.0.0.1:8000"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"terarec: error: {message}")


def metadata(*inputs: tuple[str, str, tuple[int, ...]]) -> ModelMetadata:
    tensors = tuple(TensorMetadata(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    return ModelMetadata(name="m", versions=("1",), platform="p", inputs=tensors, outputs=())


def test_synthetic_records_follow_the_inputs() -> None:
    inputs = metadata(
        ("number", "FP32", (-1,)),
        ("id", "INT64", (-1, 1)),
        ("words", "BYTES", (-1, -1)),
        ("flags", "BOOL", (-1, 3)),
        ("fixed", "UINT8", (2, 2)),
    )
    make = synthetic_records(inputs, LoadSpec(list_length=5))
    tensors = {tensor.name: tensor for tensor in make(0, 50)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == {"number": (50,), "id": (50, 1), "words": (50, 5), "flags": (50, 3), "fixed": (2, 2)}
    assert all(len(word) == 8 for word in tensors["words"].data)
    assert 10 < len(set(tensors["words"].data)) < 250  # some are frequent
    again = {tensor.name: tensor for tensor in make(0, 50)}
    other = {tensor.name: tensor for tensor in make(1, 50)}
    assert tensors["words"].data == again["words"].data != other["words"].data
    assert np.array_equal(tensors["id"].data, again["id"].data)


def test_missing_values_and_lists_of_a_file_arrive_as_bytes() -> None:
    """Texts were padded with empty ones, and integers could not be sent."""
    kinds: dict[str, tuple[ColumnKind, int | None, str]] = {
        "price": ("number", 1, "FP32"),
        "shop": ("string", 1, "BYTES"),
        "user": ("integer", 1, "INT64"),
        "code": ("integer", 1, "INT32"),
        "tags": ("string", None, "BYTES"),
        "items": ("integer", None, "INT64"),
        "rates": ("number", None, "FP32"),
        "words": ("string", None, "BYTES"),
    }
    rows = {
        "price": [1.0, None],
        "shop": [None, "x"],
        "user": [None, 7],
        "code": [3, None],
        "tags": [["a", ""], ["b"]],
        "items": [[], [5, None]],
        "rates": [[0.5], [None, 2.0]],
        "words": [["a"], []],
    }
    inputs = metadata(*((name, kind, (-1,) if hot else (-1, -1)) for name, (_, hot, kind) in kinds.items()))
    request = InferRequest(inputs=tuple(file_records(inputs, pa.table(rows))(0, 2)))
    columns = [InputColumn(name=name, kind=kind, hotness=hot) for name, (kind, hot, _) in kinds.items()]
    address = HttpAddress("http://127.0.0.1:1")
    (message,) = grpc_bodies([request], load(), list_columns(inputs))
    (body,) = http_bodies([request], address, load(), list_columns(inputs), is_json=False)
    head, _, content = body.partition(b"\r\n\r\n")
    header_bytes = int(head.lower().split(b"inference-header-content-length: ")[1].split()[0])
    for found in (
        infer_request(message_class("ModelInferRequest").FromString(message)),
        decode_binary_request(content, header_bytes),
    ):
        read = ColumnReader(columns, max_batch=2)(found).columns
        assert plain_values(read["price"]) == [1.0, None]
        assert plain_values(read["shop"]) == ["", "x"]
        assert [None if value == MISSING_KEY else value for value in read["user"]] == [None, 7]
        assert {name: plain_values(read[name]) for name in ("code", "tags", "items", "rates", "words")} == {
            name: rows[name] for name in ("code", "tags", "items", "rates", "words")
        }


def test_inputs_of_triton_that_say_something_about_others_are_no_columns() -> None:
    inputs = metadata(
        ("price", "FP64", (-1, 1)),
        ("price.missing", "BOOL", (-1, 1)),
        ("tags", "BYTES", (-1, -1)),
        ("tags.lengths", "INT64", (-1, 1)),
        ("tags.missing", "BOOL", (-1, -1)),
        ("is.missing", "BOOL", (-1, 1)),
    )
    assert [tensor.name for tensor in synthetic_records(inputs, LoadSpec())(0, 3)] == ["price", "tags", "is.missing"]
    table = pa.table({"price": [1.0, None], "tags": [["a", None], ["b", ""]], "is.missing": [True, False]})
    made = {tensor.name: tensor for tensor in file_records(inputs, table)(0, 2)}
    assert made["tags.lengths"].shape == (2, 1)
    columns = [InputColumn(name="price", kind="number"), InputColumn(name="tags", kind="string", hotness=None)]
    arrays = {name: np.array(tensor.data).reshape(tensor.shape) for name, tensor in made.items()}
    price, tags = (
        raw_values(column, *(arrays.get(column.name + suffix) for suffix in ("", ".lengths", ".missing")))
        for column in columns
    )
    assert (price, tags) == ([1.0, None], [["a", None], ["b", ""]])
    http_bodies([InferRequest(inputs=tuple(made.values()))], HttpAddress("http://x"), load(), (), is_json=True)


def test_records_of_a_file_are_sent_in_turn() -> None:
    inputs = metadata(("price", "FP32", (-1,)), ("shop", "BYTES", (-1, 1)))
    table = pa.table({"price": [1.0, None, 3.0], "shop": ["a", "b", "c"], "more": [1, 2, 3]})
    make = file_records(inputs, table)
    (price, shop) = make(1, 2)
    assert (price.shape, list(price.data)) == ((2,), [3.0, 1.0])
    assert (shop.shape, list(shop.data)) == ((2, 1), ["c", "a"])
    assert list(make(0, 2)[0].data) == [1.0, None]
    with pytest.raises(ConfigError, match="no column 'price'"):
        file_records(inputs, table.select(["shop"]))
    with pytest.raises(ConfigError, match="no rows"):
        file_records(inputs, table.slice(0, 0))
