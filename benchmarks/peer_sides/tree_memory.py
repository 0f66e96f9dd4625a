# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of a process and its descendants, such as a JVM. It needs only the standard library."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType

_SECONDS = 0.2  # between two samples
_PAGE = os.sysconf("SC_PAGE_SIZE")


class TreeMemory:
    """Within a ``with`` block, the most bytes that this process and its descendants held in memory at one time.

    Attributes:
        peak: Most bytes at one time.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> TreeMemory:
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, _tree_bytes(os.getpid()))
            if self._ended.wait(_SECONDS):
                return


def _tree_bytes(root: int) -> int:
    children, resident = defaultdict(list), {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                resident[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * _PAGE
            except OSError:  # it has ended
                continue
            children[parent].append(int(folder.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += resident.get(process, 0)
        waiting += children[process]
    return total
