# SPDX-License-Identifier: Apache-2.0
"""Removal of directories, of those alone that terarec has made: `remove_tree` is the only place that removes one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from terarec.errors import ConfigError

MARKER = ".terarec"
"""File by which a directory, with all below it, is temporary work of terarec that the next call may remove.

It is empty, or holds the name of its directory: then a rename of that, which makes it complete, ends what it says.
"""
_MOST_NAME = 4096


def is_temporary(path: Path) -> bool:
    """Return whether something is in a directory that is temporary work of terarec, where no file is a user's."""
    return any(map(has_marker, _around(_absolute(path))))


def has_marker(directory: Path) -> bool:
    """Return whether a directory has a marker that is its own, and not left by a rename."""
    marker = directory / MARKER
    with suppress(OSError):  # a directory or a file that may not be read is none of ours
        if marker.is_file():
            with marker.open("rb") as file:
                return file.read(_MOST_NAME) in (b"", os.fsencode(directory.name))
    return False


def work_directory(path: Path) -> Path:
    """Make an empty directory with a marker at `path`, in place of one with a marker, and return `path`.

    Raises:
        ConfigError: Something is there that terarec has not made.
    """
    remove_tree(path)
    path.mkdir(parents=True)
    mark(path)
    return path


def mark(directory: Path, *, until_renamed: bool = False) -> None:
    """Write the marker into a directory, unless one above it has it.

    Args:
        directory: The directory, with its final path or, if `until_renamed`, without it.
        until_renamed: Whether the marker counts only until the directory has another name.

    Raises:
        ConfigError: The directory has content and no marker, or is a link.
    """
    if directory.is_symlink() or not is_temporary(directory):
        check_removable(directory, None)
        (directory / MARKER).write_bytes(b"")
    if until_renamed and (directory / MARKER).exists():
        (directory / MARKER).write_bytes(os.fsencode(directory.name))


def published(out: Path) -> None:
    """Remove the marker of a directory, once a rename to its final name has ended what it said."""
    # Not before: a process that is killed then would leave a directory that nobody may remove.
    (out / MARKER).unlink(missing_ok=True)


def remove_tree(
    directory: Path, *, names: str | None = None, first: str | None = None, ignore_errors: bool = False
) -> None:
    """Remove a directory, if there is one, with all below it.

    It must be empty, or one of ours: with a marker in it or in a directory above it, or one that holds nothing but
    `names`.

    Args:
        directory: Directory; a link to one is none of ours.
        names: Pattern of the names of its entries by which a complete directory of a format is recognized.
        first: File to remove before the others, without which the directory of that format does not count as complete.
        ignore_errors: Whether what cannot be removed, or is not ours, stays without an error.

    Raises:
        ConfigError: Something is there that terarec has not made.
        OSError: The disk.
    """
    if not os.path.lexists(directory):
        return
    try:
        check_removable(directory, names)
    except (ConfigError, OSError):
        # It may have gone since, with a directory above it that somebody removes.
        if ignore_errors or not os.path.lexists(directory):
            return
        raise
    if names is not None:
        _begin(directory, first)
    with suppress(*([OSError] if ignore_errors else ())):
        empty(directory, ignore_errors=ignore_errors)
        # What could not be removed keeps its marker, by which the next call may.
        if not ignore_errors or all(entry.name == MARKER for entry in directory.iterdir()):
            shutil.rmtree(directory)


def empty(directory: Path, *, ignore_errors: bool = False) -> None:
    """Remove all in a directory but its marker, which goes last: by it the next call knows what a kill has left."""
    for entry in directory.iterdir():
        with suppress(*([OSError] if ignore_errors else ())):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=ignore_errors)
            elif entry.name != MARKER:
                entry.unlink()


def begin_removal(directory: Path, *, names: str, first: str) -> None:
    """Let a directory count as complete no longer, as `remove_tree` does first; that removes it, also after a kill."""
    check_removable(directory, names)
    _begin(directory, first)


def _begin(directory: Path, first: str | None) -> None:
    # A removal that is cut short leaves what the names no longer identify; the next one goes by the marker.
    (directory / MARKER).write_bytes(b"")
    if first is not None:
        (directory / first).unlink()


def check_removable(directory: Path, names: str | None) -> None:
    """Raise `ConfigError` unless `remove_tree` may remove a directory."""
    if not directory.is_dir() or directory.is_symlink():
        raise ConfigError(directory, "not a directory that terarec has made, expected nothing there; it stays")
    if is_temporary(directory):
        return
    others = (entry.name for entry in directory.iterdir() if names is None or not re.fullmatch(names, entry.name))
    other = min(others, default=None)
    if other is not None:
        raise ConfigError(
            directory, f"holds {other!r}, which terarec has not put there, expected nothing of others; it stays"
        )


def _around(directory: Path) -> Iterator[Path]:
    yield directory
    yield from directory.parents


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
