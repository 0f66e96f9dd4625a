"""How much memory this process has taken."""

from __future__ import annotations

import sys


def peak_memory_bytes() -> int:
    """Most bytes of physical memory that this process has held so far; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
