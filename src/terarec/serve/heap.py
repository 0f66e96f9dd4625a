# SPDX-License-Identifier: Apache-2.0
"""What the garbage collector looks at while a server runs: what requests allocate, and not all models each time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Leave what is there now out of collections in the block; yields a function that does so again.

    A full collection looks at 300,000 objects of torch and of a model, which takes 130 ms with the interpreter's lock
    held. The objects of 64 requests in flight were enough to cause one every few hundred requests. The function is to
    be called when a model has come or gone: it looks at all objects once, so that cycles of the old model are freed.
    """

    def settle() -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    settle()
    try:
        yield settle
    finally:
        gc.unfreeze()
