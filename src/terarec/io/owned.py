# SPDX-License-Identifier: Apache-2.0
"""Directories of temporary files whose owner holds a lock in them: what a killed one leaves, the next one removes."""

from __future__ import annotations

import glob
import os
import re
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from terarec.errors import ConfigError
from terarec.io.locks import HAS_LOCKS, file_lock
from terarec.io.removal import mark, remove_tree

FILES = "files"
"""Directory of the files, in that of their owner."""
OWNER_LOCK = "owner.lock"
"""Lock of the owner."""
OWNED = r"-\d+-[0-9a-f]{8}"
"""End of the names of these directories."""
_PAUSE_SECONDS = 0.05


def remove_abandoned(directory: Path) -> bool:
    """Remove a directory whose owner locks files ``*.lock`` in it, unless a process holds one of them.

    It stays, too, with a file that is no lock: its owner keeps nothing else there but directories.

    Where the system has no locks nothing is removed.

    Returns:
        Whether it was removed.
    """
    if not HAS_LOCKS:  # every caller of `file_lock` counts as the holder
        return False
    try:
        with ExitStack() as locks:
            lock_files = list(directory.glob("*.lock"))
            others = set(directory.iterdir()) - set(lock_files)
            # Before the locks, which go when they are released: what is none of the owner's keeps the directory.
            if not all(entry.is_dir() for entry in others):
                return False
            if not all(locks.enter_context(file_lock(path)) for path in lock_files):
                return False  # of a living process
            # Without a lock file nobody says whether the owner lives. But where there is one owner, it locks before it
            # writes: without a lock this is what it could not remove at its end.
            if lock_files or re.search(rf"{OWNED}$", directory.name):
                for entry in others:
                    remove_tree(entry)
        directory.rmdir()  # last, so that a removal that ends early leaves the locks to the next one
    except (OSError, ConfigError):  # another removal, or a directory of others
        return False
    return True


def own_directory(parent: Path, prefix: str) -> Path:
    """Return the path of a new directory for the files of one model; remove those that killed processes left."""
    for former in owned_directories(parent, prefix):
        remove_abandoned(former)
    return parent / f"{prefix}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def owned_directories(parent: Path, prefix: str) -> list[Path]:
    """Return the directories that `own_directory` has named."""
    # Only its names: the directory may hold others that begin so.
    return [
        path
        for path in parent.glob(f"{glob.escape(prefix)}-*")
        if re.fullmatch(OWNED, path.name.removeprefix(prefix)) and not path.is_symlink()
    ]


class OwnedDirectory:
    """A directory for temporary files, from its block on, that goes at the end of the block.

    What is left by a process that was killed goes when the next one of its prefix is made. Forks of the process own the
    directory, too: it is abandoned once the last one is gone.

    Attributes:
        path: The directory.
        files: What may be written to, in it.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path = own_directory(parent, prefix)
        self.files = self.path / FILES
        self._owner = ExitStack()

    def __enter__(self) -> Self:
        try:
            while not self._is_owned():
                time.sleep(_PAUSE_SECONDS)
            self.files.mkdir()
            mark(self.files)  # for the one that removes what this one has left
        except BaseException:
            self.close()
            raise
        return self

    def _is_owned(self) -> bool:
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)  # a random name, so that nobody else has made it
        # For one that starts at the same moment the directory is abandoned before it is locked.
        try:
            return self._owner.enter_context(file_lock(self.path / OWNER_LOCK))
        except FileNotFoundError:
            return False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory."""
        with suppress(OSError):  # an empty one needs no open file, of which the process may have too many
            self.files.rmdir()
        remove_tree(self.files, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Own the directory no longer; what is in it stays until the next one of its prefix is made."""
        self._owner.close()
        # Without its lock it is abandoned: one that starts now removes it, too.
        with suppress(OSError):
            self.path.rmdir()
