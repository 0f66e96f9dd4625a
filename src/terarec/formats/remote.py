"""Files and folders behind URLs that fsspec knows, copied to and from a disk as wholes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terarec.errors import FormatError, StorageError
from terarec.formats.atomic import PARTIAL_SUFFIX
from terarec.formats.location import file_system, is_remote
from terarec.spec import FieldError


@contextmanager
def local_copy(path: str | Path, *, beside: Sequence[str] = ()) -> Iterator[Path]:
    """The file or folder at `path`, or a copy of it for the time of the block if `path` is a URL.

    Args:
        path: path or URL. Nothing there gives a path without a file, for which its reader has the error.
        beside: suffixes; files that are named so behind `path` come along.

    Raises:
        ConfigError: a URL of a kind that fsspec does not know.
        MissingDependencyError: fsspec, or the library that it needs for this kind of URL, is not installed.
    """
    if not is_remote(path):
        yield Path(path)
        return
    url = str(path).rstrip("/")
    with tempfile.TemporaryDirectory(prefix="terarec-") as held:
        local = Path(held) / url.rpartition("/")[2]
        for suffix in ("", *beside):
            _download(url + suffix, Path(f"{local}{suffix}"))
        try:
            yield local
        except (FormatError, StorageError) as error:  # the user knows the URL alone
            raise type(error)(str(error).replace(str(local), url)) from error


def upload(local: Path, url: str, *, replaceable: str) -> None:
    """Copy all entries of the directory `local` to below `url`: first beside their places, then one by one to these.

    Args:
        local: files and folders.
        url: where they go.
        replaceable: pattern of the names in a folder that may be replaced.

    Raises:
        ConfigError: a folder in the place of a file, or one that holds something of others; nothing is changed then.
    """
    files, root = file_system(url)
    folders = [f"{root}/{entry.name}" for entry in sorted(local.iterdir()) if entry.is_dir()]
    places = {path: f"{root}/{path.relative_to(local).as_posix()}" for path in _files_below(local)}
    former = [name for folder in folders for name in _names_in(files, folder, replaceable)]
    for place in places.values():
        if files.isdir(place):
            raise FieldError("", "out", f"{place} is a folder, expected a file or nothing there")
    try:
        for path, place in places.items():
            files.makedirs(place.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), place + PARTIAL_SUFFIX)
        for name in former:
            files.rm(name)
        for place in places.values():
            if files.exists(place):
                files.rm(place)
            files.mv(place + PARTIAL_SUFFIX, place)
    finally:
        for place in places.values():
            if files.exists(place + PARTIAL_SUFFIX):
                files.rm(place + PARTIAL_SUFFIX)


def _download(url: str, local: Path) -> None:
    """Copy what is at `url`, if anything is, to `local`."""
    files, root = file_system(url)
    if files.isfile(root):
        files.get_file(root, str(local))
    elif files.isdir(root):
        local.mkdir(parents=True)
        for name in files.find(root):
            target = local / _below(name, root)
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(target))


def _names_in(files: Any, folder: str, replaceable: str) -> list[str]:
    """The files of a folder that is to be replaced; none where there is no folder."""
    if not files.exists(folder):
        return []
    names: list[str] = files.find(folder)
    for name in names:
        if not re.fullmatch(replaceable, _below(name, folder)):
            raise FieldError(
                "", "out", f"{folder} holds {_below(name, folder)!r}, expected a folder with nothing of others in it"
            )
    return names


def _below(name: str, folder: str) -> str:
    """`name` without `folder` before it, which fsspec writes with or without a slash at its begin."""
    return name.strip("/").removeprefix(folder.strip("/")).strip("/")


def _files_below(local: Path) -> list[Path]:
    return sorted(path for path in local.rglob("*") if path.is_file())
