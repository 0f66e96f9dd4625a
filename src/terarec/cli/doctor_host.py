"""What ``terarec doctor`` asks the machine: processor, memory, disk, huge pages. Linux files; elsewhere None."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

_FEATURES = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "bf16": "bf16",
}
"""Names in /proc/cpuinfo (x86 flags, Arm features) that matter for the kernels -> what we call them."""


def processor() -> dict[str, Any]:
    """Model, features that kernels care about, cores of the machine and cores that this process may use."""
    text = _read("/proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "features": [ours for theirs, ours in _FEATURES.items() if theirs in words],
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
    }


def memory() -> dict[str, Any]:
    """Bytes of memory: installed, free for use now, and this container's limit (None for no limit)."""
    text = _read("/proc/meminfo") or ""
    kibibytes = {name: int(count) for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total = kibibytes.get("MemTotal")
    available = kibibytes.get("MemAvailable")
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes") or ""
    # The first generation of cgroups writes a number near 2^63 for "no limit".
    limited = limit.isdecimal() and int(limit) < 1 << 60
    return {
        "total_bytes": None if total is None else total * 1024,
        "available_bytes": None if available is None else available * 1024,
        "container_limit_bytes": int(limit) if limited else None,
    }


def huge_pages() -> str | None:
    """The kernel's setting for transparent huge pages: "always", "madvise" or "never"."""
    chosen = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen.group(1) if chosen else None


def disk(path: Path) -> dict[str, Any]:
    """Room on the disk that holds `path`."""
    usage = shutil.disk_usage(path)
    return {"path": str(path), "total_bytes": usage.total, "free_bytes": usage.free}


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes in this process; more than one would mean two pools on the same cores."""
    mapped = re.findall(r"(/\S*lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*)$", _read("/proc/self/maps") or "", re.MULTILINE)
    return sorted(set(mapped))


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
