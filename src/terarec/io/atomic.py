"""Files and directories that appear complete or not at all: written next to their place, flushed, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from terarec.errors import FormatError, StorageError
from terarec.io.remote import PARTIAL_SUFFIX, is_remote, upload
from terarec.spec import FieldError

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
            # Inside a directory under construction nobody reads the file yet: it is flushed with all others before it
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


@contextmanager
def atomic_dir(out: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """Yield a temporary directory next to `out`, renamed to `out` when the block succeeds and removed otherwise.

    Its content is on the disk before it is renamed, and the new name is when the block ends.

    A kill leaves the temporary directory (``<out>.partial-<process>``), and no `out`, or the former one; between the
    two renames that replace a former one, that is complete as ``<out>.former-<process>``.

    Args:
        out: Directory to create; it must not exist, be empty, or be replaceable.
        replaceable: Pattern of the names in a directory that may be replaced; None for no replacement.

    Raises:
        ConfigError: `out` is a file, or not empty.
        StorageError: The disk is full, or cannot be written.
    """
    out = out.resolve()
    check_replaceable(out, replaceable)
    partial = out.with_name(f"{out.name}{PARTIAL_SUFFIX}-{os.getpid()}")
    with rewrite_error_paths(partial, out), ensure_parents(out):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            with under_construction(partial):
                yield partial
                replace_directory(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_entries(directory: str | Path, *, replaceable: str = "") -> Iterator[Path]:
    """Yield a temporary directory whose entries move to `directory` when the block succeeds.

    They replace entries of the same names. None does before all are written and each is known to be allowed there; a
    block that fails leaves `directory` as it was. On a disk an entry appears by a rename; for a URL, files are uploaded
    next to their places first and then moved there one by one.

    Args:
        directory: Path or URL; created if missing.
        replaceable: Pattern of the names in a folder that may be replaced.

    Raises:
        ConfigError: A folder is at the place of a new file, or holds files of others.
        OSError: `directory` cannot be created.
        StorageError: The disk is full, or cannot be written.
    """
    if is_remote(directory):
        with tempfile.TemporaryDirectory(prefix="terarec-") as held:
            partial = Path(held)
            with rewrite_error_paths(partial, Path(str(directory))), under_construction(partial):
                yield partial
            upload(partial, str(directory), replaceable=replaceable)
        return
    out = Path(directory).resolve()
    # Inside `out`, so that both are on one file system: a rename across two would be a copy.
    partial = out / f"{PARTIAL_SUFFIX}-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with rewrite_error_paths(partial, out):
            with under_construction(partial):
                yield partial
            _move_entries(partial, out, replaceable)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_entries(partial: Path, out: Path, replaceable: str) -> None:
    # Longer names first: a file that refers to another by its own name and more (x.onnx, x.onnx.data) comes last.
    entries = sorted(partial.iterdir(), reverse=True)
    for entry in entries:
        target = out / entry.name
        if entry.is_dir():
            check_replaceable(target, replaceable)
        elif target.is_dir():
            raise FieldError("", "out", f"{target} is a folder, expected a file or nothing there")
    for entry in entries:
        if entry.is_dir():
            replace_directory(entry, out / entry.name)
        else:
            flush(entry)
            os.replace(entry, out / entry.name)
    flush(out)


def check_replaceable(out: Path, pattern: str | None = None) -> None:
    """Raise `ConfigError` unless `out` is free, or holds nothing but names that match `pattern`."""
    if not out.exists():
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
def rewrite_error_paths(partial: Path, out: Path) -> Iterator[None]:
    """Replace `partial` by `out`, which the user knows, in errors of writing.

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
        parts = (part.replace(str(partial), str(out)) for part in (error.where, error.problem))
        raise (StorageError if isinstance(error, StorageError) else FormatError)(*parts) from error
    except OSError as error:
        if isinstance(error, ValueError):  # a FormatError such as a missing source is complete already
            raise
        reason = f"{error.strerror or error}"
        what = f"{reason}; nothing was left behind" if error.errno in DISK_FULL else f"cannot write there: {reason}"
        raise StorageError(out, f"{what}") from error


def replace_directory(partial: Path, out: Path) -> None:
    """Flush `partial` to the disk and rename it to `out`; remove a former `out`."""
    construction = _under_construction.get(partial)
    if construction is None:
        flush_tree(partial)
    else:
        construction.flush()
    if not out.exists() or not any(out.iterdir()):  # a rename replaces an empty directory alone
        os.replace(partial, out)
    else:
        # A rename replaces no directory that holds files, so the former one moves aside first.
        former = out.with_name(f"{out.name}.former-{os.getpid()}")
        os.replace(out, former)
        os.replace(partial, out)
        shutil.rmtree(former)
    flush(out.parent)


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
