# SPDX-License-Identifier: Apache-2.0
"""`SharedMemory`: regions of POSIX shared memory that clients on this machine put tensors in, and take them from.

Regions are read and written by calls and not mapped: a client that shortens one cannot end the server with a SIGBUS,
nor change a tensor after it has been checked.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from terarec.errors import ConfigError
from terarec.serve.protocol import NotFoundError, UnsupportedError
from terarec.spec.checks import quoted

_DIRECTORY = Path("/dev/shm")
_MOST_REGIONS = 1024


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region.

    Attributes:
        name: Name in requests.
        key: Name of the shared memory, such as "/scores".
        offset: Position at which the region begins in it.
        byte_size: Bytes of the region.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemory:
    """The regions of a server. Thread-safe; `_lock` guards the table, and is held while a region is in use.

    Attributes:
        max_request_bytes: Limit of the bytes that a request has in regions and in its body.

    Args:
        max_request_bytes: As above.
        directory: Directory in which the system shows shared memory.
    """

    def __init__(self, max_request_bytes: int, directory: Path = _DIRECTORY) -> None:
        self.max_request_bytes = max_request_bytes
        self._directory = directory
        self._lock = threading.Lock()
        self._regions: dict[str, tuple[Region, int]] = {}

    def register(self, region: Region) -> None:
        """Make a region known.

        Raises:
            ConfigError: A region of that name is known, or there is no such shared memory of that size.
            UnsupportedError: The system does not show shared memory as files.
        """
        where = f"shared memory region {quoted(region.name)}"
        key = region.key.removeprefix("/")
        if not key or "/" in key or "\0" in key or key in (".", ".."):
            raise ConfigError(where, f"got the key {quoted(region.key)}, expected a name such as '/scores'")
        if not self._directory.is_dir():
            raise UnsupportedError(where, f"this system has no {self._directory}, expected tensors in the request")
        with self._lock:
            if region.name in self._regions:
                raise ConfigError(where, "already in manager, expected another name")  # as Triton says it
            if len(self._regions) >= _MOST_REGIONS:
                raise ConfigError(where, f"got {_MOST_REGIONS} regions before it, which is the limit")
            try:
                # No link: it could lead to any file. Not blocking: a named pipe would wait for its other end.
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                descriptor = os.open(self._directory / key, flags)
            except OSError as error:
                problem = f"unable to open shared memory region {quoted(region.key)} ({error.strerror})"
                raise ConfigError(where, f"{problem}, expected the key of one") from None
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or region.offset + region.byte_size > status.st_size:
                os.close(descriptor)
                raise ConfigError(
                    where,
                    f"got {region.byte_size} bytes at {region.offset}, expected at most the {status.st_size} of "
                    f"{quoted(region.key)}",
                )
            self._regions[region.name] = region, descriptor

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all; one that is not known is no error, as in Triton."""
        with self._lock:
            for each in list(self._regions) if name is None else [name]:
                entry = self._regions.pop(each, None)
                if entry is not None:
                    os.close(entry[1])

    def status(self, name: str | None = None) -> tuple[Region, ...]:
        """Return a region, or all.

        Raises:
            NotFoundError: It is not known.
        """
        with self._lock:
            if name is None:
                return tuple(region for region, _ in self._regions.values())
            return (self._find(name)[0],)

    def read(self, name: str, offset: int, byte_size: int, where: str) -> bytes:
        """Return bytes of a region.

        Raises:
            NotFoundError: It is not known.
            ConfigError: It has fewer bytes; `where` is the place of the tensor.
        """
        with self._lock:
            region, descriptor = self._find(name)
            _check_size(region, offset, byte_size, where)
            content = os.pread(descriptor, byte_size, region.offset + offset)
        if len(content) < byte_size:
            raise ConfigError(
                where, f"got {len(content)} bytes of {byte_size}, the region {quoted(name)} was shortened"
            )
        return content

    def write(self, name: str, offset: int, content: bytes, byte_size: int, where: str) -> None:
        """Write `content` into a region, into at most `byte_size` bytes of it.

        Raises:
            NotFoundError: It is not known.
            ConfigError: There are fewer bytes; `where` is the place of the tensor.
        """
        if len(content) > byte_size:
            raise ConfigError(where, f"got {byte_size} bytes of shared memory, expected {len(content)}")
        with self._lock:
            region, descriptor = self._find(name)
            _check_size(region, offset, len(content), where)
            if os.fstat(descriptor).st_size < region.offset + offset + len(content):
                raise ConfigError(where, f"the region {quoted(name)} was shortened, expected {len(content)} bytes")
            os.pwrite(descriptor, content, region.offset + offset)

    def close(self) -> None:
        """Forget all regions."""
        self.unregister()

    def _find(self, name: str) -> tuple[Region, int]:
        entry = self._regions.get(name)
        if entry is None:
            raise NotFoundError("shared memory", f"Unable to find system shared memory region: {quoted(name)}")
        return entry


def _check_size(region: Region, offset: int, byte_size: int, where: str) -> None:
    if not 0 <= offset <= region.byte_size - byte_size:
        raise ConfigError(
            where,
            f"got {byte_size} bytes at {offset}, expected at most the {region.byte_size} of the region "
            f"{quoted(region.name)}",
        )
