# SPDX-License-Identifier: Apache-2.0
"""Entries of a directory that are replaced together: no rename does so at once, so the next call ends a killed one.

New entries are written to a directory of work first, such as ``<directory>/.partial``. Then the former ones move into
that, and the new ones to their places. A kill in between leaves all that is needed to go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from terarec.errors import StorageError
from terarec.io.files import flush, flush_tree, real_path
from terarec.io.locks import wait_for_lock
from terarec.io.owned import FILES, OWNER_LOCK, OwnedDirectory, owned_directories, remove_abandoned
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import is_temporary, remove_tree

LOCK_FILE = ".lock"
"""Lock of the exchanges of a directory."""
_FORMER, _EMPTIED, _DONE = ".terarec-former", ".terarec-emptied", ".terarec-done"
_ENTRIES = "new"


def exchange(work: Path, directory: Path, names: Sequence[str]) -> None:
    """Replace entries of `directory` by those of `work`; those that are not there are removed.

    An error leaves both as they were. After a kill, and after an error that cannot be undone, `end_exchange` goes on.
    The caller holds the lock `LOCK_FILE`, and removes `work` unless `is_begun`.

    Args:
        work: A directory on the same disk, with a marker, and no entry of a name of this module.
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
    own = not work.is_symlink() and is_temporary(work)
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
    return _end(work, directory, names, None if is_locked else directory / LOCK_FILE)


def _end(work: Path, directory: Path, names: Sequence[str], lock: Path | None) -> bool:
    if not is_begun(work):
        return False
    try:
        with nullcontext() if lock is None else wait_for_lock(lock):
            if is_begun(work):  # the holder of the lock may have ended it
                _exchange(work, directory, names, [])
                remove_tree(work, ignore_errors=True)
    except OSError as error:
        if not is_begun(work):  # its owner has ended it, and removed the place of the lock
            return True
        problem = f"a save was interrupted, which the next call has to complete, and cannot: {error.strerror or error}"
        raise StorageError(directory, problem) from error
    return True


class _WorkExchange(OwnedDirectory):
    """A directory of temporary files for an exchange; one that was begun and could not be undone outlives the block."""

    def __init__(self, parent: Path, prefix: str, name: str) -> None:
        super().__init__(parent, prefix)
        self.new = self.files / name

    def work(self) -> Path:
        """Return the directory of the exchange."""
        return self.files

    @override
    def __exit__(self, *_: object) -> None:
        if is_begun(self.work()):  # the next call goes on with it
            self.release()
        else:
            self.close()


class OwnedExchange(_WorkExchange):
    """A directory of temporary files beside `out` from which one of them takes the place of `out`.

    Attributes:
        out: The place.
        new: What is to be there.
    """

    def __init__(self, out: Path) -> None:
        end_replacement(out)  # or what it needs would be removed as abandoned
        super().__init__(out.parent, f"{out.name}{PARTIAL_SUFFIX}", out.name)
        self.out = out

    def exchange(self) -> None:
        """Flush what is new, and let it take the place of what is there, which is removed."""
        exchange(self.files, self.out.parent, (self.out.name,))


class EntriesExchange(_WorkExchange):
    """A directory of temporary files in `directory` whose entries take the places of those of the same names together.

    Attributes:
        directory: The places.
        new: Directory of what is to be there.
    """

    def __init__(self, directory: Path) -> None:
        end_entries(directory)  # or what it needs would be removed as abandoned
        super().__init__(directory, PARTIAL_SUFFIX, _ENTRIES)
        self.directory = directory

    @override
    def work(self) -> Path:
        return self.new

    def exchange(self) -> None:
        """Flush what is new, and let it take the places of what is there, which is removed."""
        exchange(self.new, self.directory, _entries(self.new))


def end_entries(directory: Path) -> bool:
    """Go on with the exchange of entries by `EntriesExchange` that was killed, and return whether there was one.

    Readers of such entries call it, of which they find one or more missing.

    Raises:
        StorageError: The directory cannot be written.
    """
    is_ended = False
    for place in owned_directories(directory, PARTIAL_SUFFIX):
        work = place / FILES / _ENTRIES
        if is_begun(work) and _end(work, directory, _entries(work), place / OWNER_LOCK):
            is_ended = True
            remove_abandoned(place)
    return is_ended


def _entries(work: Path) -> list[str]:
    # A file that refers to another by its own name and more (x.onnx, x.onnx.data) goes first, and comes last.
    return sorted({entry.name for entry in work.iterdir()} - {_FORMER, _EMPTIED, _DONE})


def end_replacement(out: Path) -> bool:
    """Go on with the replacement of a directory by `OwnedExchange` that was killed, and return whether there was one.

    Readers of such a directory call it, in which they find nothing else.

    Raises:
        StorageError: The directory cannot be written.
    """
    out = real_path(out)
    if os.path.lexists(out):  # a kill before the first rename and after the last one leaves what is to be there
        return False
    is_ended = False
    for work in owned_directories(out.parent, f"{out.name}{PARTIAL_SUFFIX}"):
        if _end(work / FILES, out.parent, (out.name,), work / OWNER_LOCK):
            is_ended = True
            remove_abandoned(work)
    return is_ended


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
