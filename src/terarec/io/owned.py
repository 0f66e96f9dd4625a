# SPDX-License-Identifier: Apache-2.0
"""Directories of one process for temporary files, of which the next one removes those that killed processes left."""

from __future__ import annotations

import os
import re
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from terarec.io.directories import file_lock, remove_abandoned
from terarec.io.removal import mark, remove_tree

_PAUSE_SECONDS = 0.05


def own_directory(parent: Path, prefix: str) -> Path:
    """Return the path of a new directory for the files of one model; remove those that killed processes left."""
    for former in parent.glob(f"{prefix}-*"):
        # Only names that this function gives: the directory may hold others that begin so.
        if re.fullmatch(r"\d+-[0-9a-f]{8}", former.name.removeprefix(f"{prefix}-")):
            remove_abandoned(former)
    return parent / f"{prefix}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


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
        self.files = self.path / "files"
        self._owner = ExitStack()

    def __enter__(self) -> Self:
        while not self._is_owned():
            time.sleep(_PAUSE_SECONDS)
        self.files.mkdir()
        mark(self.files)  # for the one that removes what this one has left
        return self

    def _is_owned(self) -> bool:
        # For one that starts at the same moment the directory is abandoned before it is locked.
        try:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)  # a random name, so that nobody else has made it
            return self._owner.enter_context(file_lock(self.path / "owner.lock"))
        except FileNotFoundError:
            return False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory."""
        remove_tree(self.files, ignore_errors=True)
        self._owner.close()
        # Without its lock it is abandoned: one that starts now removes it, too.
        with suppress(OSError):
            self.path.rmdir()
