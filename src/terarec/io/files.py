"""Files that appear complete or not at all: written next to their place, flushed, then renamed; JSON files among them.

Plain JSON, and versioned ``{"format": NAME, "version": N, ...}``.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terarec.errors import FormatError, StorageError
from terarec.io.remote import PARTIAL_SUFFIX, locate
from terarec.spec import FieldError, checks
from terarec.spec.checks import quoted
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


class _Construction:
    """Files of a directory under construction, and which of them are on the disk. Several threads may add.

    Args:
        directory: Directory under construction.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Its ends are safe to use without a lock: threads append while another one flushes what is there.
        self._waiting: deque[Path] = deque()
        self._flushed: dict[Path, tuple[int, int, int]] = {}
        self._flushing = threading.Lock()

    def add(self, path: Path) -> None:
        """Take a committed file into account, which is not on the disk."""
        self._waiting.append(path)

    def flush_committed(self) -> None:
        """Force all files so far, and the names of the directories that hold them, to the disk."""
        with self._flushing:  # until the end, so that what another thread flushes is on the disk, too
            directories: set[Path] = set()
            while self._waiting:
                path = self._waiting.popleft()
                # A committed file may be gone by now: those that pass rows from phase to phase are removed once they
                # are read.
                if path.exists():
                    # Noted before the flush: what is written after it changes the version, and is flushed at the end.
                    self._flushed[path] = _version(path)
                    flush(path)
                    # The directories between are flushed, too: the name of a new one is on the disk only after its
                    # parent is.
                    above = path.parents
                    directories.update(above[: above.index(self._directory) + 1])
            for directory in directories:
                flush(directory)

    def flush(self) -> None:
        """Force the directory and all below it to the disk, except files that are there already."""
        for path in self._directory.rglob("*"):
            if path not in self._flushed or self._flushed[path] != _version(path):
                flush(path)
        flush(self._directory)


def _version(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


_under_construction: dict[Path, _Construction] = {}
if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_under_construction.clear)  # the parent would not flush files of its child


@contextmanager
def under_construction(directory: Path) -> Iterator[None]:
    """Commit files in `directory` without forcing each to the disk; its owner flushes all before they count.

    A flush of each file and of its directory takes two commits of the file system's journal, 4 ms on a disk of a
    virtual machine; together they take one. `replace_directory` inside the block flushes everything, and a `durable`
    `AtomicFile` all files that were committed before it.

    Args:
        directory: Directory that nobody reads before it is published.
    """
    _under_construction[directory] = _Construction(directory)
    try:
        yield
    finally:
        _under_construction.pop(directory, None)  # a fork inside the block has cleared it


def _construction_around(path: Path) -> _Construction | None:
    """Return the innermost directory under construction that holds `path`; None if there is none."""
    found = (_under_construction.get(parent) for parent in path.parents) if _under_construction else ()
    return next((construction for construction in found if construction is not None), None)


class AtomicFile:
    """File under construction: write to `partial`, then `commit` or `abort`.

    `atomic_file` does so for a block; writers that live longer hold one of these. `commit` forces the file to the disk,
    except in a directory that is published, and flushed, as a whole.

    Attributes:
        path: Final path of the file.
        partial: Path to write to before that; its directory exists.

    Args:
        path: Final path of the file.
        replace: Whether an existing file is replaced. If not, a file of the user stays, also one that appears while
            this one is written.
        durable: Whether the file is on the disk after `commit` in an unpublished directory, too, and before it all
            files that were committed there: for a record that names them, which a resumed run believes.

    Raises:
        ConfigError: See `check_new_file`.
    """

    def __init__(self, path: Path, *, replace: bool = True, durable: bool = False) -> None:
        if not replace:
            check_new_file(path)
        self._replace = replace
        self._durable = durable
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)

    def commit(self) -> None:
        """Flush the partial file to the disk and rename it into place; abort on an error of the disk."""
        with self.guard():
            # A file in a directory under construction has no readers yet: it is flushed with all others before it
            # counts.
            construction = _construction_around(self.path)
            if construction is not None and self._durable:
                construction.flush_committed()
            is_flushed = construction is None or self._durable
            if is_flushed:
                flush(self.partial)
            # Again, for a file that appeared while this one was written.
            if not self._replace:
                check_new_file(self.path)
            os.replace(self.partial, self.path)
            if is_flushed:
                flush(self.path.parent)
            elif construction is not None:
                construction.add(self.path)

    def abort(self) -> None:
        """Remove the partial file, if there is one."""
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
                raise StorageError(
                    self.path, f"{os.strerror(error.errno)} after {written} bytes; nothing was left behind"
                ) from error
            raise
        except BaseException:
            self.abort()
            raise


@contextmanager
def atomic_file(path: Path, *, replace: bool = True, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`, renamed to `path` when the block succeeds.

    Args:
        path: See `AtomicFile`.
        replace: See `AtomicFile`.
        durable: See `AtomicFile`.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    file = AtomicFile(path, replace=replace, durable=durable)
    with file.guard():
        yield file.partial
    file.commit()


def write_bytes(path: Path, content: bytes, *, replace: bool = True, durable: bool = False) -> None:
    """Write a small file atomically.

    Args:
        path: See `AtomicFile`.
        content: Content of the file.
        replace: See `AtomicFile`.
        durable: See `AtomicFile`.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    with atomic_file(path, replace=replace, durable=durable) as partial:
        partial.write_bytes(content)


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
    """Force `directory` and all below it to the disk, except what `under_construction` has flushed already."""
    construction = _under_construction.get(directory)
    if construction is not None:
        construction.flush()
        return
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def write_json(
    path: Path, content: object, *, replace: bool = True, durable: bool = False, allow_nan: bool = False
) -> None:
    """Write `content` atomically as indented JSON.

    Args:
        path: Path of the file.
        content: JSON data.
        replace: Whether an existing file is replaced.
        durable: Whether it names files of a directory under construction, see `AtomicFile`.
        allow_nan: Whether NaN and infinities are written, in the spelling that Python reads.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
        ValueError: A number that JSON lacks.
    """
    text = f"{json.dumps(content, indent=2, allow_nan=allow_nan)}\n"
    write_bytes(path, text.encode(), replace=replace, durable=durable)


def read_json(path: str | Path, expected: str = "JSON") -> Any:
    """Return the content of a JSON file.

    Args:
        path: Path or URL.
        expected: Expected content, for the error.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON.
    """
    try:
        file = locate(path)
        return parse_json(file.read(0, file.size).tobytes())
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
    durable: bool = False,
) -> None:
    """Write `content` atomically as indented JSON after ``"format": name`` and ``"version": version``.

    Args:
        path: Path of the file.
        name: Name of the format.
        version: Version of the format.
        content: JSON data.
        replace: Whether an existing file is replaced.
        durable: Whether it names files of a directory under construction, see `AtomicFile`.

    Raises:
        ConfigError: An existing file may not be replaced.
        StorageError: The disk is full.
    """
    write_json(path, {"format": name, "version": version, **content}, replace=replace, durable=durable)


def read_versioned_json(path: Path, name: str, version: int, *, oldest: int = 1) -> dict[str, Any]:
    """Return the content of a file of `write_versioned_json`; see `read_json_and_version`."""
    return read_json_and_version(path, name, version, oldest=oldest)[1]


def read_json_and_version(path: Path, name: str, version: int, *, oldest: int = 1) -> tuple[int, dict[str, Any]]:
    """Return version and content of a file of `write_versioned_json`.

    Args:
        path: Path of the file.
        name: Format that the file must name.
        version: Newest accepted version.
        oldest: Oldest accepted version.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON, another format, or a version outside these.
    """
    data = read_json(path, f"a {name!r} file")
    found = data.get("format") if isinstance(data, dict) else None
    if found != name:
        raise FormatError(path, "$.format", f"got {quoted(found)}, expected {name!r}")
    number, rule = data.get("version"), checks.integer(1)
    try:
        rule.read(number)
    except ValueError:
        raise FormatError(path, "$.version", f"got {quoted(number)}, expected {rule.accepted}") from None
    if number > version:
        raise FormatError(path, f"{name} version {number} is newer than this terarec reads (up to {version})")
    if number < oldest:
        raise FormatError(
            path,
            f"{name} version {number} was made by an earlier development state, expected version {oldest}; "
            "make it again",
        )
    return number, {key: value for key, value in data.items() if key not in ("format", "version")}
