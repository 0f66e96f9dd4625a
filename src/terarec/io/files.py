# SPDX-License-Identifier: Apache-2.0
"""Files that appear complete or not at all: written next to their place, flushed, then renamed; JSON files among them.

Plain JSON, and versioned ``{"format": NAME, "version": N, ...}``.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from terarec.errors import FormatError, NoSpaceError, TerarecError
from terarec.io.locks import HAS_LOCKS, is_at, try_lock
from terarec.io.opening import open_file
from terarec.io.remote import PARTIAL_SUFFIX, adjacent_name, read_content
from terarec.io.removal import is_temporary
from terarec.spec import checks
from terarec.spec.checks import FieldError, quoted
from terarec.spec.codec import parse_json

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, a quota or a file that may not grow further."""


def check_new_file(path: Path, *, replace: bool = False) -> None:
    """Raise unless a file may be written to `path`: it is free, or a file that may be replaced.

    Raises:
        ConfigError: A directory is there, or a file that may not be replaced.
    """
    if path.is_dir():
        raise FieldError("", "out", f"{path} is a directory, expected a file to write")
    # Not `exists`: a link to nothing is an entry of the user, too, which the rename would replace.
    if not replace and os.path.lexists(path):
        raise FieldError("", "out", f"{path} exists, expected a new file; replace=True replaces it")


class AtomicFile:
    """File under construction: write to `partial`, then `commit` or `abort`.

    `atomic_file` does so for a block; writers that live longer hold one of these.

    A lock of the partial file tells that its writer lives; those of the same name whose writers were killed are removed
    when the next one is made. Writers that rename another file to `partial` lose the lock.

    Attributes:
        path: Final path of the file.
        partial: Path to write to before that; its directory exists.

    Args:
        path: Final path of the file.
        replace: Whether an existing file is replaced. If not, a file of the user stays, also one that appears while
            this one is written.
        flushes: Whether `commit` forces the file to the disk. False for a file of a directory whose owner flushes all
            of it before it counts, as `atomic_dir` does: a flush of a file and of its directory takes two commits of
            the file system's journal, 4 ms on a disk of a virtual machine; of all files together they take one.

    Raises:
        ConfigError: See `check_new_file`.
    """

    def __init__(self, path: Path, *, replace: bool = True, flushes: bool = True) -> None:
        if not replace:
            check_new_file(path)
        self._replace = replace
        self._flushes = flushes
        self.path = path
        # Where users keep files, one of theirs may have any name. In a directory of ours the next run is to overwrite
        # what a kill has left, or it would be published with the rest.
        is_ours = is_temporary(path.parent)
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX if is_ours else adjacent_name(path.name))
        self._lock = ExitStack()
        path.parent.mkdir(parents=True, exist_ok=True)
        if HAS_LOCKS and not is_ours:
            _remove_abandoned(path)
            with self.guard():
                self._lock_partial()

    def _lock_partial(self) -> None:
        while True:
            file = self._lock.enter_context(open_file(self.partial, "ab"))
            if try_lock(file) and is_at(file.fileno(), self.partial):
                return
            # Another writer of the name has taken it for abandoned before it was locked.
            self._lock.close()
            self.partial = self.path.with_name(adjacent_name(self.path.name))

    def commit(self) -> None:
        """Rename the partial file into place, flushed unless its directory will be; abort on an error of the disk."""
        with self.guard():
            if self._flushes:
                flush(self.partial)
            # Again, for a file that appeared while this one was written.
            if not self._replace:
                check_new_file(self.path)
            os.replace(self.partial, self.path)
            self._lock.close()
            if self._flushes:
                flush(self.path.parent)

    def abort(self) -> None:
        """Remove the partial file, if there is one."""
        self._lock.close()
        self.partial.unlink(missing_ok=True)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Abort on any error in the block, and report a full disk in one line.

        Raises:
            StorageError: The disk, or the quota, is full; names the file and the bytes written so far.
        """
        try:
            yield
        except OSError as error:
            # Before `abort`, which removes the file.
            written = self.partial.stat().st_size if self.partial.exists() else 0
            self.abort()
            if error.errno in DISK_FULL:
                raise NoSpaceError(
                    self.path, f"{os.strerror(error.errno)} after {written} bytes; nothing was left behind"
                ) from error
            raise
        except BaseException:
            self.abort()
            raise


def _remove_abandoned(path: Path) -> None:
    """Remove the partial files of `path` whose writers were killed."""
    names = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}")
    with suppress(OSError):  # a directory that may be written, but not listed
        for entry in list(os.scandir(path.parent)):
            if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                # Of another user, or a writer has renamed or removed it.
                with suppress(OSError, TerarecError), open_file(entry.path, "rb") as file:
                    if try_lock(file) and is_at(file.fileno(), Path(entry.path)):
                        os.unlink(entry.path)


@contextmanager
def atomic_file(path: Path, *, replace: bool = True, flushes: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`, renamed to `path` when the block succeeds.

    Args:
        path: See `AtomicFile`.
        replace: See `AtomicFile`.
        flushes: See `AtomicFile`.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    file = AtomicFile(path, replace=replace, flushes=flushes)
    with file.guard():
        yield file.partial
    file.commit()


def write_bytes(path: Path, content: bytes, *, replace: bool = True, flushes: bool = True) -> None:
    """Write a small file atomically.

    Args:
        path: See `AtomicFile`.
        content: Content of the file.
        replace: See `AtomicFile`.
        flushes: See `AtomicFile`.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    with atomic_file(path, replace=replace, flushes=flushes) as partial:
        partial.write_bytes(content)


def real_path(path: str | Path) -> Path:
    """Return the absolute path without links; a loop of links stays, of which the system says so where it is used."""
    return Path(os.path.realpath(path))  # `Path.resolve` raises a RuntimeError for a loop


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file, or a directory, from one that takes its place; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def flush(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk, so that no rename outlives the bytes it promises."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX opens directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A descriptor for reading suffices, and directories have no other.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Force `directory` and all below it to the disk."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def write_json(
    path: Path, content: object, *, replace: bool = True, flushes: bool = True, allow_nan: bool = False
) -> None:
    """Write `content` atomically as indented JSON.

    Args:
        path: Path of the file.
        content: JSON data.
        replace: Whether an existing file is replaced.
        flushes: See `AtomicFile`.
        allow_nan: Whether NaN and infinities are written, in the spelling that Python reads.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
        ValueError: A number that JSON lacks.
    """
    text = f"{json.dumps(content, indent=2, allow_nan=allow_nan)}\n"
    write_bytes(path, text.encode(), replace=replace, flushes=flushes)


def read_json(path: str | Path, expected: str = "JSON") -> Any:
    """Return the content of a JSON file.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON.
    """
    try:
        return parse_json(read_content(path))
    # Of a missing file; it is a ValueError, too.
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error}), expected {expected}") from None


def write_versioned_json(
    path: Path,
    name: str,
    version: int,
    content: Mapping[str, Any],
    *,
    replace: bool = True,
    flushes: bool = True,
) -> None:
    """Write `content` atomically as indented JSON after ``"format": name`` and ``"version": version``.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
    """
    write_json(path, {"format": name, "version": version, **content}, replace=replace, flushes=flushes)


def read_versioned_json(path: Path, name: str, version: int) -> dict[str, Any]:
    """Return the content of a file of `write_versioned_json`.

    Args:
        path: Path of the file.
        name: Format that the file must name.
        version: Version that it must have.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON, another format, or another version.
    """
    data = read_json(path, f"a {name!r} file")
    format_name = data.get("format") if isinstance(data, dict) else None
    if format_name != name:
        raise FormatError(path, "$.format", f"got {quoted(format_name)}, expected {name!r}")
    number, rule = data.get("version"), checks.integer(1)
    try:
        rule.read(number)
    except ValueError:
        raise FormatError(path, "$.version", f"got {quoted(number)}, expected {rule.accepted}") from None
    if number > version:
        raise FormatError(path, f"{name} version {number} is newer than this terarec reads ({version})")
    if number < version:
        raise FormatError(
            path,
            f"{name} version {number} was made by an earlier development state, expected version {version}; "
            "make it again",
        )
    return {key: value for key, value in data.items() if key not in ("format", "version")}
