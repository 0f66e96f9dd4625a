# SPDX-License-Identifier: Apache-2.0
"""Locks of files, which the system releases when their holder dies, whatever ends it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from terarec.errors import ConfigError
from terarec.io.opening import open_file

_PAUSE_SECONDS = 0.01

HAS_LOCKS = find_spec("fcntl") is not None
"""Whether the system has ``flock``; Windows has not."""


def try_lock(file: int | IO[bytes], *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False where another holder has it, or the system has no locks.

    The kernel releases it when the process dies, whatever kills it. Any number of holders may share a lock.
    """
    if not HAS_LOCKS:
        return False
    import fcntl

    try:
        # `flock` and not `lockf`, whose lock ends when any descriptor of the file in this process is closed.
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` during the block, and yield whether it is held: False where another holder has it.

    Where the system has no locks (`HAS_LOCKS`) every caller counts as the holder.

    Args:
        path: The lock file; its holder removes it after the block.

    Raises:
        ConfigError: A file of others is there: lock files are empty. A link to nothing.
        FormatError: Something else than a file is there.
    """
    if not HAS_LOCKS:
        yield True
        return
    if path.is_symlink() and not path.exists():  # or an empty file would appear where it leads
        raise ConfigError(path, "is a link to nothing, expected no file, or an empty one; it stays")
    # Not "w": until the lock is held, the content of the file belongs to its holder.
    with open_file(path, "ab") as file:
        if os.fstat(file.fileno()).st_size:
            raise ConfigError(path, "holds something, expected no file, or an empty one; it stays")
        # The former holder may have removed or moved the file since it was opened: then this lock protects nothing.
        is_held = try_lock(file) and is_at(file.fileno(), path)
        if not is_held:
            file.close()  # and not at the end of the block, which may last
        try:
            yield is_held
        finally:
            if is_held and is_at(file.fileno(), path):  # not the lock of another process at the same path
                # A late release may come while the owner of the directory removes it.
                path.unlink(missing_ok=True)


@contextmanager
def wait_for_lock(path: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Hold the lock file `path` as `file_lock` does, once its holder has released it.

    Args:
        path: The lock file.
        seconds: Time after which the block begins without it.
    """
    end = time.monotonic() + seconds
    while True:
        with file_lock(path) as is_held:
            if is_held or time.monotonic() > end:
                yield is_held
                return
        time.sleep(_PAUSE_SECONDS)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
