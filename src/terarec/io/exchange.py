# SPDX-License-Identifier: Apache-2.0
"""Entries of a directory that are replaced together: no rename does so at once, so the next call ends a killed one.

New entries are written to ``<directory>/.partial`` first. Then the former ones move to ``former`` in it, and the new
ones to the directory. A kill in between leaves all that is needed to go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from terarec.errors import StorageError
from terarec.io.directories import wait_for_lock
from terarec.io.files import flush, flush_tree
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import MARKER, remove_tree

LOCK_FILE = ".lock"
"""Lock of the exchanges of a directory."""
_FORMER, _EMPTIED, _DONE = "former", "emptied", "done"


def exchange(work: Path, directory: Path, names: Sequence[str]) -> None:
    """Replace entries of `directory` by those of `work`; those that are not there are removed.

    An error leaves both as they were. After a kill, and after an error that cannot be undone, `end_exchange` goes on.
    The caller holds the lock `LOCK_FILE`, and removes `work` unless `is_begun`.

    Args:
        work: ``<directory>/.partial``, with a marker, and no entry of a name of this module.
        directory: Directory of the entries.
        names: Names of the entries. A reader must take the directory for incomplete without the first one: it goes
            first and comes last.
    """
    flush_tree(work)
    # From here on all that is new is on the disk.
    (work / _FORMER).mkdir()
    flush(work)
    undo: list[Callable[[], object]] = [(work / _FORMER).rmdir]
    try:
        _exchange(work, directory, names, undo)
    except BaseException:
        with suppress(OSError):  # what cannot be undone `end_exchange` goes on with
            for step in reversed(undo):
                step()
        raise


def is_begun(work: Path) -> bool:
    """Return whether an exchange was begun in `work` and not ended: then it holds what exists nowhere else."""
    own = not work.is_symlink() and (work / MARKER).is_file()
    return own and (work / _FORMER).is_dir() and not (work / _FORMER).is_symlink()


def end_exchange(directory: Path, names: Sequence[str], *, is_locked: bool = False) -> bool:
    """Go on with an exchange that was killed, if there is one, and return whether there was.

    Args:
        directory: As for `exchange`.
        names: As for `exchange`.
        is_locked: Whether the caller holds the lock.

    Raises:
        StorageError: The directory cannot be written.
    """
    work = directory / PARTIAL_SUFFIX
    if not is_begun(work):
        return False
    try:
        with nullcontext() if is_locked else wait_for_lock(directory / LOCK_FILE):
            if is_begun(work):  # the holder of the lock may have ended it
                _exchange(work, directory, names, [])
                remove_tree(work, ignore_errors=True)
    except OSError as error:
        problem = f"a save was interrupted, which the next call has to complete, and cannot: {error.strerror or error}"
        raise StorageError(directory, problem) from error
    return True


def _exchange(work: Path, directory: Path, names: Sequence[str], undo: list[Callable[[], object]]) -> None:
    former, emptied = work / _FORMER, work / _EMPTIED
    moves = [(work / name, directory / name) for name in reversed(names)]
    if not emptied.is_dir():  # until then the directory has the former entries alone, and from then on the new ones
        _move_each([(directory / name, former / name) for name in names], undo)
        emptied.mkdir()
        undo.append(emptied.rmdir)
    _move_each(moves, undo)
    flush(directory)
    os.replace(former, work / _DONE)  # from here on `work` may be removed


def _move_each(moves: Sequence[tuple[Path, Path]], undo: list[Callable[[], object]]) -> None:
    for source, target in moves:
        undo.append(partial(_move, target, source))
        _move(source, target)


def _move(source: Path, target: Path) -> None:
    if os.path.lexists(source):
        os.replace(source, target)
