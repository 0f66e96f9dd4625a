"""Files, directories, globs and URLs -> the files to read, in order; the JSON file of a generator among them."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.io import file_system, is_remote
from terarec.spec import checks
from terarec.spec.codec import parse_json
from terarec.spec.dataset import GENERATED_FILE
from terarec.spec.quoting import did_you_mean, quoted

_READ_SEVERAL_TIMES = "the sources are read several times, which a pipe does not allow (save its rows to a file first)"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of rows.

    Attributes:
        path: Path or URL.
        bytes: Size as it is stored.
        version: Text that changes when the file does: time of change in nanoseconds, or the remote store's key.
    """

    path: str
    bytes: int
    version: str


def find_files(paths: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """Return the files that `paths` name, in the order of `paths`.

    A directory means the files in it and below, a pattern for the files that it matches, both in the order of
    their names; names that begin with ``.`` or ``_`` in a directory are left out. The side file that a generator writes
    next to logs is never one of them, since a shell that expands ``raw/*`` names it, too: see `is_sidecar`.

    Raises:
        ConfigError: No path, a pipe or device, or a URL of a kind that fsspec does not know.
        DataNotFoundError: A path or a glob without a file.
        FormatError: A directory without a file, or an empty file.
        MissingDependencyError: A URL without fsspec, or without the library that it needs for this kind of URL.
    """
    if not paths:
        raise ConfigError("sources", "got none, expected at least one file")
    files = [file for path in paths for file in (_remote(str(path)) if is_remote(path) else _local(Path(path)))]
    if not files:
        raise DataNotFoundError(paths[0], "a generator's description of its logs, expected a file of rows")
    for file in files:
        if file.bytes == 0:
            raise FormatError(file.path, "the file is empty, expected at least one row")
    return tuple(files)


def files_fingerprint(files: Sequence[SourceFile]) -> str:
    """Return a text that changes when a file does."""
    listed = [[file.path, file.bytes, file.version] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _local(path: Path) -> Iterator[SourceFile]:
    found = [path]
    if str(path) == "-":
        raise ConfigError("sources", f"got '-' for standard input, expected a file: {_READ_SEVERAL_TIMES}")
    if not path.exists():
        # Only where no such file exists is the name a pattern: names may hold brackets.
        if not glob.has_magic(str(path)):
            raise DataNotFoundError(path, "no such file")
        found = sorted(map(Path, glob.glob(str(path))))
        if not found:
            raise DataNotFoundError(path, "matches no file")
    for entry in found:
        if not entry.is_dir():
            if not is_sidecar(entry):
                yield _local_file(entry)
            continue
        # Path.rglob would pass over a directory that it may not read.
        below = [Path(folder, name) for folder, _, names in os.walk(entry, onerror=_unreadable) for name in names]
        # By name, and not as the disk lists them, so that row ids are the same on every machine.
        inside = sorted(file for file in below if file.is_file() and _is_data(file.relative_to(entry).parts))
        if not inside:
            raise FormatError(entry, "the directory has no data file, expected at least one")
        yield from map(_local_file, inside)


def _unreadable(error: OSError) -> NoReturn:
    raise FormatError(error.filename, f"cannot be read ({error.strerror}), expected a readable directory") from error


def _local_file(path: Path) -> SourceFile:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(path, f"is no regular file, expected one: {_READ_SEVERAL_TIMES}")
    return SourceFile(str(path), status.st_size, str(status.st_mtime_ns))


def _remote(url: str) -> Iterator[SourceFile]:
    files, path = file_system(url)
    if not files.exists(path):
        if not glob.has_magic(path):
            raise DataNotFoundError(url, "no such file")
        found = sorted(entry for entry in files.glob(path) if PurePosixPath(entry).name != GENERATED_FILE)
        if not found:
            raise DataNotFoundError(url, "matches no file")
    else:
        found = [path]
    for entry in found:
        inside = [entry]
        if files.isdir(entry):
            below = sorted(files.find(entry))
            inside = [file for file in below if _is_data(PurePosixPath(file).relative_to(entry).parts)]
            if not inside:
                raise FormatError(url, "the directory has no data file, expected at least one")
        for file in inside:
            yield SourceFile(files.unstrip_protocol(file), int(files.size(file)), str(files.ukey(file)))


def _is_data(parts: Sequence[str]) -> bool:
    return parts[-1] != GENERATED_FILE and not any(part.startswith((".", "_")) for part in parts)


_SHOWN_CHARACTERS = 400


def check_names(path: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Check that a file which names its columns has the wanted ones, each once.

    Raises:
        ConfigError: It lacks one.
        FormatError: It has one several times.
    """
    for name in wanted:
        if name not in names:
            listed = textwrap.shorten(", ".join(names), _SHOWN_CHARACTERS, placeholder=" ...")
            raise ConfigError(path, f"has no column {name!r}{did_you_mean(name, names)}, expected {listed}")
        if names.count(name) > 1:
            raise FormatError(path, f"names column {name!r} {names.count(name)} times, expected once")


def is_sidecar(path: Path) -> bool:
    """Return whether a file is the `GENERATED_FILE` of a generator, and not a log of that name."""
    if path.name != GENERATED_FILE or not path.is_file():
        return False
    try:
        content = parse_json(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {"best_auc", "files", "seed"} <= content.keys()


def read_best_auc(sources: Sequence[str | Path]) -> float | None:
    """Return ``best_auc`` of the `GENERATED_FILE` in the lowest directory of `sources`; None without one or for URLs.

    Raises:
        FormatError: The file is not JSON, or holds no ``best_auc`` from 0 to 1.
    """
    if not sources or any(is_remote(source) for source in sources):
        return None
    path = Path(os.path.commonpath([Path(source).resolve().parent for source in sources])) / GENERATED_FILE
    if not path.is_file():
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error})") from error
    best_auc = content.get("best_auc") if isinstance(content, dict) else None
    share = checks.number(0.0, 1.0)
    try:
        return float(share.read(best_auc))
    except (ValueError, OverflowError):
        raise FormatError(f"{path}: $.best_auc", f"got {quoted(best_auc)}, expected {share.accepted}") from None
