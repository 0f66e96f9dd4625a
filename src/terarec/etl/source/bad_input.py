"""What is wrong in the sources, where it stands, and what to do about it."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

BadInputPolicy = Literal["raise", "skip", "missing"]
"""What happens to bad input: "raise" ends with it, "skip" leaves its row out, "missing" makes its field missing."""

BAD_INPUT_POLICIES: tuple[BadInputPolicy, ...] = ("raise", "skip", "missing")

FAULTS_SHOWN = 10
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFault:
    """One thing that is wrong in a file.

    Attributes:
        path: the file.
        place: "line" or, in files without lines, "row".
        number: of the line or row in the file, from 1.
        kind: one word for the kind of fault.
        column: where it is in one field.
        got: what stands there, or was found.
        expected: what is accepted.
    """

    path: str
    place: Literal["line", "row"] = "line"
    number: int
    kind: str
    column: str | None
    got: str
    expected: str

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column!r}"
        return f"{self.path}: {self.place} {self.number}{column}: {self.got}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class BadInputReport:
    """The bad input of all that was read.

    Attributes:
        counts: faults of each kind that occurred.
        first: the first `FAULTS_SHOWN` in the order of the sources.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    first: tuple[InputFault, ...] = ()


def show(content: bytes | str) -> str:
    """The content of a field for a message, cut if it is long."""
    text = content.decode("utf-8", errors="backslashreplace") if isinstance(content, bytes) else content
    return f"got {text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + '...'!r}"


class BadInputLog:
    """Gathers the faults of blocks. Any thread may add; a block that is read again counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, Mapping[str, int]] = {}
        self._first: dict[int, Sequence[InputFault]] = {}

    def add(self, first_row: int, counts: Mapping[str, int], faults: Sequence[InputFault]) -> None:
        """Take in the faults of the block that begins with row `first_row`; `faults` are the first ones."""
        if not counts:
            return
        with self._lock:
            self._counts[first_row] = counts
            self._first[first_row] = faults[:FAULTS_SHOWN]
            if len(self._first) > FAULTS_SHOWN:
                del self._first[max(self._first)]

    def report(self) -> BadInputReport:
        """All that was added."""
        with self._lock:
            counts: Counter[str] = Counter()
            for block_counts in self._counts.values():
                counts.update(block_counts)
            blocks = heapq.nsmallest(FAULTS_SHOWN, self._first)
            faults = [fault for block in blocks for fault in self._first[block]]
        return BadInputReport(dict(sorted(counts.items())), tuple(faults[:FAULTS_SHOWN]))
