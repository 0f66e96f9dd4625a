# SPDX-License-Identifier: Apache-2.0
"""The process of a server: what its garbage collector looks at, and what the manager that started it is told."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator, Mapping

from terarec.kernels.environment import notify_socket

_FIRST_COLLECTIONS = 8


@contextlib.contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Leave what is there now out of collections in the block; yields a function that does so again.

    A full collection looks at 300,000 objects of torch and of a model, which takes 130 ms with the interpreter's lock
    held. The objects of 64 requests in flight are enough to cause one every few hundred requests. The first requests
    load another 90,000: so what the first full collections leave is left out of later ones, too. Objects that are left
    out are freed when nothing refers to them, as any others; only their cycles stay.

    The function is to be called when a model has come or gone: it looks at all objects once, so that cycles of the old
    model are freed.
    """
    num_left = _FIRST_COLLECTIONS

    def settle() -> None:
        nonlocal num_left
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        num_left = _FIRST_COLLECTIONS

    def leave_out(phase: str, collection: Mapping[str, int]) -> None:
        nonlocal num_left
        if phase == "stop" and collection["generation"] == 2 and num_left:
            num_left -= 1
            gc.freeze()

    settle()
    gc.callbacks.append(leave_out)
    try:
        yield settle
    finally:
        gc.callbacks.remove(leave_out)
        gc.unfreeze()


_LOGGER = logging.getLogger(__name__)

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Tell the manager of the service, if one waits for it, that all is loaded, or that the server ends."""
    address = notify_socket()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # "@" stands for the zero byte that begins the name of a socket without a file.
            sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        _LOGGER.warning("the service manager at %s does not get %s: %s", address, state, error)
