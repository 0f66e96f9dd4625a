"""The weights of an embedding as a folder, from release 3.1 on. Described in docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.plain import PlainFile, as_bytes, open_plain, spans
from terarec.formats.hugectr.sparse_rows import CHUNK_ROWS, SparseRows
from terarec.io import atomic_dir

KEYS, SLOTS, VECTORS = "key", "slot_id", "emb_vector"
SPARSE_FOLDER_FILES = f"{KEYS}|{SLOTS}|{VECTORS}"
"""Pattern of the names in a folder."""
_KEY, _SLOT, _FLOAT = np.dtype("<i8"), np.dtype("<u8"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class SparseFolder:
    """A folder of a whole embedding, looked at but not read.

    Attributes:
        path: the folder.
        width: length D of a vector.
        count: number of keys.
        has_slots: whether there is a slot for each key.
    """

    path: Path
    width: int
    count: int
    has_slots: bool

    def keys(self) -> NDArray[np.int64]:
        """All keys, int64[count], in file order."""
        return self._file(KEYS, _KEY).read(0, self.count)

    def slots(self) -> NDArray[np.uint64] | None:
        """The slots of all keys, uint64[count], if there are any."""
        return self._file(SLOTS, _SLOT).read(0, self.count) if self.has_slots else None

    def chunks(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[SparseRows]:
        """All rows in file order, at most `chunk_rows` at a time."""
        keys, vectors = self._file(KEYS, _KEY), self._file(VECTORS, np.dtype((_FLOAT, self.width)))
        slots = self._file(SLOTS, _SLOT) if self.has_slots else None
        for start, stop in spans(self.count, chunk_rows):
            yield SparseRows(
                keys.read(start, stop), vectors.read(start, stop), None if slots is None else slots.read(start, stop)
            )

    def _file(self, name: str, dtype: np.dtype[np.generic]) -> PlainFile:
        return PlainFile(self.path / name, dtype, 0, self.count)


def open_sparse_folder(path: Path, width: int) -> SparseFolder:
    """Check the sizes of a folder's files against each other.

    Raises:
        DataNotFoundError: no such folder, or one without keys or vectors.
        FormatError: files of different numbers of keys, or vectors of another width.
    """
    if not path.is_dir():
        raise DataNotFoundError(f"{path}: no such folder")
    keys = open_plain(path / KEYS, _KEY)
    size = keys.count * width * _FLOAT.itemsize
    numbers = open_plain(path / VECTORS, _FLOAT)
    if numbers.count != keys.count * width:
        raise FormatError(
            f"{path / VECTORS}: holds {numbers.count * _FLOAT.itemsize} bytes, expected {size}: "
            f"{keys.count} keys of width {width}"
        )
    has_slots = (path / SLOTS).exists()
    if has_slots:
        slots = open_plain(path / SLOTS, _SLOT)
        if slots.count != keys.count:
            raise FormatError(f"{path / SLOTS}: holds {slots.count} slots, expected {keys.count}, one for each key")
    return SparseFolder(path, width, keys.count, has_slots)


def write_sparse_folder(path: Path, chunks: Iterable[SparseRows]) -> int:
    """Write a folder, in the place of one of the same format if there is one.

    Args:
        path: the folder.
        chunks: all rows; slots in all chunks or in none. No chunk at all makes a folder without slots.

    Returns:
        Number of keys.

    Raises:
        ConfigError: `path` is a file, or a folder with other files in it.
        StorageError: the disk is full; nothing is left behind.
    """
    count = 0
    with atomic_dir(path, replaceable=SPARSE_FOLDER_FILES) as partial, ExitStack() as stack:
        keys, vectors = (stack.enter_context((partial / name).open("wb")) for name in (KEYS, VECTORS))
        slots = None
        for chunk in chunks:
            keys.write(as_bytes(chunk.keys, _KEY))
            vectors.write(as_bytes(chunk.vectors, _FLOAT))
            if chunk.slots is not None:
                slots = slots or stack.enter_context((partial / SLOTS).open("wb"))
                slots.write(as_bytes(chunk.slots, _SLOT))
            count += len(chunk.keys)
    return count
