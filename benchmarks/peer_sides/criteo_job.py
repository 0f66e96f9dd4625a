# SPDX-License-Identifier: Apache-2.0
"""The job of every side of prepare_peers.py: encode a log in Criteo's layout. It needs only the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

INTEGERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
MIN_COUNT = 15
"""Least count in the training rows; values with a lower count share one id."""
VALID_FRACTION = 0.1
"""Share of the last rows, which are not used to fit."""

Counts = Mapping[str, Sequence[int]]
"""Number of training rows of each id, by category: missing, rare, then the kept values by falling count."""


@dataclass(frozen=True, kw_only=True)
class Job:
    r"""One log, as a whole and split into its training and validation part.

    Attributes:
        whole: All rows, ``label \t 13 integers \t 26 categories``.
        train: The first rows.
        valid: The other rows.
        out: Empty directory for output.
        threads: Number of threads to use.
    """

    whole: Path
    train: Path
    valid: Path
    out: Path
    threads: int


class Side(Protocol):
    """One system; built from its number of threads, with its processes started."""

    version: str

    def prepare(self, job: Job) -> None:
        """Encode and write all rows: categories by falling count, logarithms of numbers."""

    def counts(self, job: Job) -> Counts | None:
        """Return the counts of the written ids, to compare the sides; None if the side assigns ids differently."""
