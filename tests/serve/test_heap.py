# SPDX-License-Identifier: Apache-2.0
"""What a server's garbage collector looks at: not the models, and those that have gone are freed all the same."""

from tests.processes import run_python

# In processes of their own: servers of other tests may leave objects out of the collections of this one.
LEFT_OUT = """
import gc, weakref
from terarec.serve.process import settled_heap

class Node:
    def __init__(self):
        self.own = self

def is_looked_at(node):
    return any(one is node for one in gc.get_objects())

node = Node()
gone = weakref.ref(node)
with settled_heap() as settle:
    assert gc.get_freeze_count() > 1000 and not is_looked_at(node)
    del node
    gc.collect()
    assert gone() is not None
    settle()
    assert gone() is None and gc.get_freeze_count() > 1000
assert gc.get_freeze_count() == 0
print("done")
"""

FIRST = """
import gc
from terarec.serve.process import settled_heap

def is_looked_at(node):
    return any(one is node for one in gc.get_objects())

with settled_heap() as settle:
    loaded = [[]]
    assert is_looked_at(loaded)
    gc.collect()
    assert not is_looked_at(loaded)
    for _ in range(20):
        gc.collect()
    later = [[]]
    gc.collect()
    assert is_looked_at(later)
    settle()
    assert not is_looked_at(later)
assert not gc.callbacks
print("done")
"""


def test_what_is_there_is_left_out_and_freed_when_it_has_gone() -> None:
    ended = run_python(LEFT_OUT)
    assert ended.stdout == "done\n", ended.stderr


def test_what_the_first_requests_load_is_left_out_too() -> None:
    """Not for ever: `settle` alone frees cycles of what is left out."""
    ended = run_python(FIRST)
    assert ended.stdout == "done\n", ended.stderr
