# SPDX-License-Identifier: Apache-2.0
"""`SharedTables`: the workers of a server load versions by themselves, and have the rows of each in memory once.

The first worker that has loaded a version writes its rows to a file in memory, and all map it in place of their own.
The files go with the version, also where the worker was killed that held it last, and at the latest with the server;
what a killed server leaves, the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import DataNotFoundError
from terarec.io.locks import try_lock, wait_for_lock
from terarec.io.opening import open_file
from terarec.io.owned import OwnedDirectory

_PREFIX = "terarec-tables"
_LOADING = "loading.lock"
_MEMORY = Path("/dev/shm")


class SharedTables:
    """Files of rows that processes map. Made, and entered, by the process that forks them.

    Attributes:
        path: Directory of the files: in memory, or where temporary files are.
    """

    def __init__(self) -> None:
        has_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        self._directory = OwnedDirectory(_MEMORY if has_memory else Path(tempfile.gettempdir()), _PREFIX)
        self.path, self._files = self._directory.path, self._directory.files
        self._locks: dict[object, dict[Path, BufferedReader]] = {}  # of this process

    def __enter__(self) -> Self:
        self._directory.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._directory.close()

    def turn(self) -> contextlib.AbstractContextManager[bool]:
        """Let no other process load in the block: rows that are not shared yet are in memory once more at most."""
        return wait_for_lock(self._files / _LOADING)

    def share(self, model: nn.Module, identity: object) -> None:
        """Read the rows of a loaded model from files from now on, which are written if they are not there.

        Files that no process holds any more, of one that was killed, are removed: of several processes, one at a time
        calls this (`turn`).

        Args:
            model: The model.
            identity: What tells its rows from all others; equal in all processes.

        Raises:
            StorageError: The file system is full; rows that are not shared yet stay where they are.
        """
        # Before they are mapped: what is held is not removed by a process that forgets it at this moment.
        self._hold(identity)
        self._remove_abandoned()
        collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
        for number, collection in enumerate(collections):
            collection.share_weights(self._files / f"{_name(identity)}-{number}")
        self._hold(identity)

    def forget(self, identity: object) -> None:
        """Let go of the files of a model, which go if no other process holds them. Rows that are mapped remain."""
        for path, file in self._locks.pop(identity, {}).items():
            with file:
                _remove_unused(path, file)

    def _remove_abandoned(self) -> None:
        # Also those in part, of one that was killed while it wrote.
        for path in self._files.glob("*-*"):
            with contextlib.suppress(DataNotFoundError), open_file(path) as file:
                _remove_unused(path, file)

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


def _remove_unused(path: Path, file: BufferedReader) -> None:
    """Remove an open file unless another process holds it."""
    if try_lock(file):
        path.unlink(missing_ok=True)


def _name(identity: object) -> str:
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
