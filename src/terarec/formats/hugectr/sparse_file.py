"""The weights of an embedding as one file, up to release 3.0. Described in docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.plain import open_plain, spans
from terarec.formats.hugectr.sparse_rows import CHUNK_ROWS, SparseRows
from terarec.io import atomic_file

KeyBytes = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class SparseFileLayout:
    """What such a file does not say itself.

    Attributes:
        width: length D of a vector.
        key_bytes: 4 for uint32 keys, 8 for int64.
        has_slots: whether a slot follows each key, as for localized embeddings.
    """

    width: int
    key_bytes: KeyBytes
    has_slots: bool

    @property
    def record(self) -> np.dtype[Any]:
        """One entry: "key", "slot" if there are slots, "vector"."""
        slot = [("slot", "<u8")] if self.has_slots else []
        return np.dtype([("key", "<u4" if self.key_bytes == 4 else "<i8"), *slot, ("vector", "<f4", (self.width,))])


def read_sparse_file(path: Path, layout: SparseFileLayout, chunk_rows: int = CHUNK_ROWS) -> Iterator[SparseRows]:
    """All rows in file order, at most `chunk_rows` at a time.

    Raises:
        DataNotFoundError: no such file.
        FormatError: a size that no whole number of entries has.
    """
    file = open_plain(path, layout.record)
    for start, stop in spans(file.count, chunk_rows):
        entries = file.read(start, stop)
        slots = np.ascontiguousarray(entries["slot"]) if layout.has_slots else None
        yield SparseRows(entries["key"].astype(np.int64), np.ascontiguousarray(entries["vector"]), slots)


def write_sparse_file(path: Path, layout: SparseFileLayout, chunks: Iterable[SparseRows]) -> int:
    """Write all rows.

    Returns:
        Number of keys.

    Raises:
        FormatError: a key that 4 bytes do not hold, a vector of another width, or slots missing or not asked for.
        StorageError: the disk is full; nothing is left behind.
    """
    count = 0
    with atomic_file(path) as partial, partial.open("wb") as stream:
        for chunk in chunks:
            stream.write(_entries(path, layout, chunk).data)
            count += len(chunk.keys)
    return count


def _entries(path: Path, layout: SparseFileLayout, chunk: SparseRows) -> NDArray[Any]:
    if layout.key_bytes == 4:
        outside = (chunk.keys < 0) | (chunk.keys >= 2**32)
        if outside.any():
            raise FormatError(f"{path}: got key {chunk.keys[outside][0]}, expected 0 <= key < 2**32 in 4 bytes")
    if chunk.vectors.shape != (len(chunk.keys), layout.width):
        expected = [len(chunk.keys), layout.width]
        raise FormatError(f"{path}: got vectors {list(chunk.vectors.shape)}, expected {expected}")
    if (chunk.slots is not None) != layout.has_slots:
        raise FormatError(f"{path}: expected {'a slot for each key' if layout.has_slots else 'keys without slots'}")
    entries = np.empty(len(chunk.keys), layout.record)
    entries["key"], entries["vector"] = chunk.keys, chunk.vectors
    if chunk.slots is not None:
        entries["slot"] = chunk.slots
    return entries.view(np.uint8)
