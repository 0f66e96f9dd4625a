"""Locks between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.errors import TerarecError


@contextmanager
def file_lock(path: Path, busy: TerarecError) -> Iterator[None]:
    """Hold the lock file `path` during the block; the kernel releases it when the process dies, whatever kills it.

    Where the system has no ``flock`` (Windows) nothing is held.

    Args:
        path: The lock file; removed after the block.
        busy: Error to raise when another process, or this one, holds the lock.

    Raises:
        TerarecError: `busy`.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder may have removed or moved the file since it was opened: then this lock protects nothing.
            is_held = _is_at(file.fileno(), path)
        except BlockingIOError:
            is_held = False
        if not is_held:
            raise busy
        try:
            yield
        finally:
            if _is_at(file.fileno(), path):  # not the lock of another process at the same path
                path.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
