"""Memory that readers use again."""

import threading

import numpy as np
import pytest

from terarec.formats import empty_from_pool

LARGE = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_of_a_dropped_array_is_used_again() -> None:
    first = empty_from_pool((LARGE,), np.uint8)
    at = address(first)
    del first
    assert address(empty_from_pool((LARGE,), np.uint8)) == at


def test_memory_is_kept_while_a_view_of_it_lives() -> None:
    first = empty_from_pool((2, LARGE), np.uint8)
    view = first[1, 5:].view(np.uint8)
    view[:] = 7
    del first
    others = [empty_from_pool((2, LARGE), np.uint8) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert (view == 7).all()
    assert len({address(other) for other in others}) == 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (131_071,), (131_073,), (1000, 333)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64, "<i8"])
def test_arrays_have_the_shape_and_type(shape: tuple[int, ...], dtype: str) -> None:
    array = empty_from_pool(shape, dtype)
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not address(array) % array.itemsize


def test_threads_never_share_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            array = empty_from_pool((LARGE // 8,), np.int64)
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
