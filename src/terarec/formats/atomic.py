"""Files that appear whole or not at all: written beside their place, flushed, renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terarec.errors import StorageError
from terarec.formats.flush import flush
from terarec.spec import FieldError

PARTIAL_SUFFIX = ".partial"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, a quota or a file that may not grow further."""


def check_new_file(path: Path, *, replace: bool = False) -> None:
    """Raise unless a file may be written to `path`: nothing is there, or a file that may be replaced.

    Raises:
        ConfigError: a directory is there, or a file that may not be replaced.
    """
    if path.is_dir():
        raise FieldError("", "out", f"{path} is a directory, expected a file to write")
    if not replace and os.path.lexists(path):
        raise FieldError("", "out", f"{path} exists, expected a new file; --force (in Python replace=True) replaces it")


class AtomicFile:
    """A file under construction: write to `partial`, then `commit` or `abort`.

    Attributes:
        path: where the file will appear.
        partial: where to write until then; its directory exists.

    Args:
        path: as above.
        replace: whether a file that is there is replaced. If not, what a user has there stays, also if it appears
            while this one is written.

    Raises:
        ConfigError: see `check_new_file`.
    """

    def __init__(self, path: Path, *, replace: bool = True) -> None:
        if not replace:
            check_new_file(path)
        self._replace = replace
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)

    def commit(self) -> None:
        """Flush the partial file to the disk and rename it into place; aborts if the disk refuses."""
        with self.guard():
            flush(self.partial)
            if not self._replace:
                check_new_file(self.path)
            os.replace(self.partial, self.path)
            flush(self.path.parent)

    def abort(self) -> None:
        """Remove the partial file, if there is one."""
        self.partial.unlink(missing_ok=True)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Abort on any error in the block, and say plainly when the disk is full.

        Raises:
            StorageError: the disk, or the quota, is full; names the file and the bytes written so far.
        """
        try:
            yield
        except OSError as error:
            written = self.partial.stat().st_size if self.partial.exists() else 0
            self.abort()
            if error.errno in DISK_FULL:
                raise StorageError(
                    f"{self.path}: {os.strerror(error.errno)} after {written} bytes; nothing was left behind"
                ) from error
            raise
        except BaseException:
            self.abort()
            raise


def write_bytes(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a small file atomically.

    Raises:
        ConfigError: see `check_new_file`.
        StorageError: the disk is full.
    """
    file = AtomicFile(path, replace=replace)
    with file.guard():
        file.partial.write_bytes(content)
    file.commit()
