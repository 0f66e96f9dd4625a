# SPDX-License-Identifier: Apache-2.0
"""Model files: weights and optimizer states of layers and embeddings. See docs/hugectr-formats.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.fields import PlainFile, as_bytes, check_key_range, open_plain, spans
from terarec.io.directories import atomic_dir
from terarec.io.exchange import end_replacement
from terarec.io.files import atomic_file, read_json, write_json

_FLOAT = np.dtype("<f4")


def write_floats(path: Path, arrays: Iterable[NDArray[np.float32]]) -> None:
    """Write `arrays` end to end, each row-major; without arrays the file is empty."""
    with atomic_file(path) as partial, partial.open("wb") as stream:
        for array in arrays:
            stream.write(as_bytes(array, _FLOAT))


def read_floats(path: Path, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> list[NDArray[np.float32]]:
    """Read a file of `write_floats`.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A file of another size, with the array in which it ends.
    """
    sizes = [math.prod(shape) for _, shape in arrays]
    file = open_plain(path, _FLOAT)
    if file.count != sum(sizes):
        where = _where_it_ends(file.count, arrays)
        raise FormatError(path, f"holds {4 * file.count} bytes, expected {4 * sum(sizes)}: {where}")
    flat = file.read(0, file.count)
    stops = list(itertools.accumulate(sizes))
    return [
        flat[stop - size : stop].reshape(shape) for stop, size, (_, shape) in zip(stops, sizes, arrays, strict=True)
    ]


def _where_it_ends(count: int, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    start = 0
    for name, shape in arrays:
        stop = start + math.prod(shape)
        if count < stop:
            return f"{name} {list(shape)} is bytes {4 * start} to {4 * stop}"
        start = stop
    return f"the last array ends at byte {4 * start}"


STATISTICS_SUFFIX = ".ntp.json"
"""Suffix of the file of statistics, behind the name of the file of weights."""


class BatchNormStatistics(NamedTuple):
    """Running mean and variance of a BatchNorm layer, float32[n] each."""

    mean: NDArray[np.float32]
    var: NDArray[np.float32]


def write_statistics(path: Path, layers: Sequence[BatchNormStatistics]) -> None:
    """Write the statistics of BatchNorm layers, in the order of the layers."""
    described = [{"type": "BatchNorm", "mean": _numbers(mean), "var": _numbers(var)} for mean, var in layers]
    write_json(path, {"layers": described}, allow_nan=True)


def read_statistics(path: Path) -> list[BatchNormStatistics]:
    """Read a file of `write_statistics`.

    Raises:
        DataNotFoundError: No such file.
        FormatError: No JSON, or other contents.
    """
    content = read_json(path)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise FormatError(path, 'expected an object with a list "layers"')
    return [_statistics(layer, f"{path}: layers[{index}]") for index, layer in enumerate(layers)]


def _statistics(layer: Any, where: str) -> BatchNormStatistics:
    if not isinstance(layer, dict) or layer.get("type") != "BatchNorm":
        raise FormatError(where, 'expected an object with "type": "BatchNorm"')
    mean, var = (_array(layer.get(name), f"{where}.{name}") for name in ("mean", "var"))
    if len(mean) != len(var):
        raise FormatError(where, f"got {len(mean)} means and {len(var)} variances, expected as many")
    return BatchNormStatistics(mean, var)


def _array(values: Any, where: str) -> NDArray[np.float32]:
    # Not isinstance: true and false of JSON are integers in Python.
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise FormatError(where, "expected a list of numbers")
    try:
        return np.array(values, np.float32)
    except OverflowError:
        raise FormatError(where, "got an integer beyond float64, expected numbers that fit float32") from None


def _numbers(array: NDArray[np.float32]) -> list[float]:
    """Format numbers as the shortest decimals that read back as the same float32."""
    # NumPy prints float32 by its shortest decimals; float(number) would print those of the float64.
    return [float(str(number)) for number in np.asarray(array, np.float32)]


CHUNK_ROWS = 1 << 16
"""Rows that readers and writers hold at a time: 32 MiB of vectors of width 128."""


class SparseRows(NamedTuple):
    """Rows of an embedding.

    Attributes:
        keys: int64[n].
        vectors: float32[n, D].
        slots: uint64[n], the slot of each key, for embeddings whose slots are placed as wholes ("localized").
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    slots: NDArray[np.uint64] | None = None


KeyBytes = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class SparseFileLayout:
    """Layout of a sparse file, which has no metadata.

    Attributes:
        width: Length D of a vector.
        key_bytes: Bytes of a key: 4 for uint32, 8 for int64.
        has_slots: Whether a slot follows each key, as for localized embeddings.
    """

    width: int
    key_bytes: KeyBytes
    has_slots: bool

    @property
    def record(self) -> np.dtype[Any]:
        """Record type of an entry: "key", "slot" if there are slots, "vector"."""
        slot = [("slot", "<u8")] if self.has_slots else []
        return np.dtype([("key", "<u4" if self.key_bytes == 4 else "<i8"), *slot, ("vector", "<f4", (self.width,))])


def read_sparse_file(path: Path, layout: SparseFileLayout, chunk_rows: int = CHUNK_ROWS) -> Iterator[SparseRows]:
    """Yield all rows in file order, at most `chunk_rows` at a time.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A size that no integer number of entries has.
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
        FormatError: A key that 4 bytes do not hold, a vector of another width, or missing or unexpected slots.
        StorageError: The disk is full; nothing is left behind.
    """
    count = 0
    with atomic_file(path) as partial, partial.open("wb") as stream:
        for chunk in chunks:
            stream.write(_entries(path, layout, chunk).data)
            count += len(chunk.keys)
    return count


def _entries(path: Path, layout: SparseFileLayout, chunk: SparseRows) -> NDArray[Any]:
    check_key_range(chunk.keys, layout.key_bytes, str(path))
    if chunk.vectors.shape != (len(chunk.keys), layout.width):
        expected = [len(chunk.keys), layout.width]
        raise FormatError(path, f"got vectors {list(chunk.vectors.shape)}, expected {expected}")
    if (chunk.slots is not None) != layout.has_slots:
        raise FormatError(path, f"expected {'a slot for each key' if layout.has_slots else 'keys without slots'}")
    # Packed without padding, as NumPy makes records by default and C++ writes field by field.
    entries = np.empty(len(chunk.keys), layout.record)
    entries["key"], entries["vector"] = chunk.keys, chunk.vectors
    if chunk.slots is not None:
        entries["slot"] = chunk.slots
    return entries.view(np.uint8)


KEYS, SLOTS, VECTORS = "key", "slot_id", "emb_vector"
SPARSE_FOLDER_FILES = f"{KEYS}|{SLOTS}|{VECTORS}"
"""Pattern of the names in a folder."""
_KEY, _SLOT = np.dtype("<i8"), np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class SparseFolder:
    """Folder of a complete embedding, of which only the sizes were read.

    Attributes:
        path: Path of the folder.
        width: Length D of a vector.
        count: Number of keys.
        has_slots: Whether there is a slot for each key.
    """

    path: Path
    width: int
    count: int
    has_slots: bool

    def keys(self) -> NDArray[np.int64]:
        """Return all keys, int64[count], in file order."""
        return self._file(KEYS, _KEY).read(0, self.count)

    def slots(self) -> NDArray[np.uint64] | None:
        """Return the slots of all keys, uint64[count], if there are any."""
        return self._file(SLOTS, _SLOT).read(0, self.count) if self.has_slots else None

    def chunks(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[SparseRows]:
        """Yield all rows in file order, at most `chunk_rows` at a time."""
        keys, vectors = self._file(KEYS, _KEY), self._file(VECTORS, np.dtype((_FLOAT, self.width)))
        slots = self._file(SLOTS, _SLOT) if self.has_slots else None
        for start, stop in spans(self.count, chunk_rows):
            yield SparseRows(
                keys.read(start, stop), vectors.read(start, stop), None if slots is None else slots.read(start, stop)
            )

    def _file(self, name: str, dtype: np.dtype[np.generic]) -> PlainFile:
        return PlainFile(self.path / name, dtype, 0, self.count)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at `path`, once its replacement has ended that was killed."""
    end_replacement(path)
    return path.is_dir()


def open_sparse_folder(path: Path, width: int) -> SparseFolder:
    """Check the sizes of a folder's files against each other.

    Raises:
        DataNotFoundError: No such folder, or one without keys or vectors.
        FormatError: Files of different numbers of keys, or vectors of another width.
    """
    if not is_folder(path):
        raise DataNotFoundError(path, "no such folder")
    keys = open_plain(path / KEYS, _KEY)
    size = keys.count * width * _FLOAT.itemsize
    numbers = open_plain(path / VECTORS, _FLOAT)
    if numbers.count != keys.count * width:
        raise FormatError(
            path / VECTORS,
            f"holds {numbers.count * _FLOAT.itemsize} bytes, expected {size}: {keys.count} keys of width {width}",
        )
    # The file itself says whether the embedding is localized: there is no metadata.
    has_slots = (path / SLOTS).exists()
    if has_slots:
        slots = open_plain(path / SLOTS, _SLOT)
        if slots.count != keys.count:
            raise FormatError(path / SLOTS, f"holds {slots.count} slots, expected {keys.count}, one for each key")
    return SparseFolder(path, width, keys.count, has_slots)


def write_sparse_folder(path: Path, chunks: Iterable[SparseRows]) -> int:
    """Write a folder, replacing one of the same format.

    Args:
        path: Path of the folder.
        chunks: All rows; slots in all chunks or in none. No chunk at all makes a folder without slots.

    Returns:
        Number of keys.

    Raises:
        ConfigError: `path` is a file, or a folder with other files in it.
        StorageError: The disk is full; nothing is left behind.
    """
    count = 0
    with atomic_dir(path, replaceable=SPARSE_FOLDER_FILES) as partial, ExitStack() as stack:
        keys, vectors = (stack.enter_context((partial / name).open("wb")) for name in (KEYS, VECTORS))
        slots = None
        for chunk in chunks:
            keys.write(as_bytes(chunk.keys, _KEY))
            vectors.write(as_bytes(chunk.vectors, _FLOAT))
            if chunk.slots is not None:
                # Opened by the first chunk with slots: the folder of a distributed embedding has no such file.
                slots = slots or stack.enter_context((partial / SLOTS).open("wb"))
                slots.write(as_bytes(chunk.slots, _SLOT))
            count += len(chunk.keys)
    return count


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of a file of states: float32 ``[num_states, devices, rows, width]``.

    Attributes:
        num_states: States of the optimizer, such as 2 for Adam.
        devices: Number of devices, each with a buffer of its own.
        rows: Rows of each buffer, used or not.
        width: Length D of a vector.
    """

    num_states: int
    devices: int
    rows: int
    width: int

    def first(self, state: int, device: int) -> int:
        """Return the number of the first row of a buffer in the file."""
        # States outermost, then devices, then the rows of a device's buffer.
        return (state * self.devices + device) * self.rows


@dataclass(frozen=True, slots=True)
class SparseStates:
    """File of states, of which only the size was read."""

    file: PlainFile
    layout: StateLayout

    def read(self, state: int, device: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return the rows ``start <= i < stop`` of a buffer, float32[stop - start, D]."""
        first = self.layout.first(state, device)
        return self.file.read(first + start, first + stop)


def open_sparse_states(path: Path, *, num_states: int, devices: int, width: int) -> SparseStates:
    """Open a file of states; the number of rows of its buffers follows from its size.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A size that no number of rows has.
    """
    file = open_plain(path, np.dtype((_FLOAT, width)))
    # SGD has no states and writes an empty file, which names no number of rows.
    rows, rest = divmod(file.count, num_states * devices) if num_states else (0, file.count)
    if rest:
        raise FormatError(
            path,
            f"holds {path.stat().st_size} bytes, expected {num_states} states of {devices} devices "
            f"with as many rows of {4 * width} bytes each",
        )
    return SparseStates(file, StateLayout(num_states, devices, rows, width))


def write_sparse_states(
    path: Path, layout: StateLayout, chunks: Callable[[int, int], Iterator[NDArray[np.float32]]]
) -> None:
    """Write a file of states; rows of a buffer that `chunks` lacks are zero.

    Args:
        path: Path of the file.
        layout: Shape of the file; without states the file is empty.
        chunks: (state, device) -> the rows in use of that buffer from the first on, float32[n, D] a chunk.

    Raises:
        FormatError: More rows than a buffer has.
        StorageError: The disk is full; nothing is left behind.
    """
    write_floats(path, _buffers(path, layout, chunks))


def _buffers(
    path: Path, layout: StateLayout, chunks: Callable[[int, int], Iterator[NDArray[np.float32]]]
) -> Iterator[NDArray[np.float32]]:
    for state in range(layout.num_states):
        for device in range(layout.devices):
            used = 0
            for chunk in chunks(state, device):
                used += len(chunk)
                if used > layout.rows:
                    raise FormatError(path, f"device {device} holds {used} rows, expected at most {layout.rows}")
                yield chunk
            # A file has whole buffers; rows without a key are zero.
            for start, stop in spans(layout.rows - used, CHUNK_ROWS):
                yield np.zeros((stop - start, layout.width), np.float32)
