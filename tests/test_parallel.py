# SPDX-License-Identifier: Apache-2.0
"""Threads that work ahead: order, bounds, errors, and none left behind however the consumer stops."""

import threading
import time
from contextlib import closing

import pytest

from terarec.closer import wait_closed
from terarec.data import Reader
from terarec.errors import FormatError
from terarec.parallel import ordered_map, prefetched
from tests.data.sources import TinyGroups, reading_threads, row_numbers
from tests.errors import at
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("no_reading_thread_is_left")


def count_to(stop, log=None):
    try:
        for number in range(stop):
            if log is not None:
                log.append(number)
            yield number
    finally:
        if log is not None:
            log.append("closed")


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_items_come_in_order(depth):
    assert list(prefetched(count_to(50), depth)) == list(range(50))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_results_come_in_order_though_later_calls_finish_first(threads):
    def slow_when_even(item):
        time.sleep(0.002 * (item % 2 == 0))
        return item * item

    assert list(ordered_map(slow_when_even, range(20), threads)) == [item * item for item in range(20)]


def test_no_more_than_depth_is_drawn_ahead():
    log = []
    items = prefetched(count_to(100, log), 3)
    assert next(items) == 0
    for _ in range(200):  # give the thread every chance to run too far
        time.sleep(0.0005)
        assert len(log) <= 1 + 3 + 1  # handed out, queued, and one in hand waiting for room
    items.close()
    assert log[-1] == "closed"


def test_no_more_than_threads_calls_run_ahead():
    started = []
    results = ordered_map(started.append, range(100), 2)
    next(results)
    time.sleep(0.02)
    assert len(started) <= 1 + 2
    results.close()
    assert len(started) <= 1 + 2


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it(depth):
    def failing():
        yield 1
        yield 2
        raise FormatError("part 3 is damaged")

    items = prefetched(failing(), depth)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(FormatError, check=at("", "part 3 is damaged")):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


class Damaged(TinyGroups):
    def read(self, group):
        if group == 3:
            raise FormatError("row group 3 is damaged")
        return super().read(group)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_while_reading_reaches_the_consumer(threads, prefetch):
    reader = Reader(Damaged((10,) * 6), batch_size=10, threads=threads, prefetch=prefetch)
    seen = []
    with pytest.raises(FormatError, check=at("", "row group 3 is damaged")):
        seen.extend(reader)
    assert row_numbers(seen) == list(range(30))
    assert reader.state_dict()["rows_read"] == 30


def test_break_ends_the_threads():
    reader = Reader(TinyGroups((10,) * 50), batch_size=3, threads=3, prefetch=4)
    before = reading_threads()
    started: set[threading.Thread] = set()
    for _ in reader:
        started = reading_threads() - before
        break
    assert started
    wait_closed()
    assert not any(thread.is_alive() for thread in started)


def test_an_error_of_the_consumer_ends_the_threads():
    def consume():
        for _ in Reader(TinyGroups((10,) * 50), batch_size=3, threads=2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()


def test_close_and_a_second_iteration_end_the_first():
    reader = Reader(TinyGroups((10,) * 50), batch_size=3)
    first = iter(reader)
    next(first)
    second = iter(reader)
    assert next(first, None) is None
    next(second)
    reader.close()
    assert next(second, None) is None


def test_an_iterator_that_never_started_needs_no_threads():
    before = set(threading.enumerate())
    iterator = iter(Reader(TinyGroups((10,)), batch_size=3))
    assert set(threading.enumerate()) <= before
    del iterator


INTERRUPTED = """
import signal, threading
from terarec.data import Reader
from tests.data.sources import TinyGroups

class Slow(TinyGroups):
    def read(self, group):
        if group == 2:
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(0.05)
        return super().read(group)

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    for batch in Reader(Slow((10,) * 99), batch_size=10, threads=2):
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_while_waiting_ends_the_process():
    done = run_python(INTERRUPTED)
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted"), done.stderr


def test_few_items_are_under_way():
    begun = []
    under_way = []
    with closing(ordered_map(lambda item: begun.append(item) or item, range(1000), 2, 14)) as results:
        for item in results:
            time.sleep(0.001 if item < 30 else 0)
            under_way.append(len(begun) - item)
    assert max(under_way) <= 16


def test_the_first_error_is_raised_in_its_turn():
    def work(item):
        if item in (5, 6):
            raise ValueError(f"item {item}")
        return item

    seen = []
    with pytest.raises(ValueError, match="item 5"):
        seen.extend(ordered_map(work, range(20), 3))
    assert seen == [0, 1, 2, 3, 4]


def test_an_error_of_the_input_is_raised_after_what_came_before():
    def items():
        yield from range(4)
        raise OSError("no more")

    seen = []
    with pytest.raises(OSError, match="no more"):
        seen.extend(ordered_map(lambda item: item, items(), 3))
    assert seen == [0, 1, 2, 3]


def test_closing_early_ends_the_threads():
    before = set(threading.enumerate())
    with closing(ordered_map(lambda item: item, iter(int, 1), 3)) as results:
        assert next(results) == 0
    assert set(threading.enumerate()) <= before
