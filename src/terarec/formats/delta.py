# SPDX-License-Identifier: Apache-2.0
"""Deltas: changes of tables since an earlier state, and the chain that they form. Described in docs/formats.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.container import read_tensors, write_tensors
from terarec.spec import checks

KEYS, REMOVED = "keys", "removed"
_HEX = set("0123456789abcdef")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateId:
    """A state of a model.

    Attributes:
        step: Training steps done.
        id: SHA-256 of its description in hexadecimal; for a checkpoint, of its ``manifest.json``.
    """

    step: checks.NonNegativeInt
    id: str

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.id, str) or len(self.id) != 64 or not set(self.id) <= _HEX:
            checks.fail(self, "id", "a SHA-256 of 64 hexadecimal digits")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaLink:
    """The place of a delta in its chain: a base, then deltas, each with the changes since the state before.

    Attributes:
        base: The state at the start of the chain, which is complete.
        previous: The state that the delta follows: the base, or the state after the previous delta.
        sequence: Number of the delta, 1 for the first after the base.
    """

    base: StateId
    previous: StateId
    sequence: checks.PositiveInt

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.sequence == 1 and self.previous != self.base:
            checks.reject(self, "previous", f"got step {self.previous.step}, expected the base for delta 1")

    def check_follows(self, step: int, previous: StateId, link: DeltaLink | None) -> None:
        """Raise unless this delta, of the state after `step` steps, follows a state.

        Args:
            step: Training steps of the state that this delta leads to.
            previous: The state.
            link: The link of the delta that led to it; None for a base.

        Raises:
            FormatError: It follows another state, is repeated, or one is missing in between.
        """
        base, number = (previous, 1) if link is None else (link.base, link.sequence + 1)
        # Ids as well as numbers: two runs from one checkpoint have deltas of the same steps and numbers.
        if self.previous != previous or self.base != base or self.sequence != number or step <= previous.step:
            mine, expected = _described(self), _described(DeltaLink(base=base, previous=previous, sequence=number))
            raise FormatError(f"delta of step {step}", f"is {mine}, expected {expected}")

    @classmethod
    def after(cls, previous: StateId, link: DeltaLink | None) -> DeltaLink:
        """Return the link of a delta that follows a state, which `link` led to; None for a base."""
        base, number = (previous, 1) if link is None else (link.base, link.sequence + 1)
        return cls(base=base, previous=previous, sequence=number)


def _described(link: DeltaLink) -> str:
    return (
        f"number {link.sequence} after step {link.previous.step} ({link.previous.id[:12]}) of base {link.base.step} "
        f"({link.base.id[:12]})"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableChanges:
    """A piece of the changes of one table: first keys are removed, then rows are set.

    Attributes:
        table: Name of the table.
        table_rows: Rows of the table after all pieces.
        removed: int64[m], keys that have no row any more.
        keys: int64[n], keys of the rows.
        rows: Name -> values [n, ...]: "weights", "state.<name>" and "use.<name>".
    """

    table: str
    table_rows: int
    removed: NDArray[np.int64]
    keys: NDArray[np.int64]
    rows: Mapping[str, NDArray[Any]]


def write_changes(path: Path, changes: TableChanges) -> str:
    """Write a piece atomically, but do not force it to the disk; return its SHA-256 in hexadecimal.

    Raises:
        FormatError: An element type that containers lack.
        StorageError: The disk is full; nothing is left behind.
    """
    metadata = {"table": changes.table, "table_rows": str(changes.table_rows)}
    return write_tensors(path, {REMOVED: changes.removed, KEYS: changes.keys, **changes.rows}, metadata, flushes=False)


def read_changes(path: Path, *, sha256: str | None = None) -> TableChanges:
    """Read a piece.

    Args:
        path: The file.
        sha256: Expected checksum; None for no comparison.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Damaged, or not a piece of changes.
    """
    arrays, metadata = read_tensors(path, sha256=sha256)
    removed, keys = (arrays.pop(name, None) for name in (REMOVED, KEYS))
    for name, array in ((REMOVED, removed), (KEYS, keys)):
        if array is None or array.dtype != np.int64 or array.ndim != 1:
            got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise FormatError(path, f"tensor {name!r}: got {got}, expected int64[n]")
    assert removed is not None and keys is not None  # noqa: PT018 - which the loop has checked
    for name, array in arrays.items():
        # Before rows are set: a piece is applied as a whole or not at all.
        if array.shape[:1] != keys.shape:
            raise FormatError(path, f"tensor {name!r}: got {list(array.shape)}, expected {len(keys)} rows")
    table_rows = metadata.get("table_rows", "")
    if set(metadata) != {"table", "table_rows"} or not checks.is_count(table_rows):
        raise FormatError(path, f"describes itself as {metadata}, expected table and table_rows")
    return TableChanges(table=metadata["table"], table_rows=int(table_rows), removed=removed, keys=keys, rows=arrays)
