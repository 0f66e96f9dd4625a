# SPDX-License-Identifier: Apache-2.0
"""The HTTP form of the protocol: paths, statuses, one line for every mistake."""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import terarec
from terarec.batch import Batch
from terarec.errors import MissingDependencyError
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceSession, ServedModel, ServedModels
from terarec.serve.api import InferenceApi
from terarec.serve.protocol import UnavailableError
from tests.errors import at
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun
from tests.serve.http.serving import served
from tests.waiting import PATIENCE

MODEL = "/v2/models/dlrm"
INFER = f"{MODEL}/infer"

JOINED = 1e-6
"""Bound of what joining requests changes in a score: products of matrices are summed in another order."""


class Caller:
    """Sends requests to a server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE)

    def __call__(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self._client.request(method, path, **request)

    def rejected(self, method: str, path: str, status: int, where: str, problem: str = "", **request: Any) -> None:
        """Send a request that must end with `status` and the one line of an error at `where`.

        Args:
            method: HTTP method.
            path: Path of the request.
            status: HTTP status.
            where: Place of the error, `terarec.errors.TerarecError.where`; the protocol has the line alone.
            problem: Begin of the problem, such as the received value, where several errors have the same place.
            request: Arguments of `httpx`.
        """
        response = self(method, path, **request)
        answer = response.json()
        assert response.status_code == status
        assert list(answer) == ["error"]
        assert "\n" not in answer["error"]
        assert answer["error"].startswith(f"{where}: {problem}"), answer["error"]


@pytest.fixture(scope="module")
def url(models: ServedModels) -> Iterator[str]:
    with served(models) as server:
        yield server.url


@pytest.fixture
def call(url: str) -> Caller:
    return Caller(url)


def tensors(records: dict[str, list[Any]], *, column: bool = False) -> list[dict[str, Any]]:
    """`records` as the inputs of a request, of shape [B], or [B, 1] with `column`."""
    return [
        {
            "name": name,
            "shape": [len(values), 1] if column else [len(values)],
            "datatype": "FP32" if name in DENSE else "BYTES",
            "data": [[value] for value in values] if column else values,
        }
        for name, values in records.items()
    ]


def scores(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    return np.array(output["data"], dtype=np.float32).reshape(output["shape"])


def test_server_metadata(call: Caller) -> None:
    metadata = call("GET", "/v2").json()
    assert (metadata["name"], metadata["version"]) == ("terarec", terarec.__version__)
    assert "binary_tensor_data" in metadata["extensions"]


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"])
def test_health(call: Caller, path: str) -> None:
    assert call("GET", path).status_code == 200
    assert call("HEAD", path).status_code == 200


def test_model_metadata(call: Caller, session: InferenceSession) -> None:
    version = str(session.step)
    expected = {
        "name": "dlrm",
        "versions": [version],
        "platform": "terarec_dlrm",
        "inputs": [
            *({"name": name, "datatype": "FP32", "shape": [-1]} for name in DENSE),
            *({"name": name, "datatype": "BYTES", "shape": [-1]} for name in CATEGORICAL),
        ],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}],
    }
    assert call("GET", MODEL).json() == expected
    assert call("GET", f"{MODEL}/versions/{version}").json() == expected
    assert call("GET", f"{MODEL}/versions/{version}/ready").json() == {"name": "dlrm", "ready": True}


@pytest.mark.parametrize("column", [False, True])
def test_served_scores_are_those_of_the_session(
    call: Caller, trained: TrainedRun, session: InferenceSession, column: bool
) -> None:
    records = trained.records(0, 50)
    response = call("POST", INFER, json={"id": "r-1", "inputs": tensors(records, column=column)})
    assert np.array_equal(scores(response), session.predict(records))
    answer = response.json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("r-1", "dlrm", str(session.step))
    assert answer["outputs"][0]["name"] == "score"
    assert answer["outputs"][0]["datatype"] == "FP32"
    assert answer["outputs"][0]["shape"] == [50, 1]


def test_a_version_may_be_named(call: Caller, trained: TrainedRun, session: InferenceSession) -> None:
    request = {"inputs": tensors(trained.records(0, 2)), "outputs": [{"name": "score"}]}
    response = call("POST", f"{MODEL}/versions/{session.step}/infer", json=request)
    assert scores(response).shape == (2, 1)
    assert "id" not in response.json()


def test_integers_may_be_sent_as_integers(call: Caller, trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 5)
    inputs = [tensor | {"datatype": "INT64"} if tensor["name"] in DENSE else tensor for tensor in tensors(records)]
    assert np.array_equal(scores(call("POST", INFER, json={"inputs": inputs})), session.predict(records))


def test_no_record_gives_no_score(call: Caller, trained: TrainedRun) -> None:
    assert scores(call("POST", INFER, json={"inputs": tensors(trained.records(0, 0))})).shape == (0, 1)


def test_a_body_without_content_type_is_json(call: Caller, trained: TrainedRun) -> None:
    body = json.dumps({"inputs": tensors(trained.records(0, 1))}).encode()
    assert scores(call("POST", INFER, content=body)).shape == (1, 1)
    assert scores(
        call("POST", INFER, content=body, headers={"Content-Type": "application/json; charset=utf-8"})
    ).shape == (1, 1)


@pytest.mark.parametrize(
    ("method", "path", "status", "where", "problem"),
    [
        ("GET", "/v1", 404, "GET /v1", ""),
        ("GET", "/v2/", 404, "GET /v2/", ""),
        ("GET", "/v2/models/other", 404, "model 'other'", "not served here"),
        ("GET", "/v2/models/other/ready", 404, "model 'other'", "not served here"),
        ("POST", "/v2/models/other/infer", 404, "model 'other'", "not served here"),
        ("GET", f"{MODEL}/versions/0", 404, "model 'dlrm'", "has no version '0'"),
        ("POST", f"{MODEL}/versions/x/infer", 404, "model 'dlrm'", "has no version 'x'"),
        ("GET", INFER, 405, f"GET {INFER}", ""),
        ("POST", MODEL, 405, f"POST {MODEL}", ""),
        ("DELETE", "/v2", 405, "DELETE /v2", ""),
        ("POST", INFER, 400, "line 1 column 1", ""),
    ],
)
def test_a_wrong_address_is_reported(
    call: Caller, method: str, path: str, status: int, where: str, problem: str
) -> None:
    call.rejected(method, path, status, where, problem)


@pytest.mark.parametrize(
    ("headers", "where", "problem"),
    [
        (
            {"Content-Type": "application/x-www-form-urlencoded"},
            "Content-Type",
            "got 'application/x-www-form-urlencoded'",
        ),
        ({"Content-Type": "application/octet-stream"}, "Content-Type", "got 'application/octet-stream'"),
        ({"Content-Encoding": "br"}, "Content-Encoding", "got 'br'"),
    ],
)
def test_another_form_is_reported(call: Caller, headers: dict[str, str], where: str, problem: str) -> None:
    call.rejected("POST", INFER, 415, where, problem, content=b"{}", headers=headers)


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (lambda inputs: inputs.pop(2), "column 'I3'", "missing"),
        (lambda inputs: inputs.clear(), "column 'I1'", "missing"),
        (lambda inputs: inputs.append(inputs[0]), "inputs[9].name", "the input 'I1' occurs twice"),
        (lambda inputs: inputs[2].update(name="I99"), "inputs[2].name", "got 'I99'"),
        (lambda inputs: inputs[3].update(datatype="FP32", data=[1, 2]), "inputs[3].datatype", "got FP32 for 'C1'"),
        (
            lambda inputs: inputs[0].update(datatype="BYTES", data=["1", "2"]),
            "inputs[0].datatype",
            "got BYTES for 'I1'",
        ),
        (lambda inputs: inputs[1].update(shape=[1, 2]), "inputs[1].shape", "got [1, 2] for 'I2'"),
        (lambda inputs: inputs[1].update(shape=[], data=[1]), "inputs[1].shape", "got [] for 'I2'"),
        (lambda inputs: inputs[1].update(shape=[3]), "inputs[1].data", "got 2 elements"),
        (lambda inputs: inputs[1].update(shape=[3], data=[1, 2, 3]), "column 'I2'", "holds 3 values"),
        (lambda inputs: inputs[5].update(data=["a", 5]), "inputs[5].data[1]", "got 5"),
        (lambda inputs: inputs[3].update(data=["0", "xyz"]), "column 'C1', row 1", "got 'xyz'"),
        (lambda inputs: inputs.append(inputs[0] | {"name": "label"}), "inputs[9].name", "got 'label'"),
    ],
)
def test_a_wrong_record_is_reported(call: Caller, trained: TrainedRun, change: Any, where: str, problem: str) -> None:
    inputs = tensors(trained.records(0, 2))
    change(inputs)
    call.rejected("POST", INFER, 400, where, problem, json={"inputs": inputs})


def test_an_unknown_output_is_reported(call: Caller, trained: TrainedRun) -> None:
    request = {"inputs": tensors(trained.records(0, 1)), "outputs": [{"name": "logit"}]}
    call.rejected("POST", INFER, 400, "outputs[0].name", "got 'logit'", json=request)


@pytest.mark.parametrize("value", ["true", 1, None])
def test_what_is_to_be_binary_is_true_or_false(call: Caller, trained: TrainedRun, value: object) -> None:
    inputs = tensors(trained.records(0, 1))
    request = {"inputs": inputs, "parameters": {"binary_data_output": value}}
    call.rejected("POST", INFER, 400, "parameters.binary_data_output", "got", json=request)
    request = {"inputs": inputs, "outputs": [{"name": "score", "parameters": {"binary_data": value}}]}
    call.rejected("POST", INFER, 400, "outputs[0].parameters.binary_data", "got", json=request)


def test_an_encoding_with_weight_zero_is_not_used(call: Caller, trained: TrainedRun) -> None:
    request = {"inputs": tensors(trained.records(0, 300))}
    for accepted, used in (("gzip;q=0.00, deflate;q=0.1", "deflate"), ("gzip ; q = 0", None), ("gzip;q=0.01", "gzip")):
        answer = call("POST", INFER, json=request, headers={"Accept-Encoding": accepted})
        assert answer.headers.get("Content-Encoding") == used


def test_too_many_records_are_reported(call: Caller, trained: TrainedRun) -> None:
    request = {"inputs": tensors(trained.records(0, 1001))}
    call.rejected("POST", INFER, 413, "inputs[0].shape", "got 1001 records", json=request)


class Broken(torch.nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        raise RuntimeError(f"cannot score {batch.batch_size} records")


@pytest.mark.parametrize("is_users", [True, False])
def test_a_failed_model_is_one_line_for_the_client_and_logged_in_the_server(
    trained: TrainedRun, session: InferenceSession, is_users: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Finding P1: an exception of a user's model has its text and place; one of terarec's own has neither."""
    workflow = Workflow.load(trained.path / "dataset" / "workflow")
    model = Broken() if is_users else torch.nn.Linear(1, 1)  # which takes no batch
    broken = InferenceSession(model, workflow, session.run, workflow.dataset_spec(), step=1)
    with ServedModels() as models:
        models.install(ServedModel(broken, name="dlrm"))
        with served(models) as server:
            response = Caller(server.url)("POST", INFER, json={"inputs": tensors(trained.records(0, 2))})
    assert response.status_code == 500
    error = response.json()["error"]
    place = "RuntimeError: cannot score 2 records (test_api_routes.py:"
    assert error.startswith(place if is_users else "internal error: ")
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert logged.getMessage() == f"POST {INFER} failed"


def test_requests_at_once_get_their_own_answers(url: str, trained: TrainedRun, session: InferenceSession) -> None:
    bounds = [(start, start + 1 + start % 5) for start in range(40)]

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            requests = [{"id": str(low), "inputs": tensors(trained.records(low, high))} for low, high in bounds]
            return await asyncio.gather(*(client.post(INFER, json=request) for request in requests))

    for (low, high), response in zip(bounds, asyncio.run(send()), strict=True):
        assert response.json()["id"] == str(low)
        expected = session.predict(trained.records(low, high))
        np.testing.assert_allclose(scores(response), expected, rtol=0, atol=JOINED)


def test_workers_do_not_change_their_logs_one_by_one(models: ServedModels) -> None:
    api = InferenceApi(models, is_worker=True)
    assert api.log_settings({})["log_error"] is True
    with pytest.raises(UnavailableError, check=at("log settings", "several workers serve")):
        api.log_settings({"log_info": False})


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delitem(sys.modules, "terarec.serve.http.server")
    with pytest.raises(MissingDependencyError, check=at("uvloop", "terarec[serve]")):
        __import__("terarec.serve.http.server")
