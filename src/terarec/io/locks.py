"""Locks between processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


def remove_abandoned(directory: Path) -> bool:
    """Remove a directory whose owner locks files ``*.lock`` in it, unless a process holds one of them.

    Where the system has no ``flock`` nothing is removed.

    Returns:
        Whether it was removed.
    """
    try:
        import fcntl  # noqa: F401 - without it `file_lock` holds nothing
    except ModuleNotFoundError:
        return False
    busy = TerarecError("busy")
    try:
        with ExitStack() as locks:
            held = list(directory.glob("*.lock"))
            for path in held:
                locks.enter_context(file_lock(path, busy))
            if held:
                for entry in set(directory.iterdir()) - set(held):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        directory.rmdir()  # last, so that a removal that ends early leaves the locks to the next one
    except (TerarecError, OSError):  # of a living process, or another removal
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
