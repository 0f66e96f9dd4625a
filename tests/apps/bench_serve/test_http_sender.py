# SPDX-License-Identifier: Apache-2.0
"""The HTTP connections of a load against servers that answer in every form, or not at all."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from terarec.apps.bench_serve.http_sender import HttpAddress, HttpSender
from terarec.apps.bench_serve.load import RequestError
from terarec.errors import ConfigError

PATIENCE = 30.0


def exchange(
    answer: bytes, use: Callable[[HttpSender, HttpAddress], Awaitable[None]], timeout: float = PATIENCE
) -> int:
    """Let `use` talk with a server that gives one answer to each request; return how many connections it got."""

    async def run() -> int:
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    await reader.readexactly(4)
                    for byte in range(0, len(answer), 7):  # in small pieces
                        writer.write(answer[byte : byte + 7])
                        await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = HttpAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        sender = HttpSender(address, timeout)
        await sender.open(4)
        try:
            await use(sender, address)
        finally:
            await sender.close()
            server.close()
        return connections

    return asyncio.run(run())


def request(address: HttpAddress) -> bytes:
    return address.request("/v2", {"X-Token": "t"}, b"body")


async def ask_thrice(sender: HttpSender, address: HttpAddress) -> None:
    for _ in range(3):
        await sender.send(request(address))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length:0\r\nServer: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\nyou\r\n0\r\n\r\n",
    ],
    ids=["length", "empty", "chunks"],
)
def test_a_connection_is_kept_for_the_next_request(answer: bytes) -> None:
    assert exchange(answer, ask_thrice) == 1


def test_a_server_may_close_after_each_answer() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    assert exchange(answer, ask_thrice) == 3


def test_clients_have_connections_of_their_own() -> None:
    async def ask_together(sender: HttpSender, address: HttpAddress) -> None:
        await asyncio.gather(*(sender.send(request(address)) for _ in range(9)))

    assert exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", ask_together) == 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'HTTP/1.1 503 Busy\r\nContent-Length: 16\r\n\r\n{"error":"busy"}', r'503: \{"error":"busy"\}'),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "not HTTP/1.1"),
    ],
    ids=["status", "other protocol", "no number"],
)
def test_other_answers_are_errors(answer: bytes, reason: str) -> None:
    async def ask(sender: HttpSender, address: HttpAddress) -> None:
        with pytest.raises(RequestError, match=reason):
            await sender.send(request(address))

    exchange(answer, ask)


def test_a_request_without_an_answer_fails_in_time() -> None:
    async def ask(sender: HttpSender, address: HttpAddress) -> None:
        with pytest.raises(RequestError, match=r"no answer in 0\.05 seconds"):
            await sender.send(request(address))

    exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", ask, timeout=0.05)


def test_a_lost_connection_fails_its_request() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = HttpAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        sender = HttpSender(address, PATIENCE)
        await sender.open(1)
        with pytest.raises(RequestError, match="connection lost"):
            await sender.send(request(address))
        server.close()
        await server.wait_closed()
        with pytest.raises(RequestError, match="cannot connect"):
            await sender.send(request(address))
        await sender.close()

    asyncio.run(run())


def test_the_head_of_a_request() -> None:
    address = HttpAddress("http://localhost:8000/base/")
    assert address.request("/v2/x", {"A": "b"}, b"1234") == (
        b"POST /base/v2/x HTTP/1.1\r\nHost: localhost:8000\r\nA: b\r\nContent-Length: 4\r\n\r\n1234"
    )


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", ""])
def test_an_address_that_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpAddress(url)
    assert caught.value.where == "URL"
