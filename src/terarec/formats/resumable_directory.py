"""Directories that appear whole, and whose unfinished work outlives a kill for the next run to go on with."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from terarec.errors import ClusterError, RunInterruptedError
from terarec.formats.journal import Journal
from terarec.formats.new_directory import check_replaceable, parents_made, put_in_place, told_of
from terarec.spec import FieldError

LOCK_FILE = "lock"


@contextmanager
def resumable_directory(out: Path, fingerprint: Mapping[str, str], *, restart: bool = False) -> Iterator[Journal]:
    """The journal of ``<out>.partial``, locked, to write into; renamed to `out` when the block ends well.

    An error in the block removes it. A kill leaves it, and so do Ctrl-C and a cluster that gives up once a phase is
    committed: the next call goes on with it.

    Args:
        out: must not exist, or be an empty directory.
        fingerprint: of the work, see `Journal`.
        restart: whether what an earlier call left is thrown away first.

    Raises:
        ClusterError: of the block; what is committed was kept.
        ConfigError: `out` is a file or holds something, another process writes it, or other work was begun there; what
            is there stays as it is.
        RunInterruptedError: Ctrl-C; what is committed was kept.
        StorageError: the disk is full, or refuses to write there.
    """
    out = out.resolve()
    check_replaceable(out)
    partial = out.with_name(f"{out.name}.partial")
    with told_of(partial, out), parents_made(out):
        partial.mkdir(exist_ok=True)
        with (partial / LOCK_FILE).open("a+") as lock:
            _take(lock, partial, out)
            if restart:
                _empty(partial)
            journal = Journal(partial, fingerprint)
            try:
                yield journal
                journal.remove()
                (partial / LOCK_FILE).unlink()
                put_in_place(partial, out)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | ClusterError) and journal.phases:
                    kept = f"{partial} keeps the phases {', '.join(journal.phases)}; the same call goes on from there"
                    if isinstance(error, ClusterError):
                        raise ClusterError(f"{error}; {kept}") from error
                    raise RunInterruptedError(kept) from error
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _take(lock: IO[str], partial: Path, out: Path) -> None:
    """Lock the directory for this process; the system unlocks it when the process ends, in whatever way."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking the directory may have become `out`, or been removed.
        is_there = os.path.samestat(os.fstat(lock.fileno()), (partial / LOCK_FILE).stat())
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    if not is_there:
        raise FieldError("", "out", f"{out} is being written by another run, expected one run at a time")


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK_FILE:
            entry.unlink()
