"""Threads that work ahead on a stream and hand the results out in its order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_AHEAD = 10
"""Items under way beyond two a thread, so that threads need not stand still while the taker of the results writes a row
group: that of Criteo takes seven blocks."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_threads() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Generator[Result]:
    """``map(function, items)``: one thread iterates, `threads` threads work, results come in the order of `items`.

    At most ``2 * threads + 10`` items are under way, which bounds the memory. The first error, of `items` or of
    `function`, is raised in its turn. Closing the iterator ends the threads.

    Args:
        function: called in worker threads; it should release the GIL to gain from them.
        items: iterated in a thread of its own.
        threads: worker threads.
    """
    room = threading.Semaphore(2 * threads + _AHEAD)
    stopped = threading.Event()
    waiting: queue.SimpleQueue[Future[Result] | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for item in items:
                room.acquire()
                if stopped.is_set():
                    return
                waiting.put(pool.submit(function, item))
            waiting.put(None)
        except BaseException as error:  # handed to the caller, who raises it
            waiting.put(error)

    with ThreadPoolExecutor(threads, thread_name_prefix="etl") as pool:
        reader = threading.Thread(target=read, name="etl-reader")
        reader.start()
        try:
            while (next_up := waiting.get()) is not None:
                if isinstance(next_up, BaseException):
                    raise next_up
                yield next_up.result()
                room.release()
        finally:
            stopped.set()
            room.release()
            reader.join()
            pool.shutdown(cancel_futures=True)
