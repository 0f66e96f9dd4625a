# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another thread or process does."""

import socket
import time
from collections.abc import Callable

PATIENCE = 200.0
"""Seconds for what takes 2 s on an idle machine; a process may get a small part of a core."""


def wait_for(condition: Callable[[], bool], *, seconds: float = PATIENCE, every: float = 0.01) -> None:
    """Return once a condition holds.

    Args:
        condition: What is called again and again.
        seconds: How long to wait at most.
        every: Shortest pause in seconds between the calls; one that takes long is followed by a longer pause, so that
            what it waits for gets the core.

    Raises:
        AssertionError: It did not hold within that time.
    """
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if condition():
            return
        assert time.monotonic() < end, f"the condition does not hold after {seconds:g} s"
        time.sleep(max(every, min(0.5, 3 * (time.monotonic() - begun))))


def wait_until_refused(address: tuple[str, int]) -> None:
    """Return once nobody listens at an address. A socket that is being closed may reset who is connecting."""
    while True:
        try:
            socket.create_connection(address, timeout=PATIENCE).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            pass
        time.sleep(0.01)
