"""Locks between processes, and directories that one process at a time writes, phase by phase.

They appear when they are complete; after a kill the next run continues from the committed phases.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from terarec.errors import ClusterError, FormatError, RunInterruptedError, TerarecError
from terarec.io.atomic import (
    check_replaceable,
    ensure_parents,
    replace_directory,
    rewrite_error_paths,
    under_construction,
)
from terarec.io.json_files import read_versioned_json, write_versioned_json
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.spec import FieldError

LOCK_FILE = "lock"
JOURNAL_FILE = "journal.json"
FORMAT = "terarec.journal"
VERSION = 1


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
    # Not "w": until the lock is held, the content of the file belongs to its holder.
    with path.open("a") as file:
        try:
            # `flock` and not `lockf`, whose lock ends when any descriptor of the file in this process is closed.
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
            # Without a lock file nobody says whether the owner lives: then only an empty directory is removed.
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


class Journal:
    """Committed phases of a directory under construction, in its ``journal.json``.

    Args:
        directory: Directory under construction.
        fingerprint: Inputs of the phases: the name of each part, and a text that changes whenever it does.

    Attributes:
        directory: Directory under construction.

    Raises:
        ConfigError: Phases of another fingerprint exist already.
        FormatError: The file is damaged.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self._path = directory / JOURNAL_FILE
        self._fingerprint = dict(fingerprint)
        self._phases: dict[str, Any] = {}
        if self._path.exists():
            found = _read(self._path)
            _check(found["fingerprint"], fingerprint, directory)
            self._phases = found["phases"]

    @property
    def phases(self) -> tuple[str, ...]:
        """Committed phases, in the order of their commits."""
        return tuple(self._phases)

    def result(self, phase: str) -> Any | None:
        """Return the result that `commit` stored for `phase`; None if the phase is not committed."""
        return self._phases.get(phase)

    def commit(self, phase: str, result: Mapping[str, Any]) -> None:
        """Record that `phase` is done; its atomic files reach the disk before. Others must be there already.

        Raises:
            StorageError: The disk is full.
        """
        phases = {**self._phases, phase: dict(result)}
        content = {"fingerprint": self._fingerprint, "phases": phases}
        write_versioned_json(self._path, FORMAT, VERSION, content, durable=True)
        # After the file is written: on a full disk the phase does not count as done.
        self._phases = phases

    def remove(self) -> None:
        """Remove the file: the directory is complete."""
        self._path.unlink(missing_ok=True)


@contextmanager
def resumable_dir(out: Path, fingerprint: Mapping[str, str], *, restart: bool = False) -> Iterator[Journal]:
    """Yield the journal of ``<out>.partial``, locked, to write into; renamed to `out` when the block succeeds.

    An error in the block removes it. A kill leaves it, and so do Ctrl-C and a cluster error once a phase is
    committed: the next call continues from it.

    Args:
        out: Directory to create; it must not exist, or be empty.
        fingerprint: Fingerprint of the work, see `Journal`.
        restart: Whether the work of an interrupted call is discarded first.

    Raises:
        ClusterError: From the block; what is committed was kept.
        ConfigError: `out` is a file or not empty, another process writes it, or other work was begun there; what is
            there stays as it is.
        RunInterruptedError: Ctrl-C; what is committed was kept.
        StorageError: The disk is full, or cannot be written.
    """
    out = out.resolve()
    check_replaceable(out)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    busy = FieldError("", "out", f"{out} is being written by another run, expected one run at a time")
    with rewrite_error_paths(partial, out), ensure_parents(out):
        partial.mkdir(exist_ok=True)
        with file_lock(partial / LOCK_FILE, busy):
            # Under the lock: what another run is writing stays.
            if restart:
                _empty(partial)
            journal = Journal(partial, fingerprint)
            try:
                with under_construction(partial):
                    yield journal
                    journal.remove()
                    # Before the rename, or the complete directory would hold the file for a moment, or for good after a
                    # kill.
                    (partial / LOCK_FILE).unlink()
                    replace_directory(partial, out)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | ClusterError) and journal.phases:
                    kept = f"{partial} keeps the phases {', '.join(journal.phases)}; the same call goes on from there"
                    if isinstance(error, ClusterError):
                        raise ClusterError(error.where, f"{error.problem}; {kept}", phases=journal.phases) from error
                    raise RunInterruptedError(kept, phases=journal.phases) from error
                # Any other error comes from the data or the disk, and would come again: the next call starts anew.
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        # The lock is that of this very file: with another one at the path a second run could lock that.
        elif entry.name != LOCK_FILE:
            entry.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_versioned_json(path, FORMAT, VERSION)
        if not all(isinstance(found.get(part), dict) for part in ("fingerprint", "phases")):
            raise FormatError(path, "expected the objects fingerprint and phases")
        return found
    except FormatError as error:
        raise FormatError(
            error.where, f"{error.problem}; restart=True discards the work of the interrupted run"
        ) from error


def _check(found: Mapping[str, str], expected: Mapping[str, str], directory: Path) -> None:
    for part, value in expected.items():
        if found.get(part) != value:
            problem = (
                f"an interrupted run left {directory} with other {part}, expected the same to go on, "
                "or restart=True to discard its work"
            )
            raise FieldError("", "out", problem)
