# SPDX-License-Identifier: Apache-2.0
"""Resources of objects that nobody closed: a thread closes them, so that no finalizer waits."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import ParamSpec, TypeVar

Item = TypeVar("Item")
Arguments = ParamSpec("Arguments")


class Closer:
    """Closes the resources of an object once: when it is called, or else after the object is gone.

    A garbage collection may begin anywhere, also inside the locks of `threading` and `queue`, so a finalizer that takes
    a lock, joins a thread or waits for a disk may wait for ever. The finalizer of `owner` therefore only adds this
    closer to a queue, which takes no lock. A thread works the queue off; `wait_closed` waits for it. It was started
    before the first owner was there, since starting a thread waits, too. A forked process closes nothing of its parent.

    Args:
        owner: Object whose end closes.
        close: Closes the resources; it must not refer to `owner`, which would then never be gone.
        at_exit: Whether the end of the interpreter closes them too.
    """

    def __init__(self, owner: object, close: Callable[[], object], *, at_exit: bool = True) -> None:
        worker = _running_worker()
        self._close = close
        self._at_exit = at_exit
        self._open = worker.open
        self._finalizer = weakref.finalize(owner, worker.queue.put, self)
        # `close_all` closes what is left then, after the thread has ended.
        self._finalizer.atexit = False
        worker.open[id(self)] = self

    def __call__(self) -> None:
        """Close the resources in this thread; more calls have no effect, nor have calls in a forked process."""
        self._finalizer.detach()
        # Atomic, so that of several threads one closes.
        if self._open.pop(id(self), None) is not None:
            self._close()

    @property
    def is_closed(self) -> bool:
        """Whether the resources are closed or being closed, or belong to the process that forked this one."""
        return id(self) not in self._open

    def close_at_exit(self) -> None:
        """Close the resources if the end of the interpreter is to do so."""
        if self._at_exit:
            self()


def wait_closed(timeout: float | None = None) -> None:
    """Wait until the resources of all objects that are gone are closed.

    Args:
        timeout: Maximum number of seconds; None for any time. A thread that a closer may join has to bound it.
    """
    worker = _worker
    if worker is not None and worker.thread is not threading.current_thread() and worker.thread.is_alive():
        is_done = threading.Event()
        worker.queue.put(is_done.set)
        is_done.wait(timeout)


class Stream(Iterator[Item]):
    """The items of a generator whose ``finally`` may wait: dropping the stream closes it in the thread of `Closer`.

    A generator that is dropped runs its ``finally`` where it is dropped, which may be in a garbage collection.

    Args:
        items: The generator; it must not refer to the stream.
    """

    def __init__(self, items: Generator[Item, None, None]) -> None:
        self._items = items
        # The threads of streams do not keep a program from ending, so nothing waits for them then.
        self._closer = Closer(self, items.close, at_exit=False)

    def __iter__(self) -> Stream[Item]:
        return self

    def __next__(self) -> Item:
        return next(self._items)

    def close(self) -> None:
        """Close the generator and wait for that."""
        self._closer()


def stream(function: Callable[Arguments, Generator[Item, None, None]]) -> Callable[Arguments, Stream[Item]]:
    """Let a generator function return a `Stream`, for a generator that joins threads or removes files at its end."""

    @functools.wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Stream[Item]:
        return Stream(function(*args, **kwargs))

    return wrapped


class _Worker:
    """The thread of a process that closes.

    Attributes:
        open: Closers whose resources are open, by id.
        queue: What to call; `put` takes no lock, and a finalizer may call it inside another `put`.
        thread: The thread.
    """

    def __init__(self) -> None:
        self.open: dict[int, Closer] = {}
        self.queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon: `close_all` ends it after the other threads, whose resources may come to it until then.
        self.thread = threading.Thread(target=self._run, name="terarec-closer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.queue.get()) is not None:
            self.call(call)
            del call  # which would be kept until the next one comes

    def call(self, function: Callable[[], object]) -> None:
        """Call a function; an error is reported like that of any other thread."""
        try:
            function()
        except BaseException as error:
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))


_worker: _Worker | None = None
_starting = threading.Lock()  # never taken by a finalizer


def _running_worker() -> _Worker:
    global _worker
    if _worker is None:
        with _starting:
            if _worker is None:
                _worker = _Worker()
                _close_in_child_of_multiprocessing()
    return _worker


def _close_in_child_of_multiprocessing() -> None:
    """Let a process of `multiprocessing` close what is left, too: it ends by `os._exit`, after its threads.

    The finalizers that it runs come before the end of threads that may still use the resources.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        threading.Thread(target=_close_after_others, name="terarec-end").start()


def _close_after_others() -> None:
    threading.main_thread().join()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    close_all()


def close_all() -> None:
    """Close what is open, as at the exit; for a process that ends by `os._exit`, which calls no `atexit`."""
    worker = _worker
    if worker is None:
        return
    worker.queue.put(None)
    worker.thread.join()
    for closer in reversed(list(worker.open.values())):
        worker.call(closer.close_at_exit)


def _forget_parent() -> None:
    """Start anew in a forked process: it has neither the thread nor the resources of its parent."""
    global _worker, _starting
    if _worker is not None:
        # Kept for ever, also at the exit: destroying an object of the core joins its threads, which are not here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(_worker.open.values())))
        _worker.open.clear()
        _worker = None
    _starting = threading.Lock()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_forget_parent)
