"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from terarec.errors import StorageError
from terarec.formats.atomic import DISK_FULL
from terarec.formats.flush import flush, flush_tree
from terarec.spec import FieldError


@contextmanager
def new_directory(out: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """A directory beside `out` to write into, renamed to `out` when the block ends well and removed otherwise.

    All that it holds is on the disk before it is renamed, and its new name is when the block ends.

    A kill leaves the directory beside (``<out>.partial-<process>``), and no `out`, or the former one; between the two
    renames that replace a former one, that is whole as ``<out>.former-<process>``.

    Args:
        out: must not exist, or be an empty directory, or one that may be replaced.
        replaceable: pattern of the names in a directory that may be replaced; None for none.

    Raises:
        ConfigError: `out` is a file, or holds something.
        StorageError: the disk is full, or refuses to write there.
    """
    out = out.resolve()
    check_replaceable(out, replaceable)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    with told_of(partial, out), parents_made(out):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            put_in_place(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Make the directories above `path`; after an error those that were made go again, unless something is in them."""
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
def told_of(partial: Path, out: Path) -> Iterator[None]:
    """Let errors of writing into `partial` speak of `out`, the one that the user knows.

    Raises:
        StorageError: for an error of the disk, in one line.
    """
    try:
        yield
    except StorageError as error:
        raise StorageError(str(error).replace(str(partial), str(out))) from error
    except OSError as error:
        if isinstance(error, ValueError):  # a FormatError such as a missing source says all itself
            raise
        reason = f"{error.strerror or error}"
        what = f"{reason}; nothing was left behind" if error.errno in DISK_FULL else f"cannot write there: {reason}"
        raise StorageError(f"{out}: {what}") from error


def check_replaceable(out: Path, pattern: str | None = None) -> None:
    """Raise `ConfigError` unless `out` is free, or holds nothing but names of the `pattern`."""
    if not out.exists():
        return
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else [out.name]
    if names and (pattern is None or not out.is_dir()):
        raise FieldError("", "out", f"{out} exists and is not empty, expected a new or an empty directory")
    for name in names:
        if not re.fullmatch(pattern or "", name):
            raise FieldError("", "out", f"{out} holds {name!r}, expected a directory with nothing of others in it")


def put_in_place(partial: Path, out: Path) -> None:
    """Force `partial` to the disk and rename it to `out`; a former `out` is removed."""
    flush_tree(partial)
    _rename(partial, out)
    flush(out.parent)


def _rename(partial: Path, out: Path) -> None:
    """A directory can take the place of an empty one alone."""
    if not out.exists() or not any(out.iterdir()):
        os.replace(partial, out)
        return
    former = out.with_name(f"{out.name}.former-{os.getpid()}")
    os.replace(out, former)
    os.replace(partial, out)
    shutil.rmtree(former)
