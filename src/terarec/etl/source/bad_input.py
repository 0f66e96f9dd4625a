"""Faults of the sources: kind, place, and the policy that applies."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from terarec.errors import FormatError
from terarec.spec.quoting import quoted

Place = Literal["line", "row"]
"""Unit in which rows of a file are counted: lines or, in files without lines, rows."""

FAULTS_SHOWN = 10
FATAL = "quote"
"""The kind of fault that ends the reading under every policy: text behind an invalid quote may be part of a field, and
must not become a row."""
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFault:
    """A fault in a file.

    Attributes:
        path: File.
        place: "line" or, in files without lines, "row".
        number: Number of the line or row in the file, from 1.
        kind: One word for the kind of fault.
        column: Column where it is in one field.
        got: Content found there.
        expected: Accepted values.
    """

    path: str
    place: Place = "line"
    number: int
    kind: str
    column: str | None
    got: str
    expected: str

    def error(self) -> FormatError:
        """Return the fault as an error."""
        column = "" if self.column is None else f", column {self.column!r}"
        return FormatError(f"{self.path}: {self.place} {self.number}{column}", f"{self.got}, expected {self.expected}")

    def __str__(self) -> str:
        return str(self.error())


@dataclass(frozen=True, slots=True)
class BadInputReport:
    """Bad input in all rows that were read.

    Attributes:
        counts: Faults of each kind that occurred.
        first: First `FAULTS_SHOWN` in the order of the sources.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    first: tuple[InputFault, ...] = ()


def show(content: bytes | str) -> str:
    """Return the content of a field for a message, cut if it is long."""
    text = content.decode("utf-8", errors="backslashreplace") if isinstance(content, bytes) else content
    return f"got {quoted(text, most=_SHOWN_CHARACTERS + 2)}"


class BadInputLog:
    """Gathers the faults of blocks. Any thread may add; a block that is read again counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, bool], Mapping[str, int]] = {}
        self._first: dict[int, dict[bool, Sequence[InputFault]]] = {}

    def add(
        self, first_row: int, counts: Mapping[str, int], faults: Sequence[InputFault], *, is_read: bool = False
    ) -> None:
        """Take in the faults of a block.

        Args:
            first_row: Id of its first row.
            counts: Faults of each kind.
            faults: First ones.
            is_read: Whether they were found once the block was read.
        """
        if not counts:
            return
        ordered = sorted(faults, key=lambda fault: fault.number)[:FAULTS_SHOWN]
        with self._lock:
            self._counts[first_row, is_read] = counts
            self._first.setdefault(first_row, {})[is_read] = ordered
            if len(self._first) > FAULTS_SHOWN:
                del self._first[max(self._first)]

    def report(self, until_row: int | None = None) -> BadInputReport:
        """Return all faults, or those in the blocks before the one that begins with `until_row`."""
        with self._lock:
            counts: Counter[str] = Counter()
            for (first_row, _), block_counts in self._counts.items():
                if until_row is None or first_row < until_row:
                    counts.update(block_counts)
            faults: list[InputFault] = []
            for first_row, block in sorted(self._first.items()):
                if until_row is not None and first_row >= until_row:
                    break
                faults += heapq.merge(*block.values(), key=lambda fault: fault.number)
        return BadInputReport(dict(sorted(counts.items())), tuple(faults[:FAULTS_SHOWN]))
