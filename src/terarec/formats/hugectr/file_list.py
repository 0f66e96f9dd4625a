"""File lists: the number of data files on the first line, then one path a line. See docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terarec.errors import FormatError
from terarec.io import file_system, is_remote, read_text, write_bytes


def read_file_list(path: str | Path) -> tuple[str, ...]:
    """The paths that a list names, in order.

    Relative ones belong to the working directory; in a list behind a URL all of them belong to the list's file system
    unless they are URLs themselves.

    Raises:
        DataNotFoundError: no such list.
        FormatError: the first line is no number, or not the number of paths that follow.
    """
    lines = [line.strip() for line in read_text(path).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    first = lines[0] if lines else ""
    if not (first.isascii() and first.isdigit()):
        raise FormatError(f"{path}: line 1 is {first!r}, expected the number of files")
    names = lines[1:]
    if len(names) != int(first):
        raise FormatError(f"{path}: line 1 says {first} files, {len(names)} paths follow")
    if "" in names:
        raise FormatError(f"{path}: line {names.index('') + 2} is empty, expected a path")
    return tuple(_on_the_file_system_of(str(path), name) for name in names)


def write_file_list(path: Path, files: Sequence[str | Path]) -> None:
    """Write a list of `files`, atomically.

    Raises:
        StorageError: the disk is full.
    """
    write_bytes(path, "".join(f"{line}\n" for line in (len(files), *files)).encode())


def _on_the_file_system_of(file_list: str, name: str) -> str:
    if not is_remote(file_list) or is_remote(name):
        return name
    files, _ = file_system(file_list)
    return str(files.unstrip_protocol(name))
