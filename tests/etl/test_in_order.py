"""Threads work ahead within bounds, and hand out results and errors in the order of the input."""

import threading
import time
from contextlib import closing

import pytest

from terarec.etl.in_order import map_in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads):
    def work(item):
        time.sleep(0.002 if item % 3 == 0 else 0)
        return item * item

    assert list(map_in_order(work, range(50), threads)) == [item * item for item in range(50)]
    assert list(map_in_order(work, [], threads)) == []


def test_few_items_are_under_way():
    begun = []
    under_way = []
    with closing(map_in_order(lambda item: begun.append(item) or item, range(1000), 2)) as results:
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
        seen.extend(map_in_order(work, range(20), 3))
    assert seen == [0, 1, 2, 3, 4]


def test_an_error_of_the_input_is_raised_after_what_came_before():
    def items():
        yield from range(4)
        raise OSError("no more")

    seen = []
    with pytest.raises(OSError, match="no more"):
        seen.extend(map_in_order(lambda item: item, items(), 3))
    assert seen == [0, 1, 2, 3]


def test_closing_early_ends_the_threads():
    before = threading.active_count()
    with closing(map_in_order(lambda item: item, iter(int, 1), 3)) as results:
        assert next(results) == 0
    assert threading.active_count() == before
