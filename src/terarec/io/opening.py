# SPDX-License-Identifier: Apache-2.0
"""Opening of files: something else than a file (a pipe, a device, a socket, a directory) is an error and no hang."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
from io import BufferedReader, BufferedWriter, FileIO, IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from terarec.errors import DataNotFoundError, FormatError

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BYTES = 256 << 20
"""Most bytes of a file that is read whole: descriptions and other small files."""
_COPIED_BYTES = 1 << 20
_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
}
# Systems other than POSIX lack some of these. Without O_NONBLOCK the opening of a pipe waits for its other end.
_ALWAYS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@overload
def open_file(path: str | Path, mode: Literal["rb"] = "rb") -> BufferedReader: ...
@overload
def open_file(path: str | Path, mode: Literal["rb"] = "rb", *, is_buffered: Literal[False]) -> FileIO: ...
@overload
def open_file(path: str | Path, mode: Literal["ab"]) -> BufferedWriter: ...
def open_file(path: str | Path, mode: Literal["rb", "ab"] = "rb", *, is_buffered: bool = True) -> IOBase:
    """Open a regular file to read it, or to append to it.

    Args:
        path: Path of the file, which may be a link.
        mode: "rb" to read, "ab" to append; the latter creates a missing file.
        is_buffered: Whether reads and writes pass through a buffer.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Something else than a file is there.
        OSError: The file may not be opened.
    """
    file = FileIO(_descriptor(path, mode), mode)
    if not is_buffered:
        return file
    return BufferedReader(file) if mode == "rb" else BufferedWriter(file)


def allow_open_files(wanted: int) -> int:
    """Return how many open files the system allows this process: it is let have `wanted`, as far as possible."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return sys.maxsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    # A process may raise its soft limit up to the hard one; containers often start with a soft limit of 1,024.
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _descriptor(path: str | Path, mode: str) -> int:
    try:
        # Looked at before it is opened, which makes some devices act, and after it, as it may have been replaced.
        try:
            _check(path, os.stat(path))
        except FileNotFoundError:  # also where it was there a moment before, as lock files are
            if mode == "rb":
                raise
        descriptor = os.open(path, _FLAGS[mode] | _ALWAYS, 0o666)
    except (FileNotFoundError, NotADirectoryError):
        raise DataNotFoundError(path, "no such file") from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe or a socket that has just taken the place of a file
            raise FormatError(path, "is a pipe, a socket or a device, expected a file") from None
        raise
    except FormatError:
        raise
    except ValueError as error:  # a null character, or half a surrogate pair
        raise FormatError(path, f"is not a path ({error})") from None
    try:
        _check(path, os.fstat(descriptor))
    except FormatError:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise FormatError(path, f"is {kind}, expected a file")


def read_bytes(path: str | Path, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most so many bytes.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: A larger file, or something else than a file.
        OSError: The file may not be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise FormatError(path, f"has {max(size, len(content)):,} bytes, expected at most {most:,}")
    return content


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Something else than a file is there.
        OSError: The file may not be read.
    """
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy the content of a regular file to a new file; the arguments are those of a `copy_function` of `copytree`.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Something else than a file is there.
        OSError: The file may not be read, or the other one written.
    """
    with open_file(source, is_buffered=False) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy, _COPIED_BYTES)


def link_or_copy(source: str | Path, target: str | Path) -> bool:
    """Give a regular file, which nothing changes any more, a second name; copy it where that is not possible.

    Returns:
        Whether both names are of one file: it then takes its space once.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Something else than a file is there.
        OSError: The file may not be read, or the other one written.
    """
    with open_file(source, is_buffered=False):  # checks that it is one
        try:
            os.link(os.path.realpath(source), target)  # of a link its file, as a copy has it
        # Another file system, one without links, or a file of another user.
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
                raise
        else:
            return True
    copy_file(source, target)
    return False


def arrow_file(path: str | Path, *, is_mapped: bool = False) -> pa.NativeFile:
    """Open a regular file for PyArrow, which reads it without Python's lock; the caller closes it.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Something else than a file is there.
        OSError: The file may not be opened.
    """
    import pyarrow as pa  # the command line reads JSON by this package, and starts without Arrow

    descriptor = _descriptor(path, "rb")
    try:
        place = link(descriptor, path)
        return pa.memory_map(place) if is_mapped else pa.OSFile(place)
    finally:
        os.close(descriptor)


def link(descriptor: int, path: str | Path) -> str:
    """Return a path that leads to an open file, whatever becomes of `path`, for libraries that take a path alone."""
    place = f"/dev/fd/{descriptor}"
    return place if os.path.exists(place) else str(path)
