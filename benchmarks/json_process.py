# SPDX-License-Identifier: Apache-2.0
"""Run a side of a comparison in its own process, which answers each line of JSON with one line."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class JsonProcess:
    """A process ``python -m module arguments`` in the folder of this file, whose first line has its versions.

    Attributes:
        version: The first line.
    """

    def __init__(self, python: Path, module: str, arguments: Sequence[str]) -> None:
        if not python.exists():
            raise SystemExit(f"{module}: got no interpreter {python}, expected the one that `make peers` makes")
        self._process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        self.version: str = self._answer()

    def request(self, do: str, **arguments: object) -> Any:
        """Return the answer of the process to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self._process.wait()}: {self._process.args}")
        return json.loads(line)


def median_of(answers: Sequence[Mapping[str, float]], figure: str) -> float:
    """Return the median of a figure over several answers."""
    return statistics.median(answer[figure] for answer in answers)


def threads() -> int:
    """Return the number of threads of every side: one per core."""
    return len(os.sched_getaffinity(0))


def _environment() -> dict[str, str]:
    """Return the environment of every side: one thread per core, and a C allocator that keeps freed memory."""
    count = str(threads())
    # A result of peers.py has 0.4 GiB at most. Blocks above the first bound are mapped and cleared again in each step.
    kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **kept, **quiet, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
