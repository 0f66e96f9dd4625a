# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests: Redis or Valkey, bound to loopback, in a directory of their own."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from terarec.spec import RedisSpec
from tests.addresses import own_address
from tests.programs import REDIS, VALKEY, Program, lacks
from tests.waiting import wait_for

PROGRAMS = (REDIS, VALKEY)
PROGRAM = next((program for program in PROGRAMS[::-1] if program.path), REDIS)
needs_redis = pytest.mark.skipif(PROGRAM.path is None, reason=lacks(PROGRAM.names[0], PROGRAM.command))


class RedisProcess:
    """A server that can be killed, paused and started again with what it held.

    Args:
        directory: Where it keeps its files.
        options: Words of its command line; ``{host}`` stands for its address.
        program: Redis or Valkey.
        is_encrypted: Whether it listens for encrypted connections alone.
    """

    def __init__(self, directory: Path, *options: str, program: Program = PROGRAM, is_encrypted: bool = False) -> None:
        self.host, self.port = own_address()
        self._program = program.require()
        self._is_encrypted = is_encrypted
        self._directory = directory
        self._options = [option.format(host=self.host) for option in options]
        directory.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def spec(self, **options: object) -> RedisSpec:
        return RedisSpec(address=self.address, **options)  # type: ignore[arg-type]

    def start(self) -> None:
        ports = ("--port", "0", "--tls-port") if self._is_encrypted else ("--port",)
        options = ("--save", "", "--appendonly", "yes", "--appendfsync", "no", "--dir", str(self._directory))
        self._process = subprocess.Popen(
            [self._program, "--bind", self.host, *ports, str(self.port), *options, *self._options],
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._answers)

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait(timeout=60)

    def pause(self) -> None:
        """Let it accept connections and answer nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self._process.terminate()
        self._process.wait(timeout=60)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 20) as connection:
            if self._is_encrypted:
                return True
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False


@contextlib.contextmanager
def running(
    directory: Path, *options: str, program: Program = PROGRAM, is_encrypted: bool = False
) -> Iterator[RedisProcess]:
    """Run a server."""
    server = RedisProcess(directory, *options, program=program, is_encrypted=is_encrypted)
    try:
        yield server
    finally:
        server.stop()
