"""Serve a run over HTTP until it is stopped."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch

from terarec.serve.live import LiveUpdates
from terarec.serve.publishing import UpdateReceiver
from terarec.serve.service import InferenceService
from terarec.serve.session import InferenceSession
from terarec.serve.tables import ServedTables
from terarec.serve.update_streams import open_stream
from terarec.spec import FieldError, Numbers, ServingSpec, UpdateStreamSpec

_RECEIVE_SECONDS = 0.5  # between two polls of a stream


class RunningServer:
    """A server that accepts requests.

    Attributes:
        host, port: The address bound.
        url: URL for `terarec.serve.InferenceClient`.
    """

    def __init__(self, host: str, port: int, stop: Callable[[], None]) -> None:
        self.host = host
        self.port = port
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._stop = stop

    def stop(self) -> None:
        """Let the server finish requests in flight and return from `serve`. Callable from any thread."""
        self._stop()


def serve(
    run_dir: Path,
    spec: ServingSpec,
    ready: Callable[[RunningServer], None] | None = None,
    *,
    checkpoint: int | str | None = None,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
    numbers: Numbers | None = None,
    stream: UpdateStreamSpec | None = None,
) -> None:
    """Serve a checkpoint of a run; return after SIGINT, SIGTERM or `RunningServer.stop`.

    Args:
        run_dir: Directory that ``terarec train`` wrote.
        spec: Name, address and limits.
        ready: Callback, called once, when requests are accepted.
        checkpoint: Checkpoint as in `InferenceSession.open`.
        device: Device of the model; the CPU by default.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.
        numbers: Numbers of rows and layers as in `InferenceSession.open`.
        stream: Stream from which the run's checkpoints are received into `run_dir`; None for a run that is there.

    Raises:
        ConfigError: A stream for tables in the memory of the device, an address that cannot be bound, no such
            checkpoint, or a workflow that names a function that is not allowed.
        FormatError: `run_dir` holds no complete checkpoint.
        MissingDependencyError: Starlette or uvicorn, or the client of the stream, is not installed.
        StorageError: The stream cannot be reached.
    """
    # Here, because the package imports this module, and the server's libraries are an extra.
    from terarec.serve.http_server import HttpServer, create_app

    def started() -> None:
        if ready is not None:
            host, port = bound.getsockname()[:2]
            ready(RunningServer(host, port, server.stop))

    if stream is not None and spec.tables is None:
        raise FieldError("ServingSpec", "tables", "got none with a stream, expected tiers, which updates change")
    # The port first: a replica may wait for hours for its first checkpoint, and a taken port shows at once.
    with _bind(spec) as bound, _receiving(run_dir, stream):
        tables = None if spec.tables is None else ServedTables(server=spec.tables.server, cache=spec.tables.cache)
        session = InferenceSession.open(
            run_dir,
            checkpoint,
            device=device,
            allow_import=allow_import,
            tables=tables,
            executor=spec.executor,
            numbers=numbers,
        )
        with session, _following(session, run_dir, spec, is_received=stream is not None):
            app = create_app(InferenceService(session, spec))
            server = HttpServer(app, started, spec.receive_timeout_seconds)
            with _stopped_by_signals(server.stop):
                server.run(sockets=[bound])


@contextlib.contextmanager
def _receiving(run_dir: Path, spec: UpdateStreamSpec | None) -> Iterator[None]:
    """Receive checkpoints while this lasts, which begins when there is one."""
    if spec is None:
        yield
        return
    stream = open_stream(spec)
    try:
        with UpdateReceiver(stream, run_dir, every_seconds=_RECEIVE_SECONDS) as receiver:
            receiver.wait(float("inf"))
            yield
    finally:
        stream.close()


def _following(
    session: InferenceSession, run_dir: Path, spec: ServingSpec, *, is_received: bool
) -> contextlib.AbstractContextManager[object]:
    """Return the updates of a session that follows its run, if the spec requests this or the run is received."""
    every = None if spec.tables is None else spec.tables.follow_seconds
    if every is None and is_received:
        every = _RECEIVE_SECONDS
    return contextlib.nullcontext() if every is None else LiveUpdates(session, run_dir, every_seconds=every)


def _bind(spec: ServingSpec) -> socket.socket:
    """Return a listening socket, made before the model is loaded: a taken port shows at once, an early client waits."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            spec.host, spec.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        problem = f"got {spec.host!r}, expected an address of this machine ({error})"
        raise FieldError("ServingSpec", "host", problem) from None
    try:
        # A server that was just stopped leaves its port to connections in TIME_WAIT for a minute.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        problem = (
            f"{spec.host} port {spec.port} cannot be bound ({error.strerror}), "
            "expected a free port, or 0 to let the system choose one"
        )
        raise FieldError("ServingSpec", "port", problem) from None
    return bound


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop` in the block; only the main thread may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
