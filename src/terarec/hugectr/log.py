"""Lines on standard output with the prefix of the release that a script asks for."""

from __future__ import annotations

from datetime import datetime


class Log:
    """Prints lines as HugeCTR's log does.

    Args:
        release: whose prefix to print, such as "25.03".
    """

    def __init__(self, release: str) -> None:
        self._major = int(release.split(".")[0])

    def __call__(self, message: str) -> None:
        """One line with its prefix."""
        print(f"{self._prefix(datetime.now())}{message}", flush=True)

    def bare(self, message: str) -> None:
        """One line without a prefix."""
        print(message, flush=True)

    def _prefix(self, now: datetime) -> str:
        if self._major == 2:
            return f"[{now:%d}d{now:%H}h{now:%M}m{now:%S}s][HUGECTR][INFO]: "
        if self._major == 3:
            return f"[HUGECTR][{now:%H:%M:%S}][INFO][RANK0]: "
        return f"[HCTR][{now:%H:%M:%S}.{now.microsecond // 1000:03d}][INFO][RK0][main]: "
