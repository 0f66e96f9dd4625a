# SPDX-License-Identifier: Apache-2.0
"""What HTTP allows and stock clients do, and few servers are asked: older versions, upgrades, URLs with a host."""

import io
import json
import socket
from collections.abc import Iterator
from http.client import parse_headers
from typing import Any, NamedTuple

import numpy as np
import pytest

from terarec.serve import InferenceSession, ServedModels
from terarec.serve.http.connection import MAX_HEAD_BYTES
from tests.serve.conftest import TrainedRun
from tests.serve.http.serving import Served, served
from tests.serve.http.test_api_routes import tensors

UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"


@pytest.fixture(scope="module")
def server(models: ServedModels) -> Iterator[Served]:
    with served(models) as running:
        yield running


@pytest.fixture
def body(trained: TrainedRun) -> bytes:
    return json.dumps({"inputs": tensors(trained.records(0, 3))}).encode()


def post(body: bytes, *fields: str, version: str = "1.1", target: str = "/v2/models/dlrm/infer") -> bytes:
    lines = (f"POST {target} HTTP/{version}", "Host: 127.0.0.1", *fields, f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "\r\n")).encode() + body


def in_chunks(body: bytes, *fields: str) -> bytes:
    lines = ("POST /v2/models/dlrm/infer HTTP/1.1", "Host: 127.0.0.1", *fields, "Transfer-Encoding: chunked")
    pieces = (body[begin : begin + 1000] for begin in range(0, len(body), 1000))
    return "\r\n".join((*lines, "\r\n")).encode() + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)


class Answer(NamedTuple):
    status: int
    connection: str | None
    message: dict[str, Any]


class Client:
    """A connection, whose answers are read one by one."""

    def __init__(self, connection: socket.socket) -> None:
        self.send = connection.sendall
        self.stream: io.BufferedReader = connection.makefile("rb")

    def answer(self) -> Answer:
        first = self.stream.readline().split()
        fields = parse_headers(self.stream)
        return Answer(int(first[1]), fields["Connection"], json.loads(self.stream.read(int(fields["Content-Length"]))))

    def scores(self) -> np.ndarray:
        status, _, message = self.answer()
        assert status == 200, message
        return np.array(message["outputs"][0]["data"], np.float32)


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with server.connect() as connection:
        client = Client(connection)
        with client.stream:
            yield client


def test_a_client_that_asks_for_another_protocol_is_answered_in_this_one(
    client: Client, body: bytes, trained: TrainedRun, session: InferenceSession
) -> None:
    """Clients of HTTP/2, such as Java's, ask with their first request; its body and what follows it count."""
    expected = session.predict(trained.records(0, 3)).ravel()
    for request in (post(body, UPGRADE), in_chunks(body, UPGRADE) + b"0\r\n\r\n"):
        client.send(request)
        np.testing.assert_array_equal(client.scores(), expected)
    asking = post(body, UPGRADE)
    for piece in (asking[:-10], asking[-10:] + asking + post(body)):
        client.send(piece)
    for _ in range(3):
        np.testing.assert_allclose(client.scores(), expected, rtol=0, atol=1e-6)
    client.send(f"GET /v2/health/live HTTP/1.1\r\n{UPGRADE}\r\n\r\n".encode() * 2)
    assert [client.answer().message for _ in range(2)] == [{"live": True}] * 2


def test_a_client_of_http_1_0_learns_whether_its_connection_is_kept(client: Client, body: bytes) -> None:
    for _ in range(2):
        client.send(post(body, "Connection: keep-alive", version="1.0"))
        assert client.answer()[:2] == (200, "keep-alive")
    client.send(post(body, "Expect: 100-continue", version="1.0"))
    assert client.answer()[:2] == (200, "close")  # and no interim answer, of which it knows nothing
    assert client.stream.read() == b""


def test_a_url_may_have_a_host_which_counts(server: Served, client: Client, body: bytes) -> None:
    client.send(post(body, target=f"http://127.0.0.1:{server.port}/v2/models/dlrm/infer"))
    assert client.scores().shape == (3,)
    client.send(post(body, target="http://shop.example/v2/models/dlrm/infer"))
    status, _, message = client.answer()
    assert (status, message["error"].split(",")[0]) == (403, "Host: got 'shop.example'")


@pytest.mark.parametrize("begin", ["0\r\nX-Trailer: ", "5;extension="])
def test_fields_of_a_body_in_chunks_are_bounded(client: Client, body: bytes, begin: str) -> None:
    client.send(in_chunks(body) + begin.encode())
    # Of what is read at once, 256 KiB at most, all counts as body if some of it is: one such piece and then too much.
    client.send(b"a" * (4 * MAX_HEAD_BYTES + 2 * MAX_HEAD_BYTES))
    status, _, message = client.answer()
    assert (status, message["error"]) == (431, f"the fields of the body: got more than {MAX_HEAD_BYTES} bytes")


def test_a_head_behind_a_long_body_counts_by_itself(client: Client, trained: TrainedRun) -> None:
    body = json.dumps({"inputs": tensors(trained.records(0, 1000))}).encode()
    assert len(body) > MAX_HEAD_BYTES
    client.send(post(body) + b"GET /v2/health/li")
    assert client.scores().shape == (1000,)
    client.send(b"ve HTTP/1.1\r\n\r\n")
    assert client.answer().message == {"live": True}
