# SPDX-License-Identifier: Apache-2.0
"""Triton's own clients, unchanged and with their defaults, on servers by both libraries."""

from __future__ import annotations

import asyncio
from queue import Queue
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from tritonclient import grpc as triton
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException, shared_memory

import terarec
from terarec.serve import InferenceSession
from terarec.serve.api import EXTENSIONS
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun
from tests.serve.grpc.conftest import tensors
from tests.waiting import PATIENCE


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("dlrm")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("dlrm", "99")


def test_metadata(client: triton.InferenceServerClient, session: InferenceSession) -> None:
    server = client.get_server_metadata()
    assert (server.name, server.version, tuple(server.extensions)) == ("terarec", terarec.__version__, EXTENSIONS)
    model = client.get_model_metadata("dlrm", as_json=True)
    assert (model["name"], model["versions"], model["platform"]) == ("dlrm", [str(session.step)], "terarec_dlrm")
    assert model["inputs"] == [
        *({"name": name, "datatype": "FP32", "shape": ["-1"]} for name in DENSE),
        *({"name": name, "datatype": "BYTES", "shape": ["-1"]} for name in CATEGORICAL),
    ]
    assert model["outputs"] == [{"name": "score", "datatype": "FP32", "shape": ["-1", "1"]}]


def test_config(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("dlrm").config
    assert (config.name, config.backend, config.max_batch_size) == ("dlrm", "terarec", 1000)
    assert [item.name for item in config.input] == DENSE + CATEGORICAL
    assert {item.data_type for item in config.input} == {11, 13}  # FP32 and strings
    assert config.HasField("dynamic_batching")


def test_statistics_count_requests(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    before = client.get_inference_statistics("dlrm").model_stats[0]
    client.infer("dlrm", tensors(trained.records(0, 7)))
    (after,) = client.get_inference_statistics("dlrm").model_stats
    assert after.inference_count - before.inference_count == 7
    assert after.inference_stats.success.count - before.inference_stats.success.count == 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert client.get_inference_statistics().model_stats[0].name == "dlrm"


def test_index(client: triton.InferenceServerClient, session: InferenceSession) -> None:
    (model,) = client.get_model_repository_index().models
    assert (model.name, model.version, model.state) == ("dlrm", str(session.step), "READY")


@pytest.mark.parametrize("count", [0, 1, 50])
def test_scores_are_those_of_the_session(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, count: int
) -> None:
    records = trained.records(0, count)
    answer = client.infer("dlrm", tensors(records), request_id="r-1")
    assert np.array_equal(answer.as_numpy("score"), session.predict(records))
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r-1", "dlrm", str(session.step))
    assert response.parameters["step"].int64_param == session.step


def test_numbers_of_16_bits(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    records = trained.records(0, 5)
    sent = {name: np.array([value or 0 for value in records[name]]).astype(bfloat16) for name in DENSE}
    inputs = tensors({name: values for name, values in records.items() if name not in DENSE})
    for name, values in sent.items():
        inputs.append(triton.InferInput(name, [5], "BF16"))
        inputs[-1].set_data_from_numpy(values)
    expected = session.predict(records | {name: values.astype(float).tolist() for name, values in sent.items()})
    assert np.array_equal(client.infer("dlrm", inputs).as_numpy("score"), expected)


def test_outputs_versions_and_parameters(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    records = trained.records(3, 5)
    answer = client.infer(
        "dlrm",
        tensors(records),
        model_version=str(session.step),
        outputs=[triton.InferRequestedOutput("score")],
        priority=1,
        timeout=30_000_000,
        parameters={"note": "x", "share": 0.5, "flag": True},
    )
    assert np.array_equal(answer.as_numpy("score"), session.predict(records))


def test_requests_at_the_same_time(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    for start in range(40):
        client.async_infer(
            "dlrm",
            tensors(trained.records(start, start + 1 + start % 3)),
            lambda result, error: answers.put((result, error)),
            request_id=str(start),
        )
    for _ in range(40):
        result, error = answers.get(timeout=PATIENCE)
        assert error is None
        start = int(result.get_response().id)
        expected = session.predict(trained.records(start, start + 1 + start % 3))
        np.testing.assert_allclose(result.as_numpy("score"), expected, rtol=1e-5)


def test_compression(client: triton.InferenceServerClient, trained: TrainedRun, address: str) -> None:
    del address
    answer = client.infer("dlrm", tensors(trained.records(0, 20)), compression_algorithm="gzip")
    assert answer.as_numpy("score").shape == (20, 1)


def test_a_stream_answers_in_the_order_of_its_requests(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(200):
        model = "other" if number == 60 else "dlrm"
        client.async_stream_infer(
            model,
            tensors(trained.records(number, number + 2)),
            request_id=str(number),
            enable_empty_final_response=number % 2 == 0,
        )
    for number in range(200):
        result, error = answers.get(timeout=PATIENCE)
        if number == 60:
            assert "model 'other'" in error.message()
            continue
        response = result.get_response()
        assert response.id == str(number)
        assert response.parameters["triton_final_response"].bool_param
        expected = session.predict(trained.records(number, number + 2))
        np.testing.assert_allclose(result.as_numpy("score"), expected, rtol=1e-5)
    client.stop_stream()


def test_a_stream_may_end_with_the_status_of_an_error(
    client: triton.InferenceServerClient, trained: TrainedRun
) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"})
    client.async_stream_infer("dlrm", tensors(trained.records(0, 1)))
    client.async_stream_infer("other", tensors(trained.records(0, 1)))
    result, error = answers.get(timeout=PATIENCE)
    assert error is None
    assert result.as_numpy("score").shape == (1, 1)
    _, error = answers.get(timeout=PATIENCE)
    assert error.status() == "StatusCode.NOT_FOUND"
    client.stop_stream()


def test_the_client_for_asyncio(address: str, trained: TrainedRun, session: InferenceSession) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            records = [trained.records(start, start + 4) for start in range(8)]
            calls = [client.infer("dlrm", tensors(record, triton_aio.InferInput)) for record in records]
            for answer, record in zip(await asyncio.gather(*calls), records, strict=True):
                np.testing.assert_allclose(answer.as_numpy("score"), session.predict(record), rtol=1e-5)

            async def requests() -> Any:
                for number, record in enumerate(records):
                    inputs = tensors(record, triton_aio.InferInput)
                    yield {"model_name": "dlrm", "inputs": inputs, "request_id": str(number)}

            ids = [result.get_response().id async for result, _ in client.stream_infer(requests())]
            assert ids == [str(number) for number in range(len(records))]

    asyncio.run(run())


def test_tensors_in_shared_memory(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    records = trained.records(0, 6)
    numbers = np.array([[np.nan if value is None else value for value in records[name]] for name in DENSE], np.float32)
    source = shared_memory.create_shared_memory_region("numbers", "/terarec-test-numbers", numbers.nbytes)
    target = shared_memory.create_shared_memory_region("scores", "/terarec-test-scores", 64)
    try:
        shared_memory.set_shared_memory_region(source, [numbers])
        client.register_system_shared_memory("numbers", "/terarec-test-numbers", numbers.nbytes)
        client.register_system_shared_memory("scores", "/terarec-test-scores", 64)
        assert sorted(client.get_system_shared_memory_status().regions) == ["numbers", "scores"]
        inputs = tensors(records)
        for place, tensor in enumerate(inputs[: len(DENSE)]):
            tensor.set_shared_memory("numbers", 24, offset=24 * place)
        output = triton.InferRequestedOutput("score")
        output.set_shared_memory("scores", 24)
        answer = client.infer("dlrm", inputs, outputs=[output])
        assert list(answer.get_output("score").shape) == [6, 1]
        assert answer.get_output("score").parameters["shared_memory_byte_size"].int64_param == 24
        scores = shared_memory.get_contents_as_numpy(target, np.float32, [6, 1])
        assert np.array_equal(scores, session.predict(records))
        client.unregister_system_shared_memory("numbers")
        with pytest.raises(InferenceServerException, match="Unable to find system shared memory region"):
            client.infer("dlrm", inputs)
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions
    finally:
        shared_memory.destroy_shared_memory_region(source)
        shared_memory.destroy_shared_memory_region(target)


def test_settings(client: triton.InferenceServerClient) -> None:
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert client.get_log_settings().settings["log_error"].bool_param
    client.update_log_settings({"log_info": False, "log_verbose_level": 0})
    with pytest.raises(InferenceServerException) as caught:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_call_has_a_timeout(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("dlrm", tensors(trained.records(0, 500)), client_timeout=1e-5)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (lambda client: client.get_model_metadata("other"), "NOT_FOUND", "model 'other'"),
        (lambda client: client.get_model_metadata("dlrm", "99"), "NOT_FOUND", "model 'dlrm': has no version '99'"),
        (lambda client: client.get_model_config("other"), "NOT_FOUND", "model 'other'"),
        (lambda client: client.get_inference_statistics("other"), "NOT_FOUND", "model 'other'"),
        (lambda client: client.infer("other", []), "NOT_FOUND", "model 'other'"),
        (lambda client: client.infer("dlrm", []), "INVALID_ARGUMENT", "column 'I1': missing"),
        (lambda client: client.load_model("other"), "UNAVAILABLE", "failed to load 'other': explicit model load"),
        (lambda client: client.unload_model("dlrm"), "UNAVAILABLE", "failed to unload 'dlrm'"),
        (
            lambda client: client.register_system_shared_memory("x", "/../etc/passwd", 8),
            "INVALID_ARGUMENT",
            "shared memory region 'x'",
        ),
        (
            lambda client: client.register_cuda_shared_memory("x", b"eA==", 0, 8),
            "INVALID_ARGUMENT",
            "cuda shared memory",
        ),
        (
            lambda client: client.infer("dlrm", [], sequence_id=5, sequence_start=True),
            "UNIMPLEMENTED",
            "parameters.sequence_id",
        ),
    ],
)
def test_errors_are_triton_s(client: triton.InferenceServerClient, call: Any, code: str, message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call(client)
    assert caught.value.status() == f"StatusCode.{code}"
    assert caught.value.message().startswith(message)
    assert "\n" not in caught.value.message()


def test_a_wrong_input_is_named(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    inputs = tensors(trained.records(0, 2))
    inputs[2] = triton.InferInput("I3", [2], "BYTES")
    inputs[2].set_data_from_numpy(np.array([b"1", b"2"], dtype=np.object_))
    with pytest.raises(InferenceServerException, match=r"inputs\[2\]\.datatype: got BYTES for 'I3'"):
        client.infer("dlrm", inputs)
    inputs = tensors(trained.records(0, 1001))
    with pytest.raises(InferenceServerException, match="got 1001 records, expected at most 1000") as caught:
        client.infer("dlrm", inputs)
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
