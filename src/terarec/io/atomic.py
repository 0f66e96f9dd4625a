"""Files and directories that appear complete or not at all: written next to their place, flushed, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
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
    if not replace and os.path.lexists(path):
        raise FieldError("", "out", f"{path} exists, expected a new file; replace=True replaces it")


class AtomicFile:
    """File under construction: write to `partial`, then `commit` or `abort`.

    `atomic_file` does so for a block; writers that live longer hold one of these.

    Attributes:
        path: Final path of the file.
        partial: Path to write to before that; its directory exists.

    Args:
        path: Final path of the file.
        replace: Whether an existing file is replaced. If not, a file of the user stays, also one that appears while
            this one is written.

    Raises:
        ConfigError: See `check_new_file`.
    """

    def __init__(self, path: Path, *, replace: bool = True) -> None:
        if not replace:
            check_new_file(path)
        self._replace = replace
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)

    def commit(self) -> None:
        """Flush the partial file to the disk and rename it into place; abort on an error of the disk."""
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
        """Abort on any error in the block, and report a full disk in one line.

        Raises:
            StorageError: The disk, or the quota, is full; names the file and the bytes written so far.
        """
        try:
            yield
        except OSError as error:
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
def atomic_file(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`, renamed to `path` when the block succeeds.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    file = AtomicFile(path, replace=replace)
    with file.guard():
        yield file.partial
    file.commit()


def write_bytes(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a small file atomically.

    Raises:
        ConfigError: See `check_new_file`.
        StorageError: The disk is full.
    """
    with atomic_file(path, replace=replace) as partial:
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
            with rewrite_error_paths(partial, Path(str(directory))):
                yield partial
            upload(partial, str(directory), replaceable=replaceable)
        return
    out = Path(directory).resolve()
    partial = out / f"{PARTIAL_SUFFIX}-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with rewrite_error_paths(partial, out):
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
    flush_tree(partial)
    if not out.exists() or not any(out.iterdir()):  # a rename replaces an empty directory alone
        os.replace(partial, out)
    else:
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
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Force `directory` and all below it to the disk."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
