# SPDX-License-Identifier: Apache-2.0
"""Files and folders on a disk, or behind any URL that fsspec supports (``s3://``, ``gs://``, ``hdfs://``)."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from terarec.errors import ConfigError, DataNotFoundError, FormatError, MissingDependencyError, StorageError
from terarec.io.opening import MOST_BYTES, arrow_file, open_file, read_bytes
from terarec.spec.checks import FieldError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PARTIAL_SUFFIX = ".partial"
"""End of the name of a file or directory under construction."""


def adjacent_name(name: str) -> str:
    """Return a new name for a file under construction next to the one of `name`."""
    return f"{name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}"


def final_name(name: str) -> str:
    """Return the name that a file under construction is to have, or `name` itself."""
    return re.sub(rf"(\.[0-9a-f]{{8}})?{re.escape(PARTIAL_SUFFIX)}$", "", name)


class Location(Protocol):
    """File to read from, by any thread.

    Attributes:
        name: Path or URL of the file, for errors.
        size: Size of the file in bytes.
    """

    name: str
    size: int

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes ``start <= i < stop``.

        Raises:
            FormatError: The file has become shorter than it was.
        """
        ...

    def input(self) -> Any:
        """Return an input for PyArrow, which the caller closes: a file of its own, or a binary file object."""
        ...


def is_remote(path: str | Path) -> bool:
    """Return whether `path` is a URL such as ``s3://bucket/key``."""
    return "://" in str(path)


def folder_and_name(path: str | Path) -> tuple[str, str]:
    """Split `path`, a path or a URL, into folder and name."""
    folder, slash, name = str(path).rpartition("/")
    if folder.endswith(":/"):  # of a URL without a folder
        folder += "/"
    return folder or slash or ".", name


def locate(path: str | Path) -> Location:
    """Return the file at `path`, a path or a URL.

    Raises:
        DataNotFoundError: There is no such file.
        ConfigError: A URL of a type that fsspec does not know.
        MissingDependencyError: Fsspec, or the library that it needs for this type of URL, is not installed.
    """
    return _RemoteFile(str(path)) if is_remote(path) else _LocalFile(Path(path))


def read_content(path: str | Path) -> bytes:
    """Return the content of a small file at a path or a URL.

    Raises:
        FormatError: A larger file; besides what `locate` raises.
    """
    if not is_remote(path):
        return read_bytes(path)
    file = locate(path)
    if file.size > MOST_BYTES:
        raise FormatError(path, f"has {file.size:,} bytes, expected at most {MOST_BYTES:,}")
    return file.read(0, file.size).tobytes()


def read_text(path: str | Path) -> str:
    """Read the text of a small file at a path or a URL.

    Raises:
        FormatError: Not UTF-8; besides what `read_content` raises.
    """
    try:
        return read_content(path).decode()
    except UnicodeDecodeError as error:
        raise FormatError(path, f"byte {error.start} is not UTF-8 text") from None


class _LocalFile:
    def __init__(self, path: Path) -> None:
        with open_file(path, is_buffered=False) as file:
            self.size = os.fstat(file.fileno()).st_size
        self.name = str(path)
        self._path = path

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        import numpy as np  # here: the command line reads JSON by this module, and starts without NumPy

        content = np.empty(stop - start, dtype=np.uint8)
        view = content.data
        done = 0
        with open_file(self._path, is_buffered=False) as stream:
            stream.seek(start)
            while done < len(view):  # one read call stops at 2 GiB
                count = stream.readinto(view[done:])
                if not count:
                    raise _cut_short(self.name, start + done, stop)
                done += count
        return content

    def input(self) -> Any:
        return arrow_file(self._path)


class _RemoteFile:
    def __init__(self, url: str) -> None:
        self.name = url
        self._files, self._path = file_system(url)
        try:
            information = self._files.info(self._path)
        except FileNotFoundError:
            raise DataNotFoundError(url, "no such file") from None
        except OSError as error:
            raise StorageError(url, f"cannot be read: {error}") from error
        if information["type"] != "file" or information["size"] is None:  # as a pipe behind file://, or a folder
            raise FormatError(url, f"is of type {information['type']} and size {information['size']}, expected a file")
        self.size = int(information["size"])

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        try:
            content = self._files.cat_file(self._path, start=start, end=stop) if stop > start else b""
        except FileNotFoundError:
            raise DataNotFoundError(self.name, "no such file") from None
        except OSError as error:
            raise StorageError(self.name, f"cannot be read: {error}") from error
        if len(content) != stop - start:
            raise _cut_short(self.name, start + len(content), stop)
        import numpy as np

        return np.frombuffer(content, dtype=np.uint8)

    def input(self) -> Any:
        return self._files.open(self._path, "rb")


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path in it.

    Raises:
        ConfigError: A URL of a type that fsspec does not know.
        MissingDependencyError: Fsspec, or the library that it needs for this type of URL, is not installed.
    """
    try:
        import fsspec  # only remote paths need it
    except ImportError as error:
        raise MissingDependencyError(url, "remote files need fsspec: pip install fsspec") from error
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingDependencyError(url, error) from error
    except ValueError as error:
        raise ConfigError(url, f"{error}, expected a path or a URL that fsspec knows") from None
    return files, path


def _cut_short(name: str, size: int, stop: int) -> FormatError:
    return FormatError(name, f"ends at byte {size}, expected at least {stop} bytes as when it was opened")


@contextmanager
def local_copy(path: str | Path, *, adjacent: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the file or folder at `path`; for a URL a local copy that exists during the block.

    Args:
        path: Path or URL. A missing file gives a path without a file; its reader reports the error.
        adjacent: Suffixes; files named `path` plus one of them are copied, too.

    Raises:
        ConfigError: A URL of a type that fsspec does not know.
        MissingDependencyError: Fsspec, or the library that it needs for this type of URL, is not installed.
    """
    if not is_remote(path):
        yield Path(path)
        return
    # With a slash at its end the copy would have no name.
    url = str(path).rstrip("/")
    with tempfile.TemporaryDirectory(prefix="terarec-") as scratch:
        local = Path(scratch) / url.rpartition("/")[2]
        for suffix in ("", *adjacent):
            _download(url + suffix, Path(f"{local}{suffix}"))
        try:
            yield local
        except (FormatError, StorageError) as error:  # the user knows the URL alone
            parts = (part.replace(str(local), url) for part in (error.where, error.problem))
            raise type(error)(*parts) from error


def upload(local: Path, url: str, *, replaceable: str) -> None:
    """Copy the entries of the directory `local` below `url`: first to adjacent names, then one by one into place.

    Args:
        local: Directory of the files and folders.
        url: URL of the target.
        replaceable: Pattern of the names in a folder that may be replaced.

    Raises:
        ConfigError: A folder in place of a file, or one that holds something of others; nothing is changed then.
    """
    files, root = file_system(url)
    folders = [f"{root}/{entry.name}" for entry in sorted(local.iterdir()) if entry.is_dir()]
    places = {path: f"{root}/{path.relative_to(local).as_posix()}" for path in _files_below(local)}
    # Looked up before anything is written, so that a file of others in the way leaves everything as it was.
    former = [name for folder in folders for name in _names_in(files, folder, replaceable)]
    for place in places.values():
        if files.isdir(place):
            raise FieldError("", "out", f"{place} is a folder, expected a file or nothing there")
    partial = {place: adjacent_name(place) for place in places.values()}
    try:
        for path, place in places.items():
            files.makedirs(place.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), partial[place])
        # Everything is there under adjacent names by now; what is left to do is short.
        for name in former:
            files.rm(name)
        for place in places.values():
            if files.exists(place):
                files.rm(place)
            files.mv(partial[place], place)
    finally:
        for place in partial.values():
            if files.exists(place):
                files.rm(place)


def _download(url: str, local: Path) -> None:
    """Copy the file or folder at `url`, if there is one, to `local`."""
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
    """Return the files of a folder to be replaced; none if there is no folder."""
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
    """Remove `folder`, which fsspec writes with or without a leading slash, from the start of `name`."""
    return name.strip("/").removeprefix(folder.strip("/")).strip("/")


def _files_below(local: Path) -> list[Path]:
    return sorted(path for path in local.rglob("*") if path.is_file())
