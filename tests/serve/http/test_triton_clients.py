# SPDX-License-Identifier: Apache-2.0
"""Stock Triton clients over HTTP, as users have them: their defaults, compression, shared memory, every call."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

import terarec
from terarec.serve import InferenceSession, ServedModels
from terarec.spec import AccessSpec, ServingSpec
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun
from tests.serve.http.serving import served
from tests.waiting import wait_for

MODEL = "dlrm"


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with served(models) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with contextlib.closing(triton.InferenceServerClient(address)) as found:
        yield found


def arrays(records: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Columns as users of NumPy have them: NaN is a missing number."""
    numbers = {
        name: np.array([np.nan if value is None else value for value in records[name]], dtype=np.float32)
        for name in DENSE
    }
    return numbers | {name: np.array(records[name], dtype=object) for name in CATEGORICAL}


def inputs(records: dict[str, list[Any]], module: Any = triton, *, binary: bool = True) -> list[Any]:
    found = []
    for name, values in arrays(records).items():
        tensor = module.InferInput(name, list(values.shape), "FP32" if name in DENSE else "BYTES")
        tensor.set_data_from_numpy(values, binary_data=binary)
        found.append(tensor)
    return found


def test_questions_about_the_server(client: triton.InferenceServerClient, session: InferenceSession) -> None:
    version = str(session.step)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, version)
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["version"] == terarec.__version__
    metadata = client.get_model_metadata(MODEL)
    assert metadata["versions"] == [version]
    config = client.get_model_config(MODEL, version)
    assert [item["name"] for item in config["input"]] == [item["name"] for item in metadata["inputs"]]
    assert (config["max_batch_size"], config["output"][0]["data_type"]) == (1000, "TYPE_FP32")
    index = client.get_model_repository_index()
    assert index == [{"name": MODEL, "version": version, "state": "READY", "reason": ""}]
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings(MODEL) == client.get_trace_settings()
    assert client.get_log_settings()["log_file"] == ""


@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("binary", [True, False])
def test_scores_are_those_of_the_session(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, rows: int, binary: bool
) -> None:
    records = trained.records(0, rows)
    records |= {name: [value or 0 for value in records[name]] for name in DENSE}  # JSON of NumPy has no null

    answer = client.infer(MODEL, inputs(records, binary=binary), request_id="r-1")
    assert np.array_equal(answer.as_numpy("score"), session.predict(records))
    assert answer.get_response()["id"] == "r-1"
    assert answer.get_response()["model_version"] == str(session.step)
    assert answer.get_response()["parameters"] == {"step": session.step}


@pytest.mark.parametrize("rows", [2, 200])
def test_nan_is_missing(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, rows: int
) -> None:
    records = trained.records(0, rows)
    assert any(None in records[name] for name in DENSE)
    assert np.array_equal(client.infer(MODEL, inputs(records)).as_numpy("score"), session.predict(records))


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_numbers_of_16_bits_are_read_exactly(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, rows: int
) -> None:
    records = trained.records(0, rows)
    sent = {name: np.array([np.nan if x is None else x for x in records[name]]).astype(bfloat16) for name in DENSE}
    tensors = [tensor for tensor in inputs(records) if tensor.name() not in DENSE]
    for name, values in sent.items():
        tensors.append(triton.InferInput(name, [rows], "BF16"))
        tensors[-1].set_data_from_numpy(values)
    received = {name: [None if np.isnan(x) else float(x) for x in values] for name, values in sent.items()}
    assert np.array_equal(client.infer(MODEL, tensors).as_numpy("score"), session.predict(records | received))


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("wanted", [None, "gzip", "deflate"])
def test_bodies_may_be_compressed(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, sent: str, wanted: str
) -> None:
    records = trained.records(0, 500)
    answer = client.infer(
        MODEL, inputs(records), request_compression_algorithm=sent, response_compression_algorithm=wanted
    )
    assert np.array_equal(answer.as_numpy("score"), session.predict(records))


@pytest.mark.parametrize("binary", [True, False])
def test_an_output_may_be_chosen(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession, binary: bool
) -> None:
    records = trained.records(0, 5)
    wanted = [triton.InferRequestedOutput("score", binary_data=binary)]
    answer = client.infer(MODEL, inputs(records), outputs=wanted, model_version=str(session.step), timeout=10**8)
    assert np.array_equal(answer.as_numpy("score"), session.predict(records))


def test_requests_side_by_side(address: str, trained: TrainedRun, session: InferenceSession) -> None:
    with contextlib.closing(triton.InferenceServerClient(address, concurrency=4)) as client:
        pending = [client.async_infer(MODEL, inputs(trained.records(low, low + 3))) for low in range(12)]
        for low, answer in enumerate(pending):
            expected = session.predict(trained.records(low, low + 3))
            assert np.allclose(answer.get_result().as_numpy("score"), expected, rtol=0, atol=1e-6)


def test_the_client_of_asyncio(address: str, trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 400)

    async def call() -> np.ndarray:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata(MODEL))["name"] == MODEL
            answer = await client.infer(MODEL, inputs(records, triton_aio))
            return answer.as_numpy("score")

    assert np.array_equal(asyncio.run(call()), session.predict(records))


def test_statistics_count_requests(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    def counted() -> tuple[int, int]:
        (found,) = client.get_inference_statistics(MODEL)["model_stats"]
        return found["inference_stats"]["success"]["count"], found["inference_count"]

    before = counted()
    client.infer(MODEL, inputs(trained.records(0, 3)))
    wait_for(lambda: counted() == (before[0] + 1, before[1] + 3))  # the batch is counted after its answers
    assert client.get_inference_statistics()["model_stats"][0]["name"] == MODEL


def test_tensors_in_shared_memory(
    client: triton.InferenceServerClient, trained: TrainedRun, session: InferenceSession
) -> None:
    records = trained.records(0, 4)
    values = arrays(records)
    column = values["I1"].astype(np.float32)
    region = shm.create_shared_memory_region("terarec-in", "/terarec-test-in", column.nbytes)
    scores = shm.create_shared_memory_region("terarec-out", "/terarec-test-out", 64)
    try:
        shm.set_shared_memory_region(region, [column])
        client.register_system_shared_memory("in", "/terarec-test-in", column.nbytes)
        client.register_system_shared_memory("out", "/terarec-test-out", 64)
        assert {item["name"] for item in client.get_system_shared_memory_status()} == {"in", "out"}
        assert client.get_system_shared_memory_status("in")[0]["byte_size"] == column.nbytes
        sent = inputs(records)
        sent[0].set_shared_memory("in", column.nbytes)
        wanted = triton.InferRequestedOutput("score")
        wanted.set_shared_memory("out", 64, offset=16)
        client.infer(MODEL, sent, outputs=[wanted])
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory("in", "/terarec-test-in", column.nbytes)
        written = shm.get_contents_as_numpy(scores, np.float32, [16])[4:8].reshape(4, 1)
        assert np.array_equal(written, session.predict(records))
        client.unregister_system_shared_memory("in")
        with pytest.raises(InferenceServerException, match="Unable to find"):
            client.infer(MODEL, sent)
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(region)
        shm.destroy_shared_memory_region(scores)


def test_shared_memory_may_be_forbidden(models: ServedModels) -> None:
    with (
        served(models, ServingSpec(access=AccessSpec(shared_memory=False))) as server,
        contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{server.port}")) as client,
    ):
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.register_system_shared_memory("in", "/x", 4)


REFUSED = {
    "load": (lambda client: client.load_model(MODEL), "503", "explicit model load / unload is not allowed"),
    "unload": (lambda client: client.unload_model(MODEL), "503", "explicit model load / unload is not allowed"),
    "model": (lambda client: client.get_model_config("other"), "404", "not served here"),
    "cuda": (
        lambda client: client.register_cuda_shared_memory("gpu", b"handle", 0, 64),
        "400",
        "GPUs not supported",
    ),
    "key": (lambda client: client.register_system_shared_memory("a", "/../etc/passwd", 4), "400", "expected a name"),
    "no key": (lambda client: client.register_system_shared_memory("a", "/terarec-none", 4), "400", "unable to open"),
    "trace": (lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}), "501", "tracing"),
    "log file": (lambda client: client.update_log_settings({"log_file": "/tmp/x"}), "503", "can not be updated"),
    "log": (lambda client: client.update_log_settings({"log_verbose_level": "x"}), "400", "expected an integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_are_refused_as_triton_refuses_them(client: triton.InferenceServerClient, case: str) -> None:
    call, status, message = REFUSED[case]
    with pytest.raises(InferenceServerException, match=message) as caught:
        call(client)
    assert caught.value.status() == status


def test_sequences_and_classes_are_refused(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    sent = inputs(trained.records(0, 1))
    with pytest.raises(InferenceServerException, match="without state"):
        client.infer(MODEL, sent, sequence_id=7, sequence_start=True)
    with pytest.raises(InferenceServerException, match="classification is not supported"):
        client.infer(MODEL, sent, outputs=[triton.InferRequestedOutput("score", class_count=2)])
    none = triton.InferRequestedOutput("score")
    none._parameters["classification"] = 0  # as clients that are not Triton's may say it
    assert client.infer(MODEL, sent, outputs=[none]).as_numpy("score").shape == (1, 1)


def test_messages_of_the_log_may_be_chosen(client: triton.InferenceServerClient) -> None:
    before = client.get_log_settings()
    try:
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
        assert client.get_log_settings()["log_info"] is True
    finally:
        wanted = {name: value for name, value in before.items() if name not in ("log_file", "log_format")}
        assert client.update_log_settings(wanted) == before


def test_damaged_tensors_are_named(client: triton.InferenceServerClient, trained: TrainedRun) -> None:
    def changed(place: int, content: bytes) -> list[Any]:
        sent = inputs(trained.records(0, 2))
        sent[place]._raw_data = content
        sent[place]._parameters["binary_data_size"] = len(content)
        return sent

    for place, content, message in (
        (0, b"123", r"inputs\[0\].data: got 3 bytes, expected 8 for 2 elements of FP32"),
        (3, b"\x01\0\0\0a\x09\0\0\0b", r"inputs\[3\].data\[1\]: got fewer bytes"),
        (3, b"\x01\0\0\0a\x01\0\0\0bc", r"inputs\[3\].data: got 1 bytes behind the last of 2 elements"),
        (3, b"\x01\0\0\0a\x01\0\0\0\xff", r"inputs\[3\].data\[1\]: .*valid Unicode"),
        (0, np.array([1, np.inf], dtype=np.float32).tobytes(), r"column 'I1', row 1: got inf"),
    ):
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.infer(MODEL, changed(place, content))
        assert caught.value.status() == "400"


def test_missing_values_and_lists_can_be_said(models: ServedModels, trained: TrainedRun, address: str) -> None:
    """A further tensor says which elements are missing, whatever stands there."""
    records = trained.records(0, 200)
    session = models.get(MODEL).session
    sent = []
    for name in (*DENSE, *CATEGORICAL):
        is_number = name in DENSE
        values = (
            np.array([value or 7 for value in records[name]], dtype=np.int64)
            if is_number
            else np.array([value or "0" for value in records[name]], dtype=object)
        )
        tensor = triton.InferInput(name, [200], "INT64" if is_number else "BYTES")
        tensor.set_data_from_numpy(values)
        missing = triton.InferInput(f"{name}.missing", [200], "BOOL")
        missing.set_data_from_numpy(np.array([value in (None, "") for value in records[name]]))
        sent += [tensor, missing]
    expected = session.predict(
        records | {name: [None if x is None else x or 7 for x in records[name]] for name in DENSE}
    )
    with contextlib.closing(triton.InferenceServerClient(address)) as client:
        assert np.array_equal(client.infer(MODEL, sent).as_numpy("score"), expected)
        sent[1].set_data_from_numpy(np.zeros(200, dtype=np.bool_))
        wrong = triton.InferInput("I1.missing", [100], "BOOL")
        wrong.set_data_from_numpy(np.zeros(100, dtype=np.bool_))
        with pytest.raises(InferenceServerException, match=r"inputs\[1\].shape: got \[100\], expected \[200\]"):
            client.infer(MODEL, [sent[0], wrong, *sent[2:]])
        with pytest.raises(InferenceServerException, match="missing values of 'I1' without 'I1' itself"):
            client.infer(MODEL, sent[1:])
