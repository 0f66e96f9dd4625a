# SPDX-License-Identifier: Apache-2.0
"""Available memory, to reject or spill what does not fit, and the memory that this process uses."""

from __future__ import annotations

import sys
from pathlib import Path

from terarec.errors import NoSpaceError

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, within the container's limit; None if unknown."""
    # A container may have less than the machine, and the machine less than the limit of the container.
    bounds = [bound for bound in (_system_available(), _cgroup_available()) if bound is not None]
    return min(bounds, default=None)


def total_bytes() -> int:
    """Return the bytes of memory that the machine has; 2^40 where it is not known."""
    total = _field_kib(_MEMINFO.read_text(), "MemTotal:") if _MEMINFO.exists() else None
    return total or 2**40


def peak_bytes() -> int:
    """Return the peak of physical memory of this process in bytes; 0 where the system has no such number (Windows)."""
    if _STATUS.exists():  # Linux's rusage also holds what the program that started this one had held
        return _field_kib(_STATUS.read_text(), "VmHWM:") or 0
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def require(num_bytes: int, purpose: str) -> None:
    """Raise `StorageError` if `num_bytes` for `purpose` are more than what is available."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise NoSpaceError(purpose, f"{num_bytes:,} bytes requested, {available:,} available")


def _system_available() -> int | None:
    if not _MEMINFO.exists():
        return None
    return _field_kib(_MEMINFO.read_text(), "MemAvailable:")


def _field_kib(text: str, name: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """Return the available bytes of a version 2 control group; droppable file pages do not count as used."""
    limit_file, usage_file, stat_file = (_CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit_file.exists() and usage_file.exists() and stat_file.exists()):
        return None
    limit = limit_file.read_text().strip()
    if limit == "max":
        return None
    statistics = dict(line.split() for line in stat_file.read_text().splitlines())
    used = int(usage_file.read_text()) - int(statistics.get("inactive_file", 0))
    return max(0, int(limit) - used)
