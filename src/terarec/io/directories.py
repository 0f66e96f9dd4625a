# SPDX-License-Identifier: Apache-2.0
"""Directories that appear complete or not at all: written next to their place, flushed, then renamed.

At once, or phase by phase under a lock: after a kill the next run continues from the committed phases.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from terarec.errors import ClusterError, FormatError, NoSpaceError, RunInterruptedError, StorageError
from terarec.io.exchange import EntriesExchange, OwnedExchange, end_replacement
from terarec.io.files import DISK_FULL, flush, flush_tree, read_versioned_json, real_path, write_versioned_json
from terarec.io.locks import file_lock
from terarec.io.remote import PARTIAL_SUFFIX, is_remote, upload
from terarec.io.removal import empty, mark, published, remove_tree
from terarec.spec.checks import FieldError


@contextmanager
def atomic_dir(out: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """Yield a temporary directory next to `out`, renamed to `out` when the block succeeds and removed otherwise.

    Its content is on the disk before it is renamed, and the new name is when the block ends.

    A kill leaves the temporary directory (``<out>.partial-<process>-<8 digits>``), and no `out`, or the former one. The
    next call for the same `out` removes what is left; where the kill fell between the renames that replace a former
    `out`, it does the others first, as readers do by `end_replacement`.

    Args:
        out: Directory to create; it must not exist, be empty, or be replaceable.
        replaceable: Pattern of the names in a directory that may be replaced; None for no replacement.

    Raises:
        ConfigError: `out` is a file, or not empty.
        StorageError: The disk is full, or cannot be written.
    """
    out = real_path(out)
    work = OwnedExchange(out)
    check_replaceable(out, replaceable)
    with rewrite_error_paths(work.path, out, new=work.new), ensure_parents(out), work:
        work.new.mkdir()
        yield work.new
        _publish(work, replaceable)


@contextmanager
def atomic_entries(directory: str | Path, *, replaceable: str = "") -> Iterator[Path]:
    """Yield a temporary directory whose entries move to `directory` when the block succeeds.

    They replace entries of the same names. None does before all are written and each is known to be allowed there; a
    block that fails leaves `directory` as it was. On a disk a file alone appears by a rename, several entries by
    an exchange: after a kill in it some are missing until the next call for `directory`, or a reader by `end_entries`,
    goes on with it, and none is beside one of another call. For a URL, files are uploaded next to their places first
    and then moved there one by one.

    Args:
        directory: Path or URL; created if missing.
        replaceable: Pattern of the names in a folder that may be replaced.

    Raises:
        ConfigError: A folder is at the place of a new file, or holds files of others.
        OSError: `directory` cannot be created.
        StorageError: The disk is full, or cannot be written.
    """
    if is_remote(directory):
        with tempfile.TemporaryDirectory(prefix="terarec-") as local:
            partial = Path(local)
            with rewrite_error_paths(partial, Path(str(directory))):
                yield partial
            upload(partial, str(directory), replaceable=replaceable)
        return
    out = real_path(directory)
    # Inside `out`, so that both are on one file system: a rename across two would be a copy.
    out.mkdir(parents=True, exist_ok=True)
    work = EntriesExchange(out)
    with rewrite_error_paths(work.path, out, new=work.new), work:
        work.new.mkdir()
        yield work.new
        _move_entries(work, replaceable)


def _move_entries(work: EntriesExchange, replaceable: str) -> None:
    out, entries = work.directory, list(work.new.iterdir())
    flush_tree(work.new)  # before the checks, as it may take minutes
    for entry in entries:
        target = out / entry.name
        if entry.is_dir():
            end_replacement(target)
            check_replaceable(target, replaceable)
        elif target.is_dir():
            raise FieldError("", "out", f"{target} is a folder, expected a file or nothing there")
    if len(entries) == 1 and not entries[0].is_dir():  # there is no moment without the file
        os.replace(entries[0], out / entries[0].name)
        flush(out)
    elif entries:
        work.exchange()


def check_replaceable(out: Path, pattern: str | None = None) -> None:
    """Raise `ConfigError` unless `out` is free, or holds nothing but names that match `pattern`."""
    if not os.path.lexists(real_path(out)):
        return
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else [out.name]
    if names and (pattern is None or not out.is_dir()):
        raise FieldError("", "out", f"{out} exists and is not empty, expected a new or an empty directory")
    for name in names:
        if not re.fullmatch(pattern or "", name):
            raise FieldError("", "out", f"{out} holds {name!r}, expected a directory with nothing of others in it")


@contextmanager
def ensure_parents(path: Path) -> Iterator[None]:
    """Create the directories above `path`; after an error remove those that were created and are empty."""
    absent = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            # One that somebody else has written to in the meantime is not empty, and stays.
            for parent in absent:
                parent.rmdir()
        raise


@contextmanager
def rewrite_error_paths(partial: Path, out: Path, *, new: Path | None = None) -> Iterator[None]:
    """Replace `partial` by `out`, which the user knows, in errors of writing.

    Args:
        partial: Temporary directory.
        out: What becomes of it, or of `new`.
        new: Directory in `partial`.

    Raises:
        FormatError: For data that the file cannot hold.
        StorageError: For an error of the disk, in one line.
    """
    try:
        yield
    except (FormatError, StorageError) as error:
        is_kept = isinstance(error, FormatError) and partial.exists()  # as the journal of a killed run is
        if is_kept or str(partial) not in str(error):
            raise
        parts = (
            part.replace(str(new or partial), str(out)).replace(str(partial), str(out))
            for part in (error.where, error.problem)
        )
        raise next(kind for kind in (NoSpaceError, StorageError, FormatError) if isinstance(error, kind))(
            *parts
        ) from error
    except OSError as error:
        if isinstance(error, ValueError):  # a FormatError such as a missing source is complete already
            raise
        reason = f"{error.strerror or error}"
        place = Path(error.filename) if isinstance(error.filename, str) else partial
        if not (place.is_relative_to(partial) or place.is_relative_to(out) or out.is_relative_to(place)):
            raise StorageError(place, reason) from error  # of a file that was read
        if error.errno in DISK_FULL:
            raise NoSpaceError(out, f"{reason}; nothing was left behind") from error
        raise StorageError(out, f"cannot write there: {reason}") from error


def replace_directory(partial: Path, out: Path, replaceable: str | None = None) -> None:
    """Flush `partial` to the disk and rename it to `out`; remove a former `out` of names that are `replaceable`."""
    with OwnedExchange(out) as work:
        os.replace(partial, work.new)
        try:
            _publish(work, replaceable)
        except BaseException:
            with suppress(OSError):  # as it was
                os.replace(work.new, partial)
            raise


def _publish(work: OwnedExchange, replaceable: str | None) -> None:
    if _is_free(work.out):
        flush_tree(work.new)
        os.replace(work.new, work.out)
        flush(work.out.parent)
    else:
        # Again, for a file that appeared while this one was written.
        check_replaceable(work.out, replaceable)
        # A rename replaces no directory that holds files.
        work.exchange()


def _is_free(out: Path) -> bool:
    return not out.exists() or (out.is_dir() and not any(out.iterdir()))  # a rename replaces an empty directory alone


JOURNAL_FILE = "journal.json"
FORMAT = "terarec.journal"
VERSION = 1


class Journal:
    """Committed phases of a directory under construction, in its ``journal.json``, which is made with the object.

    Args:
        directory: Directory under construction.
        fingerprint: Inputs of the phases: the name of each part, and a text that changes whenever it does.

    Attributes:
        directory: Directory under construction.

    Raises:
        ConfigError: Phases of another fingerprint exist already.
        FormatError: The file is damaged.
        StorageError: The disk is full.
    """

    def __init__(self, directory: Path, fingerprint: Mapping[str, str]) -> None:
        self.directory = directory
        self._path = directory / JOURNAL_FILE
        self._fingerprint = dict(fingerprint)
        self._phases: dict[str, Any] = {}
        if self._path.exists():
            recorded = _read(self._path)
            _check(recorded["fingerprint"], fingerprint, directory)
            self._phases = recorded["phases"]
        else:
            # Before the first phase: what a killed run leaves in that belongs to these inputs, too.
            self._write({})

    @property
    def phases(self) -> tuple[str, ...]:
        """Committed phases, in the order of their commits."""
        return tuple(self._phases)

    def result(self, phase: str) -> Any | None:
        """Return the result that `commit` stored for `phase`; None if the phase is not committed."""
        return self._phases.get(phase)

    def commit(self, phase: str, result: Mapping[str, Any]) -> None:
        """Record that `phase` is done, whose files are on the disk already: the record must not outlive them.

        Raises:
            StorageError: The disk is full.
        """
        self._write({**self._phases, phase: dict(result)})

    def remove(self) -> None:
        """Remove the file: the directory is complete, and no phase is kept any more."""
        self._phases = {}
        self._path.unlink(missing_ok=True)

    def _write(self, phases: dict[str, Any]) -> None:
        write_versioned_json(self._path, FORMAT, VERSION, {"fingerprint": self._fingerprint, "phases": phases})
        # After the file is written: on a full disk the phase does not count as done.
        self._phases = phases


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
    out = real_path(out)
    check_replaceable(out)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    # Beside the directory, so that the lock is held until that has its new name, or is removed.
    lock_file = out.with_name(f".{out.name}.lock")
    with rewrite_error_paths(partial, out), ensure_parents(out), ExitStack() as locks:
        with rewrite_error_paths(lock_file, out):
            is_held = locks.enter_context(file_lock(lock_file))
        if not is_held:
            raise FieldError("", "out", f"{out} is being written by another run, expected one run at a time")
        check_replaceable(out)  # again: another run may have ended in between
        partial.mkdir(exist_ok=True)
        mark(partial, until_renamed=True)  # or a kill after the rename would leave the directory as temporary
        # Under the lock: what another run is writing stays. Without a journal nobody knows what the files belong to.
        if restart or not (partial / JOURNAL_FILE).exists():
            empty(partial)
        journal = Journal(partial, fingerprint)
        try:
            yield journal
            # Flushing may take minutes, in which the phases are kept.
            flush_tree(partial)
            journal.remove()
            _rename(partial, out)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | ClusterError) and journal.phases:
                kept = f"{partial} keeps the phases {', '.join(journal.phases)}; the same call continues from there"
                if isinstance(error, ClusterError):
                    raise ClusterError(error.where, f"{error.problem}; {kept}", phases=journal.phases) from error
                raise RunInterruptedError(kept, phases=journal.phases) from error
            # Any other error comes from the data or the disk, and would come again: the next call starts anew.
            remove_tree(partial, ignore_errors=True)
            raise


def _rename(partial: Path, out: Path) -> None:
    check_replaceable(out)  # again, for a file that appeared meanwhile
    os.replace(partial, out)
    published(out)
    flush(out.parent)
    flush(out)  # without the journal and the marker


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_versioned_json(path, FORMAT, VERSION)
        if not all(isinstance(content.get(part), dict) for part in ("fingerprint", "phases")):
            raise FormatError(path, "expected the objects fingerprint and phases")
        return content
    except FormatError as error:
        raise FormatError(
            error.where, f"{error.problem}; restart=True discards the work of the interrupted run"
        ) from error


def _check(recorded: Mapping[str, str], expected: Mapping[str, str], directory: Path) -> None:
    for part, value in expected.items():
        if recorded.get(part) != value:
            problem = (
                f"an interrupted run left {directory} with other {part}, expected the same to continue, "
                "or restart=True to discard its work"
            )
            raise FieldError("", "out", problem)
