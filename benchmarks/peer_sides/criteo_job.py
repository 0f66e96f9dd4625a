"""The job of every side of prepare_peers.py: a log in Criteo's layout to encoded files. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

INTEGERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
MIN_COUNT = 15
"""Values that the training rows hold more rarely share one id."""
VALID_FRACTION = 0.1
"""Share of the last rows, to which nothing is fitted."""

Counts = Mapping[str, Sequence[int]]
"""Category -> training rows of each id: missing, rare, then the kept values by falling count."""


@dataclass(frozen=True, kw_only=True)
class Job:
    r"""One log, whole and cut where its validation part begins.

    Attributes:
        whole: all rows, ``label \t 13 integers \t 26 categories``.
        train: its first rows.
        valid: the others.
        out: an empty directory for what is written.
        threads: that may be used.
    """

    whole: Path
    train: Path
    valid: Path
    out: Path
    threads: int


class Side(Protocol):
    """One system; built, with its processes started, from the threads that it may use."""

    version: str

    def prepare(self, job: Job) -> None:
        """Encode and write all rows: categories by falling count, logarithms of numbers."""

    def counts(self, job: Job) -> Counts | None:
        """From what was written, to compare the sides by; None for one that gives other ids."""
