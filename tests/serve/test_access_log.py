# SPDX-License-Identifier: Apache-2.0
"""The access log: a line for each call of both transports, shares, rotation, full disks, readers that stand still."""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient import grpc as triton

from terarec.errors import ConfigError
from terarec.serve import ServedModels
from terarec.serve.access_log import AccessLog, check_access_log
from terarec.serve.api import InferenceApi
from terarec.serve.calls import Call
from terarec.serve.metrics import Metrics
from terarec.spec import AccessSpec, ServingSpec, WatchingSpec
from tests.errors import at
from tests.serve.conftest import TrainedRun
from tests.serve.grpc.conftest import serving, tensors
from tests.serve.http.serving import served
from tests.waiting import PATIENCE, wait_for

TOKEN = "a-token-that-no-log-may-have"


@contextlib.contextmanager
def log_to(path: Path | str, share: float = 1.0) -> Iterator[AccessLog]:
    with AccessLog(WatchingSpec(access_log=str(path), access_log_share=share)) as log:
        yield log


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(path: str = "/v2") -> Call:
    made = Call(method="GET", path=path)
    made.end(200)
    return made


def test_a_line_says_what_was_asked_and_how_it_was_answered(
    models: ServedModels, trained: TrainedRun, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    begun = datetime.now(UTC)
    (tmp_path / "tokens").write_text(TOKEN)
    spec = ServingSpec(access=AccessSpec(token_file=str(tmp_path / "tokens")))
    with log_to(path) as log, served(models, spec, [log]) as server:
        with httpx.Client(
            base_url=server.url, timeout=PATIENCE, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as client:
            records = trained.records(0, 2)
            inputs = [
                {"name": name, "datatype": "FP32" if name[0] == "I" else "BYTES", "shape": [2], "data": values}
                for name, values in records.items()
            ]
            answer = client.post("/v2/models/dlrm/infer", json={"id": "u7", "inputs": inputs})
            assert answer.status_code == 200
            inputs[0]["data"] = ["secret-value", 1]
            assert client.post("/v2/models/dlrm/infer", json={"inputs": inputs}).status_code == 400
            assert client.get("/v2/models/nothing?token=x").status_code == 404
            assert client.post("/v2").status_code == 405
        assert httpx.post(f"{server.url}/v2/models/dlrm/infer", json={}).status_code == 401
        with server.connect() as raw:
            raw.sendall(b"no request\r\n\r\n")
            assert raw.recv(4096).startswith(b"HTTP/1.1 400")
    scored, refused, missing, method, token, malformed = lines_of(path)
    assert begun - timedelta(seconds=1) < datetime.fromisoformat(scored["time"]) < datetime.now(UTC)
    assert scored["client"] == "127.0.0.1"
    assert (scored["method"], scored["path"], scored["status"]) == ("POST", "/v2/models/dlrm/infer", 200)
    assert (scored["model"], scored["version"], scored["id"]) == ("dlrm", answer.json()["model_version"], "u7")
    assert (scored["step"], scored["records"], scored["reason"]) == (answer.json()["parameters"]["step"], 2, None)
    assert scored["received_bytes"] == len(answer.request.content)
    assert scored["sent_bytes"] == len(answer.content)
    stages = [scored[name] for name in ("queue_us", "workflow_us", "infer_us")]
    assert all(time > 0 for time in stages)
    assert sum(stages) < scored["duration_us"] < 1e6 * PATIENCE
    assert (refused["status"], refused["reason"]) == (400, "invalid")
    assert (missing["path"], missing["status"], missing["reason"]) == ("/v2/models/nothing", 404, "not_found")
    assert (method["status"], method["reason"]) == (405, "method_not_allowed")
    assert (token["status"], token["reason"]) == (401, "unauthenticated")
    assert (malformed["method"], malformed["status"], malformed["reason"]) == (None, 400, "malformed")
    text = path.read_text()
    assert not any(value in text for value in (TOKEN, "secret-value", *map(str, records["C1"])))


@pytest.mark.parametrize("library", ["grpcio", "native"])
def test_calls_of_grpc_are_logged(models: ServedModels, trained: TrainedRun, tmp_path: Path, library: str) -> None:
    path = tmp_path / "access.jsonl"
    with (
        log_to(path) as log,
        serving(InferenceApi(models, calls=[log]), grpc_library=library) as address,
        contextlib.closing(triton.InferenceServerClient(address)) as client,
    ):
        inputs = tensors(trained.records(0, 3))
        client.infer("dlrm", inputs, request_id="g1")
        with pytest.raises(triton.InferenceServerException):
            client.infer("nothing", inputs)
        assert client.is_server_live()
        answers: list[Any] = []
        is_answered = threading.Event()

        def take(result: Any, error: Any) -> None:
            answers.append(error)
            if len(answers) == 2:
                is_answered.set()

        client.start_stream(take)
        client.async_stream_infer("dlrm", inputs, request_id="s1")
        client.async_stream_infer("nothing", inputs)
        assert is_answered.wait(PATIENCE)
        client.stop_stream()
    lines = lines_of(path)
    scored = next(line for line in lines if line.get("id") == "g1")
    assert (scored["method"], scored["status"], scored["records"]) == ("ModelInfer", "OK", 3)
    assert scored["path"] == "/inference.GRPCInferenceService/ModelInfer"
    assert scored["model"] == "dlrm"
    assert scored["step"] is not None
    assert 0 < scored["infer_us"] < scored["duration_us"]
    assert scored["received_bytes"] > 3 * 13 * 4
    assert scored["sent_bytes"] > 0
    found = sorted((line["method"], line["status"], line["reason"]) for line in lines if line is not scored)
    assert found == [
        ("ModelInfer", "NOT_FOUND", "not_found"),
        ("ModelStreamInfer", "NOT_FOUND", "not_found"),
        ("ModelStreamInfer", "OK", None),
        ("ServerLive", "OK", None),
    ]


def test_a_share_of_the_calls_is_logged(tmp_path: Path) -> None:
    with log_to(tmp_path / "log", 0.25) as log:
        for _ in range(4000):
            log.finish(call())
    assert 800 < len(lines_of(tmp_path / "log")) < 1200  # 5 standard deviations are 137


def test_a_file_that_is_renamed_is_made_anew_and_one_that_is_cut_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with log_to(path) as log:
        log.finish(call("/1"))
        wait_for(path.read_text)
        path.rename(tmp_path / "log.1")
        log.finish(call("/2"))
        wait_for(lambda: path.exists() and path.read_text())
        os.truncate(path, 0)  # logrotate's copytruncate
        log.finish(call("/3"))
    assert [line["path"] for line in lines_of(tmp_path / "log.1")] == ["/1"]
    assert [line["path"] for line in lines_of(path)] == ["/3"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_logged_once_and_counted(
    models: ServedModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "terarec"), log_to(path) as log, served(models, None, [log]) as server:
        for count in (1, 2):
            assert httpx.get(f"{server.url}/v2").status_code == 200
            wait_for(lambda count=count: log.counts().lost["write_error"] == count)
        assert httpx.get(f"{server.url}/v2").status_code == 200
        assert (
            'terarec_sink_lost_total{reason="write_error",sink="access_log"} '
            in httpx.get(f"{server.url}/metrics").text
        )
        # The disk has room again.
        path.unlink()
        before = log.counts().written
        assert httpx.get(f"{server.url}/v2").status_code == 200
        wait_for(lambda: log.counts().written > before)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "access_log: [Errno 28] No space left on device"
    ]
    assert lines_of(path)[-1]["path"] == "/v2"


def test_lines_that_come_faster_than_they_are_written_are_counted(tmp_path: Path, models: ServedModels) -> None:
    """A pipe that nobody reads: calls do not wait, and the log is closed all the same."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with log_to(pipe) as log:
            for _ in range(60_000):
                log.finish(call("/" + "x" * 400))
            assert log.counts().lost["queue_full"] > 0
        counts = log.counts()
        assert counts.written + sum(counts.lost.values()) == 60_000
        assert counts.lost["write_error"] > 0
        text = Metrics(models, None, [log]).text().decode()
        assert f'terarec_sink_written_total{{sink="access_log"}} {float(counts.written)}' in text
    finally:
        os.close(reader)


def test_the_request_of_a_client_that_left_is_logged(models: ServedModels, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with log_to(path) as log, served(models, None, [log]) as server:
        with server.connect() as raw:
            raw.sendall(b"POST /v2/models/dlrm/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        wait_for(lambda: lines_of(path))
    (line,) = lines_of(path)
    assert (line["status"], line["reason"], line["received_bytes"]) == (None, "client_left", 1)


def test_a_file_that_cannot_be_opened_is_an_error_before_anything_is_loaded(tmp_path: Path) -> None:
    spec = WatchingSpec(access_log=str(tmp_path / "nothing" / "log"))
    with pytest.raises(ConfigError, check=at("WatchingSpec.access_log", "No such file or directory")):
        check_access_log(spec)
    with pytest.raises(ConfigError, check=at("WatchingSpec.access_log_share")):
        replace(spec, access_log_share=0.0)
