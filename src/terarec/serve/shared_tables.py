# SPDX-License-Identifier: Apache-2.0
"""`SharedTables`: the workers of a server load versions by themselves, and have the rows of each in memory once.

The first worker that has loaded a version writes its rows to a file in memory, and all map it in place of their own.
The files go with the version, and at the latest with the server; what a killed one leaves, the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import DataNotFoundError
from terarec.io.directories import file_lock, try_lock, wait_for_lock
from terarec.io.opening import open_file
from terarec.io.removal import mark, remove_tree
from terarec.memory.files import own_directory

_PREFIX = "terarec-tables"
_LOADING = "loading.lock"
_MEMORY = Path("/dev/shm")
_PAUSE_SECONDS = 0.05


class SharedTables:
    """Files of rows that processes map. Made, and entered, by the process that forks them.

    Attributes:
        path: Directory of the files: in memory, or where temporary files are.
    """

    def __init__(self) -> None:
        has_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        self.path = own_directory(_MEMORY if has_memory else Path(tempfile.gettempdir()), _PREFIX)
        self._files = self.path / "tables"
        self._owner = contextlib.ExitStack()
        self._locks: dict[object, dict[Path, BufferedReader]] = {}  # of this process

    def __enter__(self) -> Self:
        # Forks hold it, too: the directory is abandoned once the last one is gone, and, for a server that starts at the
        # same moment, before it is locked.
        while not self._is_owned():
            time.sleep(_PAUSE_SECONDS)
        self._files.mkdir()
        mark(self._files)  # for a server that removes what this one has left
        return self

    def _is_owned(self) -> bool:
        try:
            self.path.mkdir(exist_ok=True)
            return self._owner.enter_context(file_lock(self.path / "owner.lock"))
        except FileNotFoundError:
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        remove_tree(self._files)
        self._owner.close()
        (self.path / _LOADING).unlink(missing_ok=True)  # of a process that was killed while it loaded
        # Without its lock it is abandoned: a server that starts now removes it, too.
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()

    def turn(self) -> contextlib.AbstractContextManager[bool]:
        """Let no other process load in the block: rows that are not shared yet are in memory once more at most."""
        return wait_for_lock(self.path / _LOADING)

    def share(self, model: nn.Module, identity: object) -> None:
        """Read the rows of a loaded model from files from now on, which are written if they are not there.

        Args:
            model: The model.
            identity: What tells its rows from all others; equal in all processes.

        Raises:
            StorageError: The file system is full; rows that are not shared yet stay where they are.
        """
        # Before they are mapped: what is held is not removed by a process that forgets it at this moment.
        self._hold(identity)
        collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
        for number, collection in enumerate(collections):
            collection.share_weights(self._files / f"{_name(identity)}-{number}")
        self._hold(identity)

    def forget(self, identity: object) -> None:
        """Let go of the files of a model, which go if no other process holds them. Rows that are mapped remain."""
        for path, file in self._locks.pop(identity, {}).items():
            with file:
                if try_lock(file):
                    path.unlink(missing_ok=True)

    def _hold(self, identity: object) -> None:
        locks = self._locks.setdefault(identity, {})
        for path in set(self._files.glob(f"{_name(identity)}-*")) - locks.keys():
            with contextlib.suppress(DataNotFoundError):
                file = open_file(path)
                # A process that has locked it alone removes it: then it is read, but not held.
                if try_lock(file, is_shared=True) and os.fstat(file.fileno()).st_nlink:
                    locks[path] = file
                else:
                    file.close()


def _name(identity: object) -> str:
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
