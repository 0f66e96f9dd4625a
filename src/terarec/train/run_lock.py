"""One training at a time in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.errors import ConfigError


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block; the kernel releases it when the process dies, whatever kills it.

    Where the system has no ``flock`` (Windows) nothing is held.

    Raises:
        ConfigError: another process, or this one, holds it.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who held it may have removed the file since it was opened: then this lock is nobody's.
            is_held = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        if not is_held:
            raise ConfigError(f"{path.parent}: another training runs there, expected a directory of its own")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
