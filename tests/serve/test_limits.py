"""S3: what a client can cost the server: bytes, time and connections are bounded, and others are still answered."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import InferenceClient, InferenceError, InferenceSession, service
from terarec.serve.protocol import MAX_LISTS, MAX_OBJECTS, RequestTooLargeError, decode_infer_request
from tests.errors import at
from tests.processes import Python
from tests.serve.conftest import TrainedRun

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
    return f"POST /v2/models/dlrm/infer HTTP/1.1\r\nHost: test\r\n{size}\r\n\r\n".encode()


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
        client.infer({"I1": [1.5] * 3_000_000})


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


def test_s3_requests_in_flight_are_bounded_and_others_reported_to_try_again(
    start: Callable[..., Server], trained: TrainedRun
) -> None:
    server = start(max_in_flight=3)
    client = InferenceClient(server.url, model="dlrm")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(server.connect())
            connection.sendall(head(1000).replace(b"Host", b"Expect: 100-continue\r\nHost"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # it is in flight by now
        with pytest.raises(
            InferenceError, check=at(f"{server.url}/v2/models/dlrm/infer", "503: server: 3 requests are in flight")
        ):
            client.infer(trained.records(0, 1))
        assert server.is_live()
    answers: list[np.ndarray] = []
    while not answers:  # the server has yet to hear that the three have gone
        with contextlib.suppress(InferenceError):
            answers.append(client.infer(trained.records(0, 1))["score"])
    assert answers[0].shape == (1, 1)


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
    assert server.peak_bytes() - before < 25 * 32 * 2**20  # docs/serving.md: 25 times the limit, at most
    assert client.infer(trained.records(0, 1))["score"].shape == (1, 1)


def test_s3_health_answers_while_a_request_is_parsed_and_scored(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, service: service.InferenceService
) -> None:
    """Both happen outside of the event loop: health is answered while they are held up."""
    import asyncio

    import httpx

    from terarec.serve import http_server

    is_parsing, may_go_on = threading.Event(), threading.Event()

    def held_up(body: bytes) -> Any:
        is_parsing.set()
        assert may_go_on.wait(timeout=60)
        return decode_infer_request(body)

    monkeypatch.setattr(http_server, "decode_infer_request", held_up)

    async def call() -> tuple[int, int]:
        transport = httpx.ASGITransport(app=http_server.create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            infer = asyncio.create_task(client.post("/v2/models/dlrm/infer", content=b"{}"))
            while not is_parsing.is_set():
                await asyncio.sleep(0.01)
            live = await client.get("/v2/health/live")
            assert not infer.done()
            may_go_on.set()
            return live.status_code, (await infer).status_code

    assert asyncio.run(call()) == (200, 400)


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
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
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
