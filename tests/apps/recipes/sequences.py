# SPDX-License-Identifier: Apache-2.0
"""A file of sequences with a planted answer: item k is followed by item k % ITEMS + 1."""

from pathlib import Path

import numpy as np

ITEMS = 12


def write_planted_sequences(directory: Path, *, users: int = 120, name: str = "Beauty.txt") -> Path:
    """Write the file and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for user in range(1, users + 1):
        start, length = rng.integers(0, ITEMS), rng.integers(5, 9)
        lines.append(" ".join(map(str, [user, *((start + np.arange(length)) % ITEMS + 1)])))
    (directory / name).write_text("\n".join(lines) + "\n")
    return directory
