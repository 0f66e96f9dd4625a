# SPDX-License-Identifier: Apache-2.0
"""Limits, tokens, encryption, clients that leave, and the end of a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, shared_memory

from terarec.errors import ConfigError
from terarec.serve import InferenceSession, ServedModel
from terarec.serve.api import InferenceApi
from terarec.serve.grpc import native_server
from terarec.serve.grpc.messages import METHODS, SERVICE
from terarec.serve.grpc.server import GrpcServer
from terarec.serve.grpc.service import GrpcService, PendingInference
from terarec.serve.models import ServedModels
from terarec.serve.shared_memory import SharedMemory
from terarec.spec import AccessSpec, BatchingSpec, ServingSpec
from terarec.spec.serving_options import ServedModelOptions
from tests.certificates import Certificates
from tests.serve.conftest import TrainedRun
from tests.serve.grpc.conftest import LIBRARIES, serving, tensors
from tests.serve.held_models import Gate, held_models
from tests.waiting import PATIENCE, wait_for

each_library = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture
def held(trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[InferenceApi, Gate]]:
    """A model that is held back."""
    options = ServedModelOptions(batching=BatchingSpec(max_batch_size=1))
    with held_models(trained.path, options, monkeypatch) as (models, gate):
        yield InferenceApi(models), gate


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises((InferenceServerException, grpc.RpcError)) as caught:
        call()
    error: Any = caught.value
    if isinstance(error, InferenceServerException):
        return str(error.status()).removeprefix("StatusCode.")
    return str(error.code().name)


def stream(
    client: triton.InferenceServerClient, inputs: list[Any], answers: Queue[tuple[Any, Any]], **options: Any
) -> Any:
    """Send one request in a stream of its own, and wait for what comes back first."""
    client.start_stream(lambda result, error: answers.put((result, error)), **options)
    with suppress(InferenceServerException):  # the stream may have ended by then
        client.async_stream_infer("dlrm", inputs)
    return answers.get(timeout=PATIENCE)


def begin(client: triton.InferenceServerClient, inputs: list[Any], answers: Queue[tuple[Any, Any]]) -> Any:
    return client.async_infer("dlrm", inputs, lambda result, error: answers.put((result, error)))


def begin_several(
    client: triton.InferenceServerClient, trained: TrainedRun, api: InferenceApi, count: int
) -> Queue[tuple[Any, Any]]:
    """Begin requests of one record; return once one of them is scored and the others wait."""
    answers: Queue[tuple[Any, Any]] = Queue()
    for number in range(count):
        begin(client, tensors(trained.records(number, number + 1)), answers)
    wait_for(lambda: api.models.get("dlrm").num_waiting == count - 1)
    return answers


@each_library
def test_a_client_that_leaves_is_dropped_from_the_queue(
    held: tuple[InferenceApi, Gate], trained: TrainedRun, library: str
) -> None:
    api, gate = held
    model = api.models.get("dlrm")
    answers: Queue[tuple[Any, Any]] = Queue()
    with serving(api, grpc_library=library) as address, closing(triton.InferenceServerClient(address)) as client:
        begin(client, tensors(trained.records(0, 1)), answers)
        wait_for(lambda: gate.num_batches == 1)
        waiting = [begin(client, tensors(trained.records(number, number + 1)), answers) for number in range(1, 4)]
        wait_for(lambda: model.num_waiting == 3)
        waiting[1].cancel()
        assert code_of(lambda: client.infer("dlrm", tensors(trained.records(4, 5)), client_timeout=0.2)) == (
            "DEADLINE_EXCEEDED"
        )
        # What a connection sends arrives in its order: the server knows of both ends when it has answered this.
        assert client.is_server_live()
        gate.open()
        results = [answers.get(timeout=PATIENCE) for _ in range(4)]
        wait_for(lambda: model.statistics().failed.get("cancelled", 0) == 2)
    assert sorted(error is None for _, error in results) == [False, True, True, True]
    assert gate.num_batches == 3


@each_library
def test_requests_beyond_the_limit_are_refused(
    held: tuple[InferenceApi, Gate], trained: TrainedRun, library: str
) -> None:
    api, gate = held
    inputs = tensors(trained.records(0, 1))
    answers: Queue[tuple[Any, Any]] = Queue()
    with (
        serving(api, grpc_library=library, max_in_flight=3) as address,
        closing(triton.InferenceServerClient(address)) as client,
    ):
        for _ in range(3):
            begin(client, inputs, answers)
        wait_for(lambda: api.models.get("dlrm").num_waiting == 2)
        with pytest.raises(InferenceServerException, match="3 requests are in flight, which is the limit") as caught:
            client.infer("dlrm", inputs)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        wait_for(lambda: api.errors.read() == {("grpc", "busy"): 1})
        assert client.is_server_live()  # probes are answered all the same
        gate.open()
        assert all(answers.get(timeout=PATIENCE)[1] is None for _ in range(3))
        client.infer("dlrm", inputs)  # there is room again


@each_library
def test_streams_beyond_the_limit_are_refused(api: InferenceApi, trained: TrainedRun, library: str) -> None:
    inputs = tensors(trained.records(0, 1))
    answers: Queue[tuple[Any, Any]] = Queue()
    with serving(api, grpc_library=library, grpc_max_streams=1) as address:
        with closing(triton.InferenceServerClient(address)) as first:
            assert stream(first, inputs, answers)[1] is None
            with closing(triton.InferenceServerClient(address)) as second:
                _, error = stream(second, inputs, answers)
                assert error.message() == "server: 1 streams are open, which is the limit; try again"

        def has_room() -> bool:
            with closing(triton.InferenceServerClient(address)) as third:
                return stream(third, inputs, answers)[1] is None

        wait_for(has_room)  # a stream that has ended leaves its place


@each_library
def test_a_stream_whose_client_leaves_ends(held: tuple[InferenceApi, Gate], trained: TrainedRun, library: str) -> None:
    api, gate = held
    model = api.models.get("dlrm")
    with serving(api, grpc_library=library) as address:
        client = triton.InferenceServerClient(address)
        client.start_stream(lambda result, error: None)
        for number in range(100):
            client.async_stream_infer("dlrm", tensors(trained.records(number, number + 1)))
        wait_for(lambda: model.num_waiting > 50)
        client.stop_stream(cancel_requests=True)
        client.close()
        gate.open()
        wait_for(lambda: model.num_waiting == 0)
        # Those that were read ahead are dropped but for the few that were scored meanwhile.
        assert gate.num_batches < 50


@pytest.mark.parametrize("place", ["message", "region"])
@each_library
def test_other_calls_are_answered_while_a_large_message_waits_to_be_read(
    session: InferenceSession, trained: TrainedRun, library: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster library read it in the thread that takes all calls."""
    count = 20_000
    inputs = tensors({name: [*values] * count for name, values in trained.records(0, 1).items()})
    numbers = np.full(count, 2.5, np.float32)
    key = f"/terarec-test-{library}"
    region = shared_memory.create_shared_memory_region("large", key, numbers.nbytes)
    with (
        closing(SharedMemory(2**25)) as memory,
        ServedModels() as models,
        closing(InferenceApi(models, memory=memory)) as api,
        serving(api, grpc_library=library) as address,
        closing(triton.InferenceServerClient(address)) as client,
        ThreadPoolExecutor() as pool,
    ):
        try:
            models.install(ServedModel(session, name="dlrm"))
            shared_memory.set_shared_memory_region(region, [numbers])
            api.shared_memory_register("large", key, 0, numbers.nbytes)
            if place == "region":
                one = tensors(trained.records(0, 1))
                inputs = [triton.InferInput("I1", [count], "FP32"), *(each for each in one if each.name() != "I1")]
                inputs[0].set_shared_memory("large", numbers.nbytes)
            is_free, read_in_turn, turns = threading.Event(), api.read_in_turn, Queue[object]()
            read_in_turn(is_free.wait)
            monkeypatch.setattr(api, "read_in_turn", lambda read: turns.put(read) or read_in_turn(read))
            large = pool.submit(client.infer, "dlrm", inputs)
            turns.get(timeout=PATIENCE)
            assert client.is_server_live(client_timeout=PATIENCE)
            small = client.infer("dlrm", tensors(trained.records(0, 1)), client_timeout=PATIENCE)
            assert small.as_numpy("score").shape == (1, 1)
            assert not large.done()
            is_free.set()
            assert large.result(PATIENCE).as_numpy("score").shape == (count, 1)
        finally:
            shared_memory.destroy_shared_memory_region(region)


@each_library
def test_long_messages_are_refused(api: InferenceApi, library: str) -> None:
    with (
        serving(api, grpc_library=library, max_request_bytes=100_000) as address,
        closing(triton.InferenceServerClient(address)) as client,
    ):
        tensor = triton.InferInput("I1", [50_000], "FP32")
        tensor.set_data_from_numpy(np.zeros(50_000, np.float32))
        assert code_of(lambda: client.infer("dlrm", [tensor])) == "RESOURCE_EXHAUSTED"
        # As long when it is decompressed.
        call = lambda: client.infer("dlrm", [tensor], compression_algorithm="gzip")  # noqa: E731
        assert code_of(call) == "RESOURCE_EXHAUSTED"
        assert code_of(lambda: client.get_model_metadata("x" * 90_000)) == "RESOURCE_EXHAUSTED"
        assert client.is_server_live()


def test_deflate_is_read_by_grpcio(api: InferenceApi, trained: TrainedRun) -> None:
    with (
        serving(api, grpc_library="grpcio") as address,
        closing(triton.InferenceServerClient(address)) as client,
    ):
        answer = client.infer("dlrm", tensors(trained.records(0, 20)), compression_algorithm="deflate")
        assert answer.as_numpy("score").shape == (20, 1)


@each_library
def test_what_is_no_message_is_reported(api: InferenceApi, library: str) -> None:
    with serving(api, grpc_library=library) as address, grpc.insecure_channel(address) as channel:
        for name, method in METHODS.items():
            if method.is_stream or not method.request.DESCRIPTOR.fields:
                continue
            call = channel.unary_unary(f"/{SERVICE}/{name}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == (f"the message: got 3 bytes that are no {method.request.DESCRIPTOR.name}")
        assert code_of(lambda: channel.unary_unary(f"/{SERVICE}/Other")(b"", timeout=PATIENCE)) == "UNIMPLEMENTED"


@each_library
def test_tokens(api: InferenceApi, trained: TrainedRun, tmp_path: Path, library: str) -> None:
    (tmp_path / "tokens").write_text("secret\nother\n")
    (tmp_path / "admins").write_text("root\n")
    access = AccessSpec(token_file=str(tmp_path / "tokens"), admin_token_file=str(tmp_path / "admins"))
    inputs = tensors(trained.records(0, 1))
    user, admin, unknown = ({"authorization": f"Bearer {token}"} for token in ("secret", "root", "guess"))
    answers: Queue[tuple[Any, Any]] = Queue()
    with (
        serving(api, grpc_library=library, access=access) as address,
        closing(triton.InferenceServerClient(address)) as client,
    ):
        assert client.is_server_live()
        assert client.is_model_ready("dlrm")
        # What the server has needs no token on loopback, as over HTTP.
        assert client.get_model_metadata("dlrm").name == "dlrm"
        assert len(client.get_model_repository_index().models) == 1
        assert client.get_model_config("dlrm").config.name == "dlrm"
        assert len(client.get_inference_statistics("dlrm").model_stats) == 1
        assert client.get_trace_settings().settings
        for headers in (None, unknown):
            assert code_of(lambda headers=headers: client.infer("dlrm", inputs, headers=headers)) == "UNAUTHENTICATED"
            _, error = stream(client, inputs, answers, headers=headers)
            assert error.message().startswith("Authorization: got")
            client.stop_stream()
        for headers in (user, admin):
            assert client.infer("dlrm", inputs, headers=headers).as_numpy("score").shape == (1, 1)
        assert client.get_log_settings().settings["log_error"].bool_param
        for call in (
            lambda headers: client.load_model("dlrm", headers=headers),
            lambda headers: client.update_log_settings({"log_info": True}, headers=headers),
        ):
            assert code_of(lambda call=call: call(user)) == "UNAUTHENTICATED"
        assert code_of(lambda: client.load_model("dlrm", headers=admin)) == "UNAVAILABLE"  # without a repository


def test_administration_needs_a_token_where_others_reach_the_server(api: InferenceApi) -> None:
    with (
        serving(api, host="0.0.0.0", grpc_library="native") as address,
        closing(triton.InferenceServerClient(address)) as client,
    ):
        assert code_of(lambda: client.load_model("dlrm")) == "PERMISSION_DENIED"
        assert client.is_server_ready()


def test_encrypted_connections(api: InferenceApi, trained: TrainedRun, tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    access = AccessSpec(certificate=files.file("server.crt"), key=files.file("server.key"))
    inputs = tensors(trained.records(0, 1))
    with serving(api, access=access) as address:
        address = address.replace("127.0.0.1", "localhost")
        known = {"ssl": True, "root_certificates": files.authority}
        with closing(triton.InferenceServerClient(address, **known)) as client:
            assert client.infer("dlrm", inputs).as_numpy("score").shape == (1, 1)
        for options in ({}, {"ssl": True}):
            with closing(triton.InferenceServerClient(address, **options)) as client:
                assert code_of(lambda client=client: client.infer("dlrm", inputs)) == "UNAVAILABLE"
    access = AccessSpec(certificate=files.file("server.crt"), key=files.file("server.key"), client_ca=files.authority)
    with serving(api, access=access) as address:
        address = address.replace("127.0.0.1", "localhost")
        with closing(triton.InferenceServerClient(address, **known)) as client:
            assert code_of(lambda: client.infer("dlrm", inputs)) == "UNAVAILABLE"
        own = {"private_key": files.file("client.key"), "certificate_chain": files.file("client.crt")}
        with closing(triton.InferenceServerClient(address, **known, **own)) as client:
            assert client.infer("dlrm", inputs).as_numpy("score").shape == (1, 1)


def test_the_faster_library_does_not_encrypt() -> None:
    with pytest.raises(ConfigError) as caught:
        ServingSpec(grpc_library="native", access=AccessSpec(certificate="server.crt"))
    assert caught.value.where == "ServingSpec.grpc_library"


@each_library
def test_a_taken_port_is_reported(api: InferenceApi, library: str) -> None:
    with serving(api, grpc_library=library) as address, pytest.raises(ConfigError) as caught:
        GrpcServer(ServingSpec(grpc_port=int(address.rpartition(":")[2]), grpc_library=library))
    assert caught.value.where == "ServingSpec.grpc_port"


@each_library
def test_a_stop_lets_requests_in_flight_be_answered(
    held: tuple[InferenceApi, Gate], trained: TrainedRun, library: str
) -> None:
    api, gate = held
    server = GrpcServer(ServingSpec(grpc_port=0, grpc_library=library))
    server.start(api)
    respond = PendingInference.response

    def respond_late(pending: PendingInference) -> bytes:
        time.sleep(0.1)
        return respond(pending)

    with (
        closing(triton.InferenceServerClient(f"127.0.0.1:{server.port}")) as client,
        mock.patch.object(PendingInference, "response", respond_late),
    ):
        answers = begin_several(client, trained, api, 3)
        stopping = threading.Thread(target=server.stop, args=(PATIENCE,))
        stopping.start()
        late = tensors(trained.records(5, 6))
        wait_for(lambda: code_of(lambda: client.infer("dlrm", late, client_timeout=1.0)) == "UNAVAILABLE")
        gate.open()
        stopping.join(PATIENCE)
        assert all(answers.get(timeout=PATIENCE)[1] is None for _ in range(3))
        assert not stopping.is_alive()


# Not by grpcio, whose own stop resets 1 of 800 such connections on a busy machine.
def test_a_stop_right_after_the_last_answer_lets_it_be_sent(api: InferenceApi, monkeypatch: pytest.MonkeyPatch) -> None:
    large, is_called = bytes(1 << 20), threading.Event()

    def call(service: GrpcService, name: str, body: bytes) -> bytes:
        is_called.set()
        return large

    monkeypatch.setattr(GrpcService, "call", call)
    monkeypatch.setattr(native_server, "_POLL_SECONDS", 0.0)
    for _ in range(10):
        server = GrpcServer(ServingSpec(grpc_port=0, grpc_library="native"))
        server.start(api)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answer = channel.unary_unary(f"/{SERVICE}/ServerLive").future(b"", timeout=PATIENCE)
            assert is_called.wait(PATIENCE)
            server.stop(PATIENCE)
            assert answer.result() == large
        is_called.clear()


@each_library
def test_a_stop_ends_requests_that_take_too_long(
    held: tuple[InferenceApi, Gate], trained: TrainedRun, library: str
) -> None:
    api, gate = held
    server = GrpcServer(ServingSpec(grpc_port=0, grpc_library=library))
    server.start(api)
    with closing(triton.InferenceServerClient(f"127.0.0.1:{server.port}")) as client:
        answers = begin_several(client, trained, api, 2)
        server.stop(0.1)
        assert all(answers.get(timeout=PATIENCE)[1] is not None for _ in range(2))
    gate.open()


@each_library
def test_many_clients_get_their_own_scores(
    models: ServedModels, trained: TrainedRun, session: InferenceSession, library: str
) -> None:
    expected = session.predict(trained.records(0, 64))

    def ask(place: int) -> bool:
        with closing(triton.InferenceServerClient(address)) as client:
            found = [
                client.infer("dlrm", tensors(trained.records(place, place + 1))).as_numpy("score") for _ in range(5)
            ]
        return all(np.allclose(scores, expected[place : place + 1], rtol=1e-5) for scores in found)

    with serving(InferenceApi(models), grpc_library=library) as address, ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(64)))
