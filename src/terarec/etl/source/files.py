# SPDX-License-Identifier: Apache-2.0
"""Files, directories, patterns and URLs -> the files to read, in their order."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path, PurePath, PurePosixPath
from typing import NoReturn

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.source.blocks import SourceFile
from terarec.io.opening import read_bytes
from terarec.io.owned import OWNED
from terarec.io.remote import PARTIAL_SUFFIX, file_system, is_remote
from terarec.io.removal import has_marker
from terarec.spec.codec import parse_json
from terarec.spec.dataset import GENERATED_FILE

_READ_SEVERAL_TIMES = "the sources are read several times, which a pipe does not allow (save its rows to a file first)"
_DIGITS = re.compile(r"[0-9]+")
_NOT_ALPHANUMERIC = re.compile(r"[^0-9a-z]")
_UNFINISHED = re.compile(rf"{re.escape(PARTIAL_SUFFIX)}({OWNED})?$")
"""End of the names of files and directories that terarec is writing, or replaces."""


def find_files(paths: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """Return the files that `paths` name, in the order of `paths`.

    A directory means the files in it and below, also behind links, a pattern for the files that it matches, both in
    the order of `name_order`; names that begin with ``.`` or ``_`` in a directory are left out, and so is what terarec
    is writing there; so is a link to another directory in it, whose files have their own names. The side file that a
    generator writes next to logs is never one of them, nor is the work of a run that was killed, since a shell that
    expands ``raw/*`` names them, too.

    Raises:
        ConfigError: No path, a file or directory twice, a pipe or device, or a URL of a kind that fsspec does not know.
        DataNotFoundError: A path or a glob without a file, or a link to nothing.
        FormatError: A directory without a file, or an empty file.
        MissingDependencyError: A URL without fsspec, or without the library that it needs for this kind of URL.
    """
    if not paths:
        raise ConfigError("sources", "got none, expected at least one file")
    files = [file for path in paths for file in (_remote(str(path)) if is_remote(path) else _local(Path(path)))]
    if not files:
        problem = "what terarec was writing, or a generator's description of its logs, expected a file of rows"
        raise DataNotFoundError(paths[0], problem)
    seen: dict[str, str] = {}
    for file in files:
        if file.bytes == 0:
            raise FormatError(file.path, "the file is empty, expected at least one row")
        place = file.path if is_remote(file.path) else os.path.realpath(file.path)
        if place in seen:
            raise _named_twice(file.path, seen[place])
        seen[place] = file.path
    return tuple(files)


def _named_twice(path: str, other: str) -> ConfigError:
    again = "" if path == other else f", also as {other}"
    problem = f"name {path} twice{again}, whose rows would count double, expected it once"
    return ConfigError("sources", f"{problem}: name the wanted files, or let the name of the other begin with '.'")


def _local(path: Path) -> Iterator[SourceFile]:
    paths = [path]
    if str(path) == "-":
        raise ConfigError("sources", f"got '-' for standard input, expected a file: {_READ_SEVERAL_TIMES}")
    if not path.exists():
        # Only where no such file exists is the name a pattern: names may hold brackets.
        if not glob.has_magic(str(path)):
            raise DataNotFoundError(path, "no such file")
        paths = list(map(Path, _matched(str(path), glob.glob(str(path)))))
        if not paths:
            raise DataNotFoundError(path, "matches no file")
    for entry in paths:
        if not entry.is_dir():
            if not _is_sidecar(entry):
                yield _local_file(entry)
            continue
        if has_marker(entry):  # False also where the directory may not be read, which is said below
            continue
        # By name, and not as the disk lists them, so that row ids are the same on every machine.
        inside = sorted(_below(str(entry), {}), key=name_order)
        if not inside:
            raise FormatError(entry, "the directory has no data file, expected at least one")
        yield from map(_local_file, inside)


def _below(directory: str, walked: dict[str, str]) -> Iterator[Path]:
    """Yield the files below a directory that is in none of those `walked` so far, by their places."""
    own: set[str] = set()
    links: list[str] = []
    # Path.rglob would pass over a directory that it may not read.
    for folder, folders, names in os.walk(directory, onerror=_unreadable):
        place = os.path.realpath(folder)
        if place in walked:  # also behind a link to a directory above it, which has no end
            raise _named_twice(folder, walked[place])
        walked[place] = folder
        own.add(place)
        folders[:] = filter(_is_data, folders)
        links += filter(os.path.islink, (os.path.join(folder, name) for name in folders))
        yield from (Path(folder, name) for name in filter(_is_data, names))
    for link in sorted(links, key=name_order):
        # A second name beside the first, such as latest -> day_12, is none of other rows.
        if os.path.realpath(link) not in own:
            yield from _below(link, walked)


def _unreadable(error: OSError) -> NoReturn:
    raise FormatError(error.filename, f"cannot be read ({error.strerror}), expected a readable directory") from error


def _local_file(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataNotFoundError(path, f"cannot be read ({error.strerror}), expected a file or a link to one") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(path, f"is not a regular file, expected one: {_READ_SEVERAL_TIMES}")
    return SourceFile(str(path), status.st_size, str(status.st_mtime_ns))


def _remote(url: str) -> Iterator[SourceFile]:
    files, path = file_system(url)
    if not files.exists(path):
        if not glob.has_magic(path):
            raise DataNotFoundError(url, "no such file")
        entries = [entry for entry in _matched(path, files.glob(path)) if PurePosixPath(entry).name != GENERATED_FILE]
        if not entries:
            raise DataNotFoundError(url, "matches no file")
    else:
        entries = [path]
    for entry in entries:
        inside = [entry]
        if files.isdir(entry):
            below = sorted(files.find(entry), key=name_order)
            inside = [file for file in below if all(map(_is_data, PurePosixPath(file).relative_to(entry).parts))]
            if not inside:
                raise FormatError(url, "the directory has no data file, expected at least one")
        for file in inside:
            yield SourceFile(files.unstrip_protocol(file), int(files.size(file)), str(files.ukey(file)))


def _matched(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return in their order the paths that a pattern matches, without those that terarec is writing."""
    # Unless it asks for their names.
    named = [part for part in PurePosixPath(pattern).parts if PARTIAL_SUFFIX in part]

    def is_left_out(part: str) -> bool:
        return bool(_UNFINISHED.search(part)) and not any(part == name or fnmatchcase(part, name) for name in named)

    return sorted((path for path in paths if not any(map(is_left_out, PurePosixPath(path).parts))), key=name_order)


def _is_data(name: str) -> bool:
    return name != GENERATED_FILE and not name.startswith((".", "_")) and not _UNFINISHED.search(name)


def _is_sidecar(path: Path) -> bool:
    """Return whether a file is the `GENERATED_FILE` of a generator, and not a log of that name."""
    if path.name != GENERATED_FILE or not path.is_file():
        return False
    try:
        content = parse_json(read_bytes(path))
    except ValueError:
        return False
    return isinstance(content, dict) and {"best_auc", "files", "seed"} <= content.keys()


def name_order(path: str | PurePath) -> tuple[list[str], str]:
    """Return the sort key of a path: folder by folder, digits in a name by the number that they write.

    Logs are numbered by days or hours, so that ``day_2`` comes before ``day_10``.
    """
    return [_DIGITS.sub(_padded, part) for part in PurePosixPath(path).parts], str(path)


def _padded(digits: re.Match[str]) -> str:
    # As long as the longest name of a file, so that texts of digits are in the order of their numbers.
    return digits[0].zfill(255)


def numbered_order(paths: Sequence[str]) -> list[str]:
    """Return the paths of a command line, with those in the order of their numbers that a shell has listed.

    A shell lists what a pattern matches as texts: ``day_10`` before ``day_2``. Paths of one directory (or of
    directories that differ in numbers alone) that follow each other in such an order are put in that of `name_order`.
    Any other order is that of the caller and is kept.
    """
    ordered: list[str] = []
    for _, group in groupby(paths, key=lambda path: _DIGITS.sub("0", str(PurePosixPath(path).parent))):
        listed = list(group)
        # The C locale compares characters, others letters and digits first, without regard to case.
        if listed == sorted(listed):
            listed.sort(key=name_order)
        elif list(map(_letters, listed)) == sorted(map(_letters, listed)):
            listed.sort(key=lambda path: _DIGITS.sub(_padded, _letters(path)))
        ordered += listed
    return ordered


def _letters(path: str) -> str:
    return _NOT_ALPHANUMERIC.sub("", path.lower())
