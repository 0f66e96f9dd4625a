"""Real servers for the tests: Redis or Valkey, bound to loopback, in a directory of their own."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terarec.spec import RedisSpec

PROGRAMS = ("redis-server", "valkey-server")
PROGRAM = next((program for program in PROGRAMS[::-1] if shutil.which(program)), None)
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="neither valkey-server nor redis-server is installed")


def free_port() -> int:
    """Return a port that no one listens on, at most 55,535: nodes of a cluster listen on the one 10,000 above, too."""
    while True:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = int(held.getsockname()[1])
        if port <= 55_535:
            return port


class RedisProcess:
    """A server that can be killed, paused and started again with what it held."""

    def __init__(
        self, directory: Path, *options: str, program: str | None = PROGRAM, is_encrypted: bool = False
    ) -> None:
        self.port = free_port()
        self._program = program
        self._is_encrypted = is_encrypted
        self._directory = directory
        self._options = options
        directory.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spec(self, **options: object) -> RedisSpec:
        return RedisSpec(address=self.address, **options)  # type: ignore[arg-type]

    def start(self) -> None:
        assert self._program is not None
        ports = ("--port", "0", "--tls-port") if self._is_encrypted else ("--port",)
        options = ("--save", "", "--appendonly", "yes", "--appendfsync", "no", "--dir", str(self._directory))
        self._process = subprocess.Popen(
            [self._program, "--bind", "127.0.0.1", *ports, str(self.port), *options, *self._options],
            stdout=subprocess.DEVNULL,
        )
        self._wait()

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

    def _wait(self) -> None:
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2) as held:
                if self._is_encrypted:
                    return
                held.sendall(b"PING\r\n")
                if held.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(0.01)
        raise AssertionError(f"no answer on port {self.port}")


@contextlib.contextmanager
def running(
    directory: Path, *options: str, program: str | None = PROGRAM, is_encrypted: bool = False
) -> Iterator[RedisProcess]:
    """Run a server."""
    server = RedisProcess(directory, *options, program=program, is_encrypted=is_encrypted)
    try:
        yield server
    finally:
        server.stop()
