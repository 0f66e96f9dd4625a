# SPDX-License-Identifier: Apache-2.0
"""S3: what a client can cost the server: bytes, time and connections are bounded, and others are still answered."""

import contextlib
import json
import logging
import os
import re
import select
import signal
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceClient, InferenceError, InferenceSession, ServedModel, ServedModels
from terarec.serve.binary_codec import decode_binary_request
from terarec.serve.http import api_routes
from terarec.serve.json_codec import MAX_LISTS, MAX_OBJECTS, decode_infer_request
from terarec.serve.protocol import RequestTooLargeError
from terarec.spec import ServingSpec
from tests.errors import at
from tests.processes import Python
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import served
from tests.serve.http.test_api_routes import tensors
from tests.waiting import PATIENCE, wait_for

PROGRAM = """
import json, resource, sys
from pathlib import Path
from terarec.serve import serve
from terarec.spec import ServingSpec
options = json.loads(sys.argv[2])
files = options.pop("open_files", None)
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
serve(Path(sys.argv[1]), ServingSpec(name="dlrm", port=0, **options), lambda server: print(server.port, flush=True))
print("stopped", flush=True)
"""


@dataclass
class Server:
    """A server in a process of its own."""

    process: Python
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def is_live(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/v2/health/live", timeout=60) as answer:
            return bool(json.load(answer)["live"])

    def peak_bytes(self) -> int:
        """The most memory that the process has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


@contextlib.contextmanager
def servers(trained: TrainedRun) -> Iterator[Callable[..., Server]]:
    """Start servers, which end with this."""
    processes: list[Python] = []

    def started(**options: Any) -> Server:
        process = Python(PROGRAM, trained.path, json.dumps(options))
        processes.append(process)
        return Server(process, int(process.read_line()))

    try:
        yield started
    finally:
        for process in processes:
            process.close()


@pytest.fixture
def start(trained: TrainedRun) -> Iterator[Callable[..., Server]]:
    """Starts servers for one test."""
    with servers(trained) as started:
        yield started


@pytest.fixture(scope="module")
def small(trained: TrainedRun) -> Iterator[Server]:
    """A server that takes 1,000 bytes in a request."""
    with servers(trained) as started:
        yield started(max_request_bytes=1000)


@pytest.fixture(scope="module")
def impatient(trained: TrainedRun) -> Iterator[Server]:
    """A server that waits 0.2 s for the next bytes of a request."""
    with servers(trained) as started:
        yield started(receive_timeout_seconds=0.2)


def head(length: int | None) -> bytes:
    """The head of a request of so many bytes, or in chunks."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /v2/models/dlrm/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n{size}\r\n\r\n".encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer.

    Raises:
        ConnectionError: The server closed the connection without one, as it does at the end of the receive timeout.
    """
    with connection.makefile("rb") as stream:
        first = stream.readline()
        if not first:
            raise ConnectionError("closed without an answer")
        status = int(first.split()[1])
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, json.loads(stream.read(int(headers["content-length"])))


def test_s3_a_long_body_is_rejected_by_its_announced_length(small: Server) -> None:
    with small.connect() as connection:
        connection.sendall(head(120_000_000))  # and nothing of the body
        status, body = answer(connection)
        assert (status, body["error"].split(", ")[0]) == (413, "the body: got 120000000 bytes")


def test_s3_a_client_that_closes_reads_the_rejection_all_the_same(small: Server) -> None:
    client = InferenceClient(small.url, model="dlrm")
    with pytest.raises(InferenceError, check=at(f"{small.url}/v2/models/dlrm/infer", "413: the body: got ")):
        client.infer({"C1": ["0" * 15_000_000]})


def test_s3_lists_and_objects_are_counted_before_they_are_made() -> None:
    for body, things in ((b"[" + b"[]," * MAX_LISTS, "lists"), (b"[" + b"{}," * (MAX_OBJECTS + 1), "objects")):
        with pytest.raises(RequestTooLargeError, check=at("the body", f" {things}, send fewer")):
            decode_infer_request(body)


def test_s3_a_long_body_in_chunks_is_rejected_while_it_is_read(small: Server) -> None:
    with small.connect() as connection:
        connection.sendall(head(None) + b"190\r\n" + b" " * 400 + b"\r\n")
        connection.sendall((b"190\r\n" + b" " * 400 + b"\r\n") * 2)
        status, body = answer(connection)
        assert (status, body["error"].split(", ")[0]) == (413, "the body: got more than 1000 bytes")


def test_s3_a_body_that_stalls_is_rejected_in_time(impatient: Server) -> None:
    with impatient.connect() as connection:
        connection.sendall(head(1000) + b"{")
        status, body = answer(connection)
        assert (status, body["error"].split(", ")[0]) == (408, "the body: got 1 bytes in 0.2 seconds")
        assert connection.recv(1) == b""


def test_s3_a_connection_without_a_whole_request_is_closed_in_time(impatient: Server) -> None:
    for sent in (b"", b"GET /v2", head(5)[:-4], head(120_000_000)):
        with impatient.connect() as connection:
            connection.sendall(sent)
            if sent == head(120_000_000):
                assert answer(connection)[0] == 413  # the rest is waited for no longer than that of others
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


class Waiting(torch.nn.Module):
    """A model that scores once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_scoring, self.may_score = threading.Event(), threading.Event()

    def forward(self, batch: Batch) -> torch.Tensor:
        self.is_scoring.set()
        assert self.may_score.wait(timeout=PATIENCE)
        return torch.zeros(batch.batch_size, 1)


@contextlib.contextmanager
def waiting_models(trained: TrainedRun, session: InferenceSession) -> Iterator[tuple[ServedModels, Waiting]]:
    workflow = Workflow.load(trained.path / "dataset" / "workflow")
    model = Waiting()
    waiting = InferenceSession(model, workflow, session.run, workflow.dataset_spec(), step=1)
    with ServedModels() as models:
        models.install(ServedModel(waiting, name="dlrm"))
        try:
            yield models, model
        finally:
            model.may_score.set()


def infer_bytes(trained: TrainedRun, *headers: str) -> bytes:
    """A request for the score of one record."""
    body = json.dumps({"inputs": tensors(trained.records(0, 1))}).encode()
    lines = "".join(f"{header}\r\n" for header in headers)
    return head(len(body)).replace(b"\r\n\r\n", b"\r\n" + lines.encode() + b"\r\n") + body


def test_s3_requests_in_flight_are_bounded_and_others_reported_to_try_again(
    trained: TrainedRun, session: InferenceSession
) -> None:
    """Finding Q11: bodies that have not arrived are not in flight, however many there are."""
    request = infer_bytes(trained)
    with (
        waiting_models(trained, session) as (models, model),
        served(models, ServingSpec(max_in_flight=3)) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(64):
            stack.enter_context(server.connect()).sendall(head(1000) + b"{")
        calling = [stack.enter_context(server.connect()) for _ in range(3)]
        for connection in calling:
            connection.sendall(request)
        refused = (503, "server: 3 requests are in flight, which is the limit; try again")
        status, text = 0, ""
        while (status, text) != refused:  # until the three have arrived
            with server.connect() as fourth:
                fourth.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
                assert answer(fourth)[0] == 200
                fourth.sendall(request)
                fourth.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    status, body = answer(fourth)
                    text = body["error"]
        model.may_score.set()
        assert [answer(connection)[0] for connection in calling] == [200] * 3


def test_s3_slow_bodies_give_way_to_others(models: ServedModels, trained: TrainedRun) -> None:
    """Finding Q11: where bodies hold all bytes, the one that has been silent for longest is rejected."""
    spec = ServingSpec(max_request_bytes=10_000)
    with served(models, spec) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(4)]
        for connection in slow:
            connection.sendall(head(9_999) + b" " * 9_998)
        rejected: list[socket.socket] = []
        with server.connect() as other:
            while not rejected:  # until the server has received the four
                other.sendall(infer_bytes(trained))
                assert answer(other)[0] == 200
                rejected = select.select(slow, [], [], 0.1)[0]
        (first,) = rejected
        assert answer(first)[0] == 408
        for connection in slow:
            if connection is not first:
                connection.sendall(b"}")
                assert answer(connection)[0] == 400  # which is no JSON, but was received


def test_s3_a_request_for_whose_bytes_there_was_no_place_is_forgotten(
    trained: TrainedRun, session: InferenceSession
) -> None:
    """It was taken for one that still sends: the next one waited for its bytes for ever, and all others with it."""
    request = infer_bytes(trained)
    spec = ServingSpec(max_request_bytes=len(request.partition(b"\r\n\r\n")[2]))
    with (
        waiting_models(trained, session) as (models, model),
        served(models, spec) as server,
        contextlib.ExitStack() as stack,
    ):
        calling = [stack.enter_context(server.connect()) for _ in range(4)]
        calling[0].sendall(request)
        assert model.is_scoring.wait(timeout=PATIENCE)  # alone: further ones would be in its batch
        for connection in calling[1:]:
            connection.sendall(request)
        wait_for(lambda: models.get("dlrm").num_waiting == 3)
        for _ in range(2):
            with server.connect() as another:
                another.sendall(request)
                assert answer(another)[0] == 503
        with server.connect() as probe:
            probe.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            assert answer(probe)[0] == 200
        model.may_score.set()
        assert [answer(connection)[0] for connection in calling] == [200] * 4


@pytest.mark.parametrize("is_reset", [False, True])
def test_s3_a_client_that_left_is_one_debug_line(
    models: ServedModels, caplog: pytest.LogCaptureFixture, is_reset: bool
) -> None:
    """Finding Q10."""
    with caplog.at_level(logging.DEBUG), served(models) as server:
        with server.connect() as connection:
            connection.sendall(head(1000).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"{")
            if is_reset:  # as the system does where a client closes with an answer unread
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: bool(caplog.records))
    (line,) = [record for record in caplog.records if record.name == "terarec.serve"]
    assert (line.levelno, line.exc_info) == (logging.DEBUG, None)
    assert line.getMessage() == "client 127.0.0.1 left while its request arrived"


def test_s3_a_client_that_sends_no_more_is_answered(trained: TrainedRun, session: InferenceSession) -> None:
    """Finding Q15: half-closed connections, at once and after the server has asked whether somebody reads."""
    with (
        waiting_models(trained, session) as (models, model),
        served(models) as server,
        server.connect() as connection,
    ):
        connection.sendall(infer_bytes(trained))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        model.may_score.set()
        status, body = answer(connection)
        assert (status, body["outputs"][0]["data"]) == (200, [0.5])
        assert connection.recv(1) == b""


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="asks the system for the state of a connection")
def test_s3_a_request_whose_client_has_gone_is_dropped(
    trained: TrainedRun, session: InferenceSession, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        waiting_models(trained, session) as (models, model),
        served(models) as server,
        server.connect() as first,
    ):
        first.sendall(infer_bytes(trained))
        assert model.is_scoring.wait(timeout=PATIENCE)
        with server.connect() as second:
            second.sendall(infer_bytes(trained))
            wait_for(lambda: models.get("dlrm").num_waiting > 0)
        wait_for(lambda: "client 127.0.0.1 left before its answer" in caplog.messages)
        with server.connect() as probe:  # answered in a later turn of the loop: the request has been cancelled by then
            probe.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            assert answer(probe)[0] == 200
        model.may_score.set()
        assert answer(first)[0] == 200
        wait_for(lambda: bool(models.get("dlrm").statistics().failed))
        assert models.get("dlrm").statistics().failed == {"cancelled": 1}


LENGTHS = ("Content-Length: 2", "Transfer-Encoding: chunked")


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]])
def test_s3_two_lengths_close_the_connection(models: ServedModels, lengths: tuple[str, str]) -> None:
    """Finding Q9: what follows would be another request for one reader and a body for the other."""
    with served(models) as server, server.connect() as connection:
        start = "\r\n".join(("POST /v2/models/dlrm/infer HTTP/1.1", "Host: localhost", *lengths, "", ""))
        connection.sendall(start.encode() + b"0\r\n\r\nGET /v2 HTTP/1.1\r\n\r\n")
        status, body = answer(connection)
        assert (status, body["error"].split(" (")[0]) == (400, "the request: not HTTP/1.1")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_s3_a_long_head_is_rejected(models: ServedModels) -> None:
    with served(models) as server, server.connect() as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 2_000 if _ == 0 else b"x" * 2_000)
        assert answer(connection)[0] == 431


def test_s3_requests_in_one_piece_are_answered_in_order(models: ServedModels, trained: TrainedRun) -> None:
    with served(models) as server, server.connect() as connection:
        live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(infer_bytes(trained) + live + live.replace(b"live", b"none") + live)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            received = stream.read()
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) [A-Z]", received) if status != b"100"]
    assert statuses == [200, 200, 404, 200]


def half_sent(server: Server, count: int, length: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connections, each with half a body of `length` bytes sent, as far as the server took it."""
    connections = [stack.enter_context(server.connect()) for _ in range(count)]

    def send(connection: socket.socket) -> None:
        connection.settimeout(2)
        with contextlib.suppress(OSError):
            connection.sendall(head(length))
            for _ in range(length // 2 // 2**16):
                connection.sendall(b" " * 2**16)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, connections))
    return connections


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_s3_half_sent_bodies_hold_bounded_memory(start: Callable[..., Server], trained: TrainedRun) -> None:
    limit = 4 * 2**20
    server = start(max_request_bytes=limit)
    client = InferenceClient(server.url, model="dlrm")
    assert client.infer(trained.records(0, 1))["score"].shape == (1, 1)
    before = server.peak_bytes()
    with contextlib.ExitStack() as stack:
        half_sent(server, 40, limit, stack)  # 80 MiB
        assert server.is_live()
        # 4 bodies are held, at most; twice that for buffers, and the allocator's own.
        assert server.peak_bytes() - before < 8 * limit + 16 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_s3_large_bodies_hold_bounded_memory(start: Callable[..., Server], trained: TrainedRun) -> None:
    """100 half-sent bodies of 100 MB; then 40 M empty lists in 120 MB, rejected, and as many as fit the limit."""
    server = start()
    client = InferenceClient(server.url, model="dlrm", timeout_seconds=120)
    assert client.infer(trained.records(0, 1))["score"].shape == (1, 1)
    before = server.peak_bytes()
    with contextlib.ExitStack() as stack:
        for connection in half_sent(server, 100, 100_000_000, stack):
            with contextlib.suppress(ConnectionError):
                assert answer(connection)[0] == 413
    with contextlib.ExitStack() as stack:
        half_sent(server, 60, 32 * 2**20, stack)
        assert server.is_live()
    assert server.peak_bytes() - before < 8 * 32 * 2**20
    lists = b'{"inputs": [' + b"[]," * 3_999_000 + b"[]]}"
    for body, status in ((b"[" + b"[]," * 40_000_000 + b"[]]", 413), (lists, 400)):
        with server.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head(len(body)) + body)
            assert answer(connection)[0] == status
    assert server.peak_bytes() - before < 28 * 32 * 2**20  # docs/serving.md: 28 times the limit, at most
    assert client.infer(trained.records(0, 1))["score"].shape == (1, 1)


def test_s3_health_answers_while_a_request_is_parsed(models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body is parsed outside of the event loop: health is answered while that is held up."""
    is_parsing, may_go_on = threading.Event(), threading.Event()

    def held_up(body: bytes, *_: Any) -> Any:
        is_parsing.set()
        assert may_go_on.wait(timeout=PATIENCE)
        return decode_infer_request(body)

    monkeypatch.setattr(api_routes, "decode_binary_request", held_up)
    with served(models) as server, server.connect() as calling, server.connect() as probing:
        calling.sendall(head(100_000) + b" " * 100_000)
        assert is_parsing.wait(timeout=PATIENCE)
        probing.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert answer(probing)[0] == 200
        may_go_on.set()
        assert answer(calling)[0] == 400


def test_s3_calls_without_records_have_short_bodies(models: ServedModels) -> None:
    """They are parsed in the event loop, whatever is in them."""
    body = b'{"x":[' + b"[]," * 30_000 + b'[]],"x":1}'
    paths = (
        "repository/index", "trace/setting", "models/dlrm/trace/setting", "logging", "repository/models/dlrm/load",
        "repository/models/dlrm/unload", "systemsharedmemory/region/r/register",
    )  # fmt: skip
    with served(models) as server:
        for path in (*(f"/v2/{path}" for path in paths), "/v1/repository/models/dlrm/promote"):
            with server.connect() as connection:
                connection.sendall(
                    f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                assert answer(connection)[0] == 413, path


def test_s3_tensors_of_regions_count_and_are_read_outside_of_the_event_loop(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return decode_binary_request(*arguments)

    monkeypatch.setattr(api_routes, "decode_binary_request", noted)
    key = f"terarec-test-{os.getpid()}"
    region = Path("/dev/shm") / key
    with served(models, ServingSpec(max_request_bytes=200_000)) as server:
        region.touch()
        try:
            os.truncate(region, 2**31 - 4096)
            server.api.shared_memory_register("r", key, 0, 2**31 - 4096)
            for size, problem in ((1000, "I2"), (100_000, "records"), (2**31 - 4096, "got 2147479")):
                place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
                tensor = {"name": "I1", "shape": [size // 4], "datatype": "FP32", "parameters": place}
                body = json.dumps({"inputs": [tensor]}).encode()
                with server.connect() as connection:
                    connection.sendall(head(len(body)) + body)
                    assert problem in answer(connection)[1]["error"]
        finally:
            region.unlink()
    loop = threads[0]
    assert loop != "parse"
    assert threads == [loop, loop, "parse", loop, "parse"]


LARGE_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": [1] * 300_000}, "inputs[0].shape: got 300000 dimensions, expected at most 32"),
    "size": ({"shape": [10**4000]}, "inputs[0].shape[0]: got 1000000"),
    "product": ({"shape": [2**62] * 32}, "inputs[0].data: got 1 elements, expected "),
    "number": ({"data": [10**4000]}, "inputs[0].data[0]: got 1000000"),
    "text": ({"data": [["x" * 10**6]]}, "inputs[0].data[0]: got ['xxx"),
    "lines": ({"name": "x" * 10**6, "data": ["\n" * 10**6]}, "inputs[0].data[0]: got '\\n"),
    "datatype": ({"datatype": {"a": [1] * 10**6}}, "inputs[0].datatype: got {'a': [1, 1"),
    "field": ({"f" * 10**6: 1}, "inputs[0]: unknown field 'fff"),
}


@pytest.mark.parametrize("case", LARGE_VALUES)
def test_s3_large_values_are_rejected_with_a_short_message(case: str) -> None:
    change, expected = LARGE_VALUES[case]
    tensor = {"name": "I1", "shape": [1], "datatype": "FP32", "data": [1.5]}
    with pytest.raises(ConfigError) as caught:
        decode_infer_request(json.dumps({"inputs": [tensor | change]}).encode())
    message = str(caught.value)
    assert message.startswith(expected)
    assert len(message) < 400
    assert message.isprintable()


def test_s3_numbers_of_many_digits_are_rejected() -> None:
    body = json.dumps({"inputs": [{"name": "I1", "shape": [1], "datatype": "FP32", "data": [7]}]}).encode()
    for text in (b"7" * 5_000, b"-" + b"7" * 10**6, b"7" * 4_300):
        with pytest.raises(ConfigError) as caught:
            decode_infer_request(body.replace(b"7", text))
        assert len(str(caught.value)) < 250


def test_s3_an_error_of_the_server_is_one_short_line(small: Server) -> None:
    for path in (
        "/v2/" + "x" * 20_000,
        "/v2/a%0Ab%1b",
        "/v2/models/" + "%0A" * 5_000,
        "/v2/models/dlrm/versions/" + "x" * 9_999,
    ):
        with small.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            status, body = answer(connection)
        assert status == 404
        assert len(body["error"]) < 300
        assert body["error"].isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("open_files", [None, 600])
def test_s3_idle_and_slow_connections_leave_room_for_others(
    start: Callable[..., Server], trained: TrainedRun, session: InferenceSession, open_files: int | None
) -> None:
    """2,000 of them; where the system allows fewer open files, the one that was silent longest goes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2_000 + 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        server = start(**({} if open_files is None else {"open_files": open_files}))
        with contextlib.ExitStack() as stack:
            slow = []
            for index in range(2_000):
                connection = stack.enter_context(server.connect())
                with contextlib.suppress(ConnectionError):
                    connection.sendall((b"", b"GET /v2/he", head(1000)[:-2])[index % 3])
                slow.append(connection)
            assert server.is_live()
            for _ in range(3):
                with contextlib.suppress(ConnectionError):
                    slow[-1].sendall(b"X")
                scores = InferenceClient(server.url, model="dlrm").infer(trained.records(0, 3))["score"]
                assert np.array_equal(scores, session.predict(trained.records(0, 3)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_s3_sigterm_finishes_requests_in_flight_and_rejects_new_ones(
    start: Callable[..., Server], trained: TrainedRun
) -> None:
    server = start()
    body = b'{"inputs": []}'
    with server.connect() as calling, server.connect() as idle:
        calling.sendall(head(len(body)).replace(b"Host", b"Expect: 100-continue\r\nHost"))
        assert calling.recv(100).startswith(b"HTTP/1.1 100 ")
        os.kill(server.process.pid, signal.SIGTERM)
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                server.connect().close()
                time.sleep(0.01)
        calling.sendall(body)
        status, rejection = answer(calling)
        assert (status, rejection["error"].split(", ")[0]) == (400, "column 'I1': missing")  # answered, in full
        ended = server.process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_s3_a_body_that_never_comes_does_not_hold_up_the_stop(start: Callable[..., Server]) -> None:
    server = start(receive_timeout_seconds=1)
    with server.connect() as calling:
        calling.sendall(head(1000).replace(b"Host", b"Expect: 100-continue\r\nHost"))
        assert calling.recv(100).startswith(b"HTTP/1.1 100 ")
        os.kill(server.process.pid, signal.SIGTERM)
        assert answer(calling)[0] == 408
        ended = server.process.wait()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_the_index_is_answered_while_models_are_loaded() -> None:
    """Whoever waits for a version asks for it: loads took all threads that the index had."""

    class Slow:
        def __init__(self) -> None:
            self.num_loads, self.may_end = threading.Semaphore(0), threading.Event()

        def show_unloaded(self) -> None:
            pass

        def load(self, name: str, parameters: Mapping[str, Any]) -> None:
            self.num_loads.release()
            self.may_end.wait(timeout=PATIENCE)

        def unload(self, name: str) -> None:
            pass

    with ServedModels() as models, contextlib.ExitStack() as stack:
        models.loader = loader = Slow()
        server = stack.enter_context(served(models))
        stack.callback(loader.may_end.set)
        for name in "abcdef":
            load = f"POST /v2/repository/models/{name}/load HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}"
            stack.enter_context(server.connect()).sendall(load.encode())
        for _ in range(4):
            assert loader.num_loads.acquire(timeout=PATIENCE)
        with server.connect() as connection:
            connection.sendall(b"POST /v2/repository/index HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert answer(connection) == (200, [])
