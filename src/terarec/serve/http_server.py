"""uvicorn as `terarec.serve.run` needs it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from terarec.errors import MissingDependencyError

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"serving needs {error.name}: pip install 'terarec[serve]'") from error

SHUTDOWN_SECONDS = 10
"""How long requests in flight may still take after a stop."""


class HttpServer(uvicorn.Server):
    """Tells when it is ready, and leaves signals to its caller: uvicorn would raise them anew after it has stopped.

    Args:
        app: an ASGI application.
        started: called once requests are accepted.
    """

    def __init__(self, app: Any, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept requests."""
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def stop(self) -> None:
        """Finish what is in flight and return from `run`. Callable from any thread."""
        self.should_exit = True
