# SPDX-License-Identifier: Apache-2.0
"""What a server's garbage collector looks at: not the models, and those that have gone are freed all the same."""

import gc
import weakref

from terarec.serve.heap import settled_heap


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_there_is_left_out_and_freed_when_it_has_gone() -> None:
    node = Node()
    gone = weakref.ref(node)
    before = gc.get_freeze_count()
    with settled_heap() as settle:
        assert gc.get_freeze_count() > before
        assert not any(one is node for one in gc.get_objects())
        del node
        gc.collect()
        assert gone() is not None
        settle()
        assert gone() is None
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_what_the_first_requests_load_is_left_out_too() -> None:
    with settled_heap() as settle:
        loaded = Node()
        assert any(one is loaded for one in gc.get_objects())
        gc.collect()
        assert not any(one is loaded for one in gc.get_objects())
        # Not for ever: what is left out is freed in cycles by `settle` alone.
        for _ in range(20):
            gc.collect()
        later = Node()
        gc.collect()
        assert any(one is later for one in gc.get_objects())
        settle()
        assert not any(one is later for one in gc.get_objects())
    assert not any(call.__module__ == "terarec.serve.heap" for call in gc.callbacks)
