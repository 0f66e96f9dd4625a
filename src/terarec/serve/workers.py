# SPDX-License-Identifier: Apache-2.0
"""Processes that serve one address: they share what was loaded before they were forked, and are started again.

A fork copies no memory: tables that a process loads before it forks, and that nobody changes, are there once, however
many workers there are. All workers accept connections of one listening socket.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from terarec.closer import close_all
from terarec.errors import ConfigError, TerarecError
from terarec.repeating import Backoff

_LOGGER = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""Time in which workers have to end after a stop and the drain; then they are killed.

Requests in flight have 10 s over HTTP, then as long over gRPC; the rest is for closing the model."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0
"""Pauses before a worker is started again that did not become ready: the first, and the longest of the doubled ones."""

_READY, _STOP = b"ready\n", b"stop\n"


@dataclass(slots=True)
class _Worker:
    """A process.

    Attributes:
        index: Number of the worker, from 0.
        pid: Id of the process.
        reports: Pipe on which it says that it is ready, or its error; it ends with the process.
        received: Bytes that came from it.
        is_ready: Whether it accepts requests.
    """

    index: int
    pid: int
    reports: int
    received: bytes = b""
    is_ready: bool = False


class WorkerContext:
    """What a worker is told and tells.

    Attributes:
        index: Number of the worker, from 0.

    Args:
        index: Number of the worker.
        reports: Pipe to the process that started it.
        lifeline: Pipe that ends with that process.
    """

    def __init__(self, index: int, reports: int, lifeline: int) -> None:
        self.index = index
        self._reports = reports
        self._lifeline = lifeline

    def shut_down(self) -> None:
        """Let the process that started the worker stop all of them."""
        os.write(self._reports, _STOP)

    def started(self, stop: Callable[[], None]) -> None:
        """Say that requests are accepted.

        Args:
            stop: Function that lets the worker finish; called when the process that started it is gone.
        """
        threading.Thread(target=self._watch, args=(stop,), name="terarec-lifeline", daemon=True).start()
        os.write(self._reports, _READY)

    def _watch(self, stop: Callable[[], None]) -> None:
        os.read(self._lifeline, 1)  # nobody writes: it returns when the other end is closed
        stop()


class Workers:
    """Starts workers and starts those again that end, until `stop`.

    For one thread, which must be the only one that works: a fork has the calling thread alone, and locks that others
    hold at that moment stay locked in it.

    Args:
        count: Number of workers.
        work: Function that serves in a worker until SIGTERM.
        ended: Function that gets the number of a worker that has ended, before it is started again.
        stop_seconds: Time in which workers have to end after a stop; then they are killed.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[WorkerContext], None],
        ended: Callable[[int], None] = lambda _: None,
        *,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._count = count
        self._stop_seconds = stop_seconds
        self._work = work
        self._ended = ended
        self._workers: dict[int, _Worker] = {}  # by the pipe of their reports
        self._lifeline, self._lifeline_end = os.pipe()
        self._wake, self._wake_end = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._restarts: dict[int, float] = {}  # index -> time at which the worker is started again
        self._failed: dict[int, Backoff] = {}  # those that have not become ready since
        self._has_ended = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes, by the number of the worker."""
        return tuple(worker.pid for worker in sorted(self._workers.values(), key=lambda worker: worker.index))

    def stop(self) -> None:
        """Let the workers finish, and `run` return. Callable from any thread and from handlers of signals."""
        if not self._has_ended:
            os.write(self._wake_end, b"s")

    def run(self, started: Callable[[], None], stopping: Callable[[], None] = lambda: None) -> None:
        """Run the workers until `stop`.

        Args:
            started: Callback, called once, when all workers accept requests.
            stopping: Callback, called once, before they are stopped.

        Raises:
            TerarecError: A worker failed before all were ready; the others are stopped.
        """
        try:
            for index in range(self._count):
                try:
                    self._fork(index)
                except OSError as error:
                    raise ConfigError(f"worker {index}", f"cannot be started: {error.strerror}") from error
                # The first one may write what the others read, such as the rows of tables.
                while not all(worker.is_ready for worker in self._workers.values()):
                    if self._step(is_starting=True):
                        return
            started()
            while not self._step(is_starting=False):
                pass
            stopping()
        finally:
            self._end()

    def _fork(self, index: int) -> None:
        reports, reports_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reports)
            os.close(reports_end)
            raise
        if pid == 0:
            self._be_worker(index, reports, reports_end)
        os.close(reports_end)
        self._workers[reports] = _Worker(index, pid, reports)
        self._selector.register(reports, selectors.EVENT_READ)

    def _be_worker(self, index: int, reports: int, reports_end: int) -> NoReturn:
        """Serve, and end this process without returning to what its parent was doing."""
        code = 1
        try:
            # Terminals and service managers signal all processes at once: the parent, which knows that this one is not
            # ready, ends it, and does not take its end for a failure.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            # Ends of pipes that this process holds would hide from others that the parent is gone.
            for end in (reports, self._lifeline_end, self._wake, self._wake_end, *self._workers):
                os.close(end)
            self._selector.close()
            self._work(WorkerContext(index, reports_end, self._lifeline))
            code = 0
        except TerarecError as error:
            with contextlib.suppress(OSError):
                os.write(reports_end, json.dumps([type(error).__module__, type(error).__name__, str(error)]).encode())
        except BaseException:
            _LOGGER.exception("worker %d ended by an error", index)
        finally:
            with contextlib.suppress(Exception):  # a full disk must not keep the process
                close_all()
            logging.shutdown()
            os._exit(code)

    def _step(self, *, is_starting: bool) -> bool:
        """Wait for what happens next, and attend to it; return whether to stop."""
        due = min(self._restarts.values(), default=None)
        timeout = None if due is None else max(due - time.monotonic(), 0)
        is_stopped, ended = self._read_reports(timeout)
        if is_stopped:
            return True
        for worker in ended:
            self._bury(worker, is_starting=is_starting)
        now = time.monotonic()
        for index in [index for index, at in self._restarts.items() if at <= now]:
            del self._restarts[index]
            try:
                self._fork(index)
            except OSError as error:  # the others go on while the machine has no room for one more process
                pause = self._start_later(index)
                _LOGGER.warning("worker %d cannot be started: %s; tried again in %g s", index, error.strerror, pause)
        return False

    def _read_reports(self, timeout: float | None) -> tuple[bool, list[_Worker]]:
        """Wait for reports, and note who is ready; return whether to stop, and the workers that have ended."""
        is_stopped, ended = False, []
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake:
                is_stopped = True
                continue
            worker = self._workers[key.fd]
            text = os.read(worker.reports, 65536)
            worker.received += text
            if worker.received.startswith(_READY):
                worker.is_ready = True
                self._failed.pop(worker.index, None)
            is_stopped |= worker.is_ready and worker.received.endswith(_STOP)
            if not text:
                ended.append(worker)
        return is_stopped, ended

    def _bury(self, worker: _Worker, *, is_starting: bool) -> None:
        """Attend to a worker that has ended."""
        self._selector.unregister(worker.reports)
        os.close(worker.reports)
        del self._workers[worker.reports]
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if is_starting:
            raise _error_of(worker, how)
        self._ended(worker.index)
        if worker.is_ready:
            self._restarts[worker.index] = time.monotonic()
        else:
            self._start_later(worker.index)
        _LOGGER.warning("worker %d (process %d) ended by %s; it is started again", worker.index, worker.pid, how)

    def _start_later(self, index: int) -> float:
        """Start a worker after a pause, which is twice as long the next time; return the pause in seconds."""
        backoff = self._failed.setdefault(index, Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
        pause, self._restarts[index] = backoff.fail(), backoff.due
        return pause

    def _end(self) -> None:
        """End all workers, and wait for them; one that is not ready, while others may answer, finishes nothing."""
        self._has_ended = True
        self._read_reports(0)  # of those that are ready by now, and have requests
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGTERM if worker.is_ready else signal.SIGKILL)
        until = time.monotonic() + self._stop_seconds
        left = {worker.pid for worker in self._workers.values()}
        while left:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            if left and time.monotonic() > until:
                for pid in left:
                    _LOGGER.warning("process %d did not end within %g s; it is killed", pid, self._stop_seconds)
                    os.kill(pid, signal.SIGKILL)
                until = float("inf")
            time.sleep(0.01 if left else 0)
        for end in (*self._workers, self._lifeline, self._lifeline_end, self._wake, self._wake_end):
            os.close(end)
        self._workers.clear()
        self._selector.close()


def _error_of(worker: _Worker, how: str) -> TerarecError:
    """Return the error that a worker has reported."""
    try:
        module, name, text = json.loads(worker.received.removeprefix(_READY))
    except ValueError:
        return ConfigError(f"worker {worker.index}", f"ended by {how} before it accepted requests; see the log")
    kind = getattr(importlib.import_module(module), name) if module.startswith("terarec.") else TerarecError
    try:
        return kind(text)
    except TypeError:  # of an error with further arguments
        return TerarecError(text)
