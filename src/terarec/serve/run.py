# SPDX-License-Identifier: Apache-2.0
"""Serve a run over HTTP and gRPC until it is stopped."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from terarec.memory.shared import kept_directories
from terarec.serve.access_log import AccessLog, check_access_log
from terarec.serve.api import InferenceApi
from terarec.serve.calls import CallSink
from terarec.serve.input_drift import DriftWatch
from terarec.serve.listening import address_of, bind, bind_admin, shared_memory
from terarec.serve.live import LiveUpdates
from terarec.serve.loading import VersionLoader, served_model
from terarec.serve.models import ServedModels
from terarec.serve.process import READY, STOPPING, notify, settled_heap
from terarec.serve.publishing import UpdateReceiver
from terarec.serve.recommending import RecommendationService
from terarec.serve.served_model import ServedModel
from terarec.serve.served_records import ServedRecords, check_record_directory
from terarec.serve.session import InferenceSession
from terarec.serve.sinks import Sink
from terarec.serve.statistics_board import StatisticsBoard, WorkerStatistics
from terarec.serve.tables import ServedTables
from terarec.serve.update_streams import open_stream
from terarec.serve.watching import repository_models
from terarec.serve.workers import STOP_SECONDS, WorkerContext, Workers
from terarec.spec import Numbers, ServingSpec
from terarec.spec.checks import FieldError
from terarec.spec.serving import UpdateStreamSpec
from terarec.spec.serving_options import WatchingSpec
from terarec.spec.serving_repository import RepositorySpec

if TYPE_CHECKING:
    from terarec.serve.shared_tables import SharedTables
    from terarec.serve.tracing import Traces

_RECEIVE_SECONDS = 0.5  # between two polls of a stream
_GRACE_SECONDS = 10.0  # for calls of gRPC in flight after a stop
_HAS_HANGUP = hasattr(signal, "SIGHUP")  # not on Windows
_LOGGER = logging.getLogger(__name__)


OpenRecommendations: TypeAlias = Callable[[ServedModels], contextlib.AbstractContextManager[RecommendationService]]
"""Returns what answers requests for recommendations by the models of a server, and is closed before them."""


class RunningServer:
    """A server that accepts requests.

    Attributes:
        host, port: The address bound.
        grpc_port: Port of gRPC; None for no gRPC.
        url: URL for `terarec.serve.InferenceClient`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        stop: Callable[[], None],
        *,
        is_encrypted: bool = False,
        grpc_port: int | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.grpc_port = grpc_port
        self.url = f"{'https' if is_encrypted else 'http'}://{address_of(host, port)}"
        self._stop = stop

    def stop(self) -> None:
        """Let the server finish requests in flight and return from `serve`. Callable from any thread."""
        self._stop()


def serve(
    source: Path | RepositorySpec,
    spec: ServingSpec,
    ready: Callable[[RunningServer], None] | None = None,
    *,
    checkpoint: int | str | None = None,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
    numbers: Numbers | None = None,
    stream: UpdateStreamSpec | None = None,
    drift: Callable[[], DriftWatch] | None = None,
    recommendations: OpenRecommendations | None = None,
) -> None:
    """Serve a checkpoint of a run, or the models of a repository, until SIGINT, SIGTERM or `RunningServer.stop`.

    Args:
        source: Directory that ``terarec train`` wrote, or a model repository.
        spec: Name, address and limits.
        ready: Callback, called once, when requests are accepted.
        checkpoint: Checkpoint as in `InferenceSession.open`; a server that follows the run begins with the last one.
        device: Device of the model; the CPU by default.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.
        numbers: Numbers of rows and layers as in `InferenceSession.open`.
        stream: Stream from which the run's checkpoints are received into its directory; None for a run that is there.
        drift: Function that returns what compares records with the training data, in each process that serves; None
            for no comparison. `terarec.apps.drift.watch.ServedDrift` is one.
        recommendations: Function that returns what answers requests for recommendations by the models of the server;
            None for no such requests.

    Raises:
        ConfigError: A stream for tables in the memory of the device or for a repository, an address that cannot be
            bound, no such checkpoint or model to load, one for a server that follows the run, tables that are followed
            in a repository whose runs are not, or a workflow that names a function that is not allowed.
        FormatError: The run holds no complete checkpoint.
        MissingDependencyError: A library of the extra ``serve``, or the client of the stream, is not installed.
        StorageError: The stream cannot be reached.
    """
    follows = spec.tables is not None and spec.tables.follow_seconds is not None
    if isinstance(source, RepositorySpec):
        if stream is not None or checkpoint is not None:
            what = "stream" if stream is not None else "checkpoint"
            problem = "got one for a model repository, expected none: its versions have one checkpoint"
            raise FieldError("", what, problem)
        if follows and not source.follow_runs:
            raise FieldError("ServingSpec", "tables", "got follow_seconds for a model repository without --follow-runs")
    elif follows or stream is not None:
        if checkpoint not in (None, "last"):
            problem = f"got {checkpoint} for a server that follows the run, expected none: it goes on to the newest one"
            raise FieldError("", "checkpoint", problem)
        checkpoint = "last"  # also of a run with patience: the updates would leave the best one at once
    _check_workers(source, spec, device)
    if stream is not None and spec.tables is None:
        raise FieldError("ServingSpec", "tables", "got none with a stream, expected tiers, which updates change")

    def accept(stop: Callable[[], None], grpc_port: int | None) -> None:
        if ready is not None:
            host, port = bound.getsockname()[:2]
            is_encrypted = spec.access.certificate is not None
            ready(RunningServer(host, port, stop, is_encrypted=is_encrypted, grpc_port=grpc_port))
        notify(READY)

    options = _SessionOptions(checkpoint, device, tuple(allow_import), numbers)
    # The port first: a replica may wait for hours for its first checkpoint, and a taken port shows at once.
    with _ignored_hangups(), bind(spec.host, spec.port, "ServingSpec") as bound, bind_admin(spec.access) as admins:
        if spec.grpc_port:
            # Its library binds it later, and in every worker.
            bind(spec.host, spec.grpc_port, "ServingSpec", "grpc_").close()
        _check_watching(spec.watching)
        sockets = _Sockets(bound, tuple(admins))
        if spec.workers == 1:
            with contextlib.nullcontext() if spec.threads is None else _threads(spec.threads):
                models = (
                    repository_models(source, _loader(source, spec, options))
                    if isinstance(source, RepositorySpec)
                    else _run_models(source, spec, options, stream)
                )
                _run(sockets, models, spec, accept, drift, recommendations, stopping=partial(notify, STOPPING))
        else:
            if isinstance(source, RepositorySpec):
                working = _repository_work(source, spec, options)
            elif spec.tables is not None:
                working = _tiers_work(source, spec, options, stream)
            else:
                working = _run_work(source, spec, options)
            _run_workers(sockets, working, spec, accept, drift, recommendations)


class _Sockets(NamedTuple):
    """Listening sockets: that of the clients, and those of administrators."""

    clients: socket.socket
    admins: tuple[socket.socket, ...]


def _run(
    sockets: _Sockets,
    loading: contextlib.AbstractContextManager[ServedModels],
    spec: ServingSpec,
    started: Callable[[Callable[[], None], int | None], None],
    drift: Callable[[], DriftWatch] | None,
    recommendations: OpenRecommendations | None,
    shut_down: Callable[[], None] | None = None,
    stopping: Callable[[], None] = lambda: None,
    workers: WorkerStatistics | None = None,
) -> None:
    """Serve models on sockets until a signal, or until the function is called that `started` gets with gRPC's port.

    An administrator calls `shut_down`, by default that function. `stopping` is called when the drain begins.
    """
    # Here, because the package imports this module, and the server's libraries are an extra.
    from terarec.serve.http.assembly import HttpTransport

    # A client registers memory with one process, and its requests go to any of the workers.
    has_memory = spec.workers == 1
    with (
        _watchers(spec.watching, drift) as watchers,
        loading as models,
        shared_memory(spec, sockets.clients, is_possible=has_memory) as memory,
        contextlib.nullcontext() if recommendations is None else recommendations(models) as recommender,
    ):
        models.observer = watchers.records
        api = InferenceApi(
            models,
            memory=memory,
            calls=watchers.calls,
            max_request_bytes=spec.max_request_bytes,
            is_worker=spec.workers > 1,
        )
        transport = HttpTransport(
            api,
            spec,
            [sockets.clients],
            sockets.admins,
            sinks=watchers.sinks,
            drift=watchers.drift,
            recommendations=recommender,
            shut_down=shut_down or (lambda: transport.stop()),
            workers=workers,
        )
        # The thread that reads large requests ends last: calls of gRPC are answered after those of HTTP.
        with (
            _settled(models, spec),
            _stopped_by_signals(transport.stop),
            contextlib.closing(api),
            _grpc(api, spec) as grpc_port,
        ):
            transport.run(lambda: started(transport.stop, grpc_port), stopping)


class _Watchers(NamedTuple):
    """Who watches the requests of this process: where calls go, and records, and what compares these."""

    calls: tuple[CallSink, ...]
    records: ServedRecords | None
    drift: DriftWatch | None

    @property
    def sinks(self) -> Sequence[Sink]:
        """All that write."""
        return (*self.calls, *(() if self.records is None else (self.records,)))


@contextlib.contextmanager
def _watchers(spec: WatchingSpec, drift: Callable[[], DriftWatch] | None) -> Iterator[_Watchers]:
    """Give who watches in the block, and write what is left at its end."""
    with contextlib.ExitStack() as stack:
        log = None if spec.access_log is None else stack.enter_context(AccessLog(spec))
        watch = None if drift is None else stack.enter_context(contextlib.closing(drift()))
        traces = _traces(spec)
        if traces is not None:
            stack.enter_context(traces)
        wants_records = spec.record_directory is not None or watch is not None
        records = stack.enter_context(ServedRecords(spec, watch)) if wants_records else None
        yield _Watchers(tuple(sink for sink in (log, traces) if sink is not None), records, watch)


def _check_watching(spec: WatchingSpec) -> None:
    """Raise for what cannot be written, or needs a library, before a model is loaded, which may take minutes."""
    check_access_log(spec)
    check_record_directory(spec)
    if spec.otlp_endpoint is not None:
        import terarec.serve.tracing  # noqa: F401


def _traces(spec: WatchingSpec) -> Traces | None:
    if spec.otlp_endpoint is None:
        return None
    # Here, since its libraries are an extra.
    from terarec.serve.tracing import Traces

    return Traces(spec)


@contextlib.contextmanager
def _settled(models: ServedModels, spec: ServingSpec) -> Iterator[None]:
    """Leave models out of the garbage collections of the block."""
    if spec.workers > 1:
        yield  # left out before the fork: looking at them again would copy the pages that the workers share
        return
    with settled_heap() as settle:
        models.on_change = settle
        try:
            yield
        finally:
            models.on_change = None


@contextlib.contextmanager
def _grpc(api: InferenceApi, spec: ServingSpec) -> Iterator[int | None]:
    """Answer calls of gRPC in the block, on the port that it gets, and at its end those in flight."""
    if spec.grpc_port is None:
        yield None
        return
    # Here, since its libraries are of an extra, and are not imported without a port.
    from terarec.serve.grpc.server import GrpcServer

    server = GrpcServer(spec, shares_port=spec.workers > 1)
    server.start(api)
    try:
        yield server.port
    finally:
        server.stop(_GRACE_SECONDS)


def _check_workers(source: Path | RepositorySpec, spec: ServingSpec, device: torch.device | None) -> None:
    """Raise `FieldError` if the workers of the spec cannot serve this."""
    if spec.workers == 1:
        return
    where = ""
    if device is not None and device.type != "cpu":  # a fork of a process that has used a GPU cannot use it
        where = "on a GPU"
    elif spec.tables is not None and isinstance(source, RepositorySpec):
        where = "with tiers of a model repository"
    elif spec.tables is not None:
        kinds = spec.tables.exclusive_kinds
        where = f"with a tier of kind {kinds[0]!r}, which one process opens unless it is read_only" if kinds else ""
    elif isinstance(source, RepositorySpec) and source.follow_runs:
        where = "with follow_runs"
    elif isinstance(source, RepositorySpec) and source.control != "poll":
        # A call that changes what is loaded reaches one of them; the others have to see it on the disk.
        where = f"with control {source.control!r}"
    if where:
        raise FieldError("ServingSpec", "workers", f"got {spec.workers} {where}, expected 1")
    if not hasattr(os, "fork"):
        raise FieldError("ServingSpec", "workers", f"got {spec.workers}, expected 1 on this system, which has no fork")
    if threading.current_thread() is not threading.main_thread():
        raise FieldError("ServingSpec", "workers", f"got {spec.workers} in a thread, expected the main thread")


RunModels: TypeAlias = Callable[[contextlib.AbstractContextManager[ServedModels]], None]
Work: TypeAlias = Callable[[WorkerStatistics, RunModels], None]
"""Serves in a worker: it calls the function that it gets with the models, whose requests the counters count."""


@contextlib.contextmanager
def _run_work(run_dir: Path, spec: ServingSpec, options: _SessionOptions) -> Iterator[Work]:
    """Load a run, which the workers share as it is in memory when they are forked."""
    # Eager, since a runtime's threads do not survive a fork: each worker starts its own.
    session = _open(run_dir, spec, options, executor="eager")

    def work(statistics: WorkerStatistics, run: RunModels) -> None:
        session.use_executor(run_dir, spec.executor)
        run(_installed(served_model(session, spec.model_options(), name=spec.name, statistics=statistics)))

    with session:
        yield work


@contextlib.contextmanager
def _tiers_work(
    run_dir: Path, spec: ServingSpec, options: _SessionOptions, stream: UpdateStreamSpec | None
) -> Iterator[Work]:
    """Let each worker open a run in tiers that all reach; the first one loads them, and receives the stream."""

    def work(statistics: WorkerStatistics, run: RunModels) -> None:
        run(_run_models(run_dir, spec, options, stream, statistics))

    # Workers that are killed, such as one that a stop finds while it starts, leave memory as it is.
    with kept_directories(() if spec.tables is None else spec.tables.tiers):
        yield work


@contextlib.contextmanager
def _repository_work(source: RepositorySpec, spec: ServingSpec, options: _SessionOptions) -> Iterator[Work]:
    """Let each worker follow a repository, and all map the rows of its versions."""
    # Here, since it needs a system that can fork.
    from terarec.serve.shared_tables import SharedTables

    with SharedTables() as shared:

        def work(statistics: WorkerStatistics, run: RunModels) -> None:
            loader = _loader(source, spec, options, shared=shared, statistics=statistics)
            run(repository_models(source, loader))

        yield work


def _run_workers(
    sockets: _Sockets,
    working: contextlib.AbstractContextManager[Work],
    spec: ServingSpec,
    started: Callable[[Callable[[], None], int | None], None],
    drift: Callable[[], DriftWatch] | None,
    recommendations: OpenRecommendations | None,
) -> None:
    """Serve with forks of this process."""
    threads = spec.threads or max(torch.get_num_threads() // spec.workers, 1)
    # OpenMP's threads are not there after a fork.
    with _threads(1), working as work:
        board = StatisticsBoard(spec.workers)

        def serve_in(context: WorkerContext) -> None:
            torch.set_num_threads(threads)

            def run(models: contextlib.AbstractContextManager[ServedModels]) -> None:
                _run(
                    sockets,
                    models,
                    spec,
                    lambda stop, _: context.started(stop),
                    drift,
                    recommendations,
                    context.shut_down,
                    workers=statistics,
                )

            with WorkerStatistics(board, context.index) as statistics:
                work(statistics, run)

        workers = Workers(spec.workers, serve_in, board.bury, stop_seconds=spec.drain_seconds + STOP_SECONDS)
        # What is there now is not looked at by the garbage collector, whose marks would copy the pages.
        gc.freeze()

        def stopping() -> None:
            notify(STOPPING)
            # Once the workers have closed theirs, clients are refused, while requests in flight are answered.
            for bound in (sockets.clients, *sockets.admins):
                bound.close()

        with _stopped_by_signals(workers.stop):
            workers.run(lambda: started(workers.stop, spec.grpc_port), stopping)


@contextlib.contextmanager
def _installed(model: ServedModel) -> Iterator[ServedModels]:
    with ServedModels() as models:
        models.install(model)
        yield models


class _SessionOptions(NamedTuple):
    """How sessions are opened; see `serve`."""

    checkpoint: int | str | None
    device: torch.device | None
    allow_import: tuple[str, ...]
    numbers: Numbers | None


@contextlib.contextmanager
def _run_models(
    run_dir: Path,
    spec: ServingSpec,
    options: _SessionOptions,
    stream: UpdateStreamSpec | None,
    statistics: WorkerStatistics | None = None,
) -> Iterator[ServedModels]:
    """Load a run, and close it at the end. `statistics` has the counters of a worker, which are those of all."""
    receives = statistics is None or statistics.index == 0
    with (
        _receiving(run_dir, stream if receives else None),
        _open(run_dir, spec, options, executor=spec.executor) as session,
    ):
        updates = _following(session, run_dir, spec, is_received=stream is not None)
        model = served_model(session, spec.model_options(), name=spec.name, updates=updates, statistics=statistics)
        with _installed(model) as models:
            yield models


def _loader(
    source: RepositorySpec,
    spec: ServingSpec,
    options: _SessionOptions,
    *,
    shared: SharedTables | None = None,
    statistics: WorkerStatistics | None = None,
) -> VersionLoader:
    return VersionLoader(
        spec.model_options(),
        tables=spec.tables,
        device=options.device,
        numbers=options.numbers,
        executor=spec.executor,
        allow_import=options.allow_import,
        follow_runs=source.follow_runs,
        shared=shared,
        statistics=statistics,
    )


def _open(run_dir: Path, spec: ServingSpec, options: _SessionOptions, *, executor: str) -> InferenceSession:
    return InferenceSession.open(
        run_dir,
        options.checkpoint,
        device=options.device,
        allow_import=options.allow_import,
        tables=None if spec.tables is None else ServedTables(server=spec.tables.server, cache=spec.tables.cache),
        executor=executor,
        numbers=options.numbers,
    )


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


def _following(session: InferenceSession, run_dir: Path, spec: ServingSpec, *, is_received: bool) -> LiveUpdates | None:
    """Return the updates of a session that follows its run, if the spec requests this or the run is received."""
    every = None if spec.tables is None else spec.tables.follow_seconds
    if every is None and is_received:
        every = _RECEIVE_SECONDS
    return None if every is None else LiveUpdates(session, run_dir, every_seconds=every)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch, and the executors that follow it, compute in so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop` in the block."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    with _handled({signal.SIGINT: handle, signal.SIGTERM: handle}):
        yield


@contextlib.contextmanager
def _ignored_hangups() -> Iterator[None]:
    """Let SIGHUP do nothing in the block, also in workers, which are forked there.

    It comes where a terminal is closed, and from rotations of logs, for which a server needs no signal.
    """

    def ignore(_signal: int, _frame: FrameType | None) -> None:
        _LOGGER.info("SIGHUP is ignored; SIGTERM ends the server")

    with _handled({signal.SIGHUP: ignore} if _HAS_HANGUP else {}):
        yield


@contextlib.contextmanager
def _handled(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals in the block; only the main thread may, and elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
