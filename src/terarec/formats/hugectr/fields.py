# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's binary records: types of keys, checks, views of fields, and files that hold records alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import Keys, bags_of
from terarec.io.files import AtomicFile
from terarec.io.opening import open_file
from terarec.ragged import ArrayLists, Ragged
from terarec.spec import RecordLayout

_PIECE_ROWS = 512
"""Records transposed at once: 82 kB of Criteo's 160-byte records."""

_RANGES = {4: (0, 2**32 - 1), 8: (-(2**63), 2**63 - 1)}


def key_dtype(key_bytes: int) -> np.dtype[Any]:
    """Return uint32 for 4 bytes a key, int64 for 8."""
    return np.dtype("<u4" if key_bytes == 4 else "<i8")


def check_key_range(keys: NDArray[Any], key_bytes: int, where: str) -> None:
    """Raise `FormatError`, which starts with `where`, if a key does not fit into `key_bytes` bytes."""
    low, high = _RANGES[key_bytes]
    wrong = (keys < low) | (keys > high)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise FormatError(
            where, f"key {int(keys[position])} at position {position}, expected {low} to {high} ({key_bytes}-byte keys)"
        )


class Strided:
    """Records that lie `stride` bytes apart. Fields need no alignment.

    Args:
        content: Bytes of the records.
        first: Byte of the first record.
        stride: Bytes from one record to the next.
        count: Number of records n.
    """

    def __init__(self, content: NDArray[np.uint8], first: int, stride: int, count: int) -> None:
        self._content = content
        self._first = first
        self._stride = stride
        self._count = count

    def matrix(self, byte: int, dtype: np.dtype[Any], columns: int, step: int | None = None) -> NDArray[Any]:
        """Return a view ``dtype[n, columns]`` of the fields from `byte` of each record on, `step` bytes apart."""
        if self._count == 0 or columns == 0:
            return np.empty((self._count, columns), dtype=dtype)
        # Not `np.frombuffer`: fields begin at any byte and lie `stride` apart.
        return np.ndarray(
            (self._count, columns),
            dtype,
            buffer=self._content.data,
            offset=self._first + byte,
            strides=(self._stride, dtype.itemsize if step is None else step),
        )


def copy_transposed(fields: NDArray[Any], out: NDArray[np.int64]) -> None:
    """Compute ``out[:] = fields.T`` piece by piece, so that each cache line is read once for all its columns."""
    for start in range(0, len(fields), _PIECE_ROWS):
        stop = start + _PIECE_ROWS
        out[:, start:stop] = fields[start:stop].T


def check_records(
    layout: RecordLayout, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys], where: str
) -> list[ArrayLists]:
    """Check ``label[n, L]``, ``dense[n, F]`` and `keys`; return the bags of each slot.

    Raises:
        FormatError: A wrong shape, number of slots or of keys in a bag, or a key that the layout's key type cannot
            hold; the message starts with `where`.
    """
    num_rows = len(label)
    for name, array, width in (("label", label, layout.label_dim), ("dense", dense, layout.dense_dim)):
        if array.shape != (num_rows, width):
            raise FormatError(where, f"got {name} {list(array.shape)}, expected [{num_rows}, {width}]")
    if len(keys) != layout.num_slots:
        raise FormatError(where, f"got keys of {len(keys)} slots, expected {layout.num_slots}")
    bags = []
    for name, slot_keys, most in zip(layout.slot_names, keys, layout.most_keys, strict=True):
        if not isinstance(slot_keys, Ragged | np.ndarray):
            got = type(slot_keys).__name__
            raise FormatError(f"{where}, slot {name!r}", f"got {got}, expected an array or Ragged(values, offsets)")
        values, offsets = bags_of(slot_keys)
        if len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != len(values):
            raise FormatError(
                f"{where}, slot {name!r}", f"got {len(offsets) - 1} bags of {len(values)} keys for {num_rows} rows"
            )
        check_bag_lengths(np.diff(offsets), most, f"{where}, slot {name!r}")
        check_key_range(values, layout.key_bytes, f"{where}, slot {name!r}")
        bags.append(Ragged(values, offsets))
    return bags


def check_bag_lengths(lengths: NDArray[Any], most: int, where: str) -> None:
    """Raise `FormatError`, which starts with `where`, if a bag does not hold 0 to `most` keys."""
    wrong = (lengths < 0) | (lengths > most)
    if wrong.any():
        record = int(np.argmax(wrong))
        raise FormatError(where, f"record {record} holds {int(lengths[record])} keys, expected 0 to {most}")


class RecordStream:
    """File under construction. As a context manager it removes the file unless `close` was called inside."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self._num_records = 0
        with self._file.guard():
            self._stream = self._file.partial.open("wb")
            # Keeps the place of the header, whose length does not depend on the number.
            self._stream.write(self._header(0))

    def close(self) -> int:
        """Finish the file, rename it into place and return its number of records.

        Raises:
            StorageError: The disk is full; the partial file is gone.
        """
        with self._file.guard():
            # The header has the number of records, which is known at the end only.
            self._stream.seek(0)
            self._stream.write(self._header(self._num_records))
            self._stream.close()
        self._file.commit()
        return self._num_records

    def abort(self) -> None:
        """Remove an unfinished file."""
        if not self._stream.closed:
            self._stream.close()
            self._file.abort()

    def _header(self, num_records: int) -> bytes:
        """Return the bytes before the records; as long for any number of them."""
        return b""

    def _append(self, content: NDArray[np.uint8], num_records: int) -> None:
        with self._file.guard():
            self._stream.write(content.data)
        self._num_records += num_records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


@dataclass(frozen=True, slots=True)
class PlainFile:
    """File of `count` records of `dtype` that start at byte `header_bytes`; it is not loaded into memory."""

    path: Path
    dtype: np.dtype[Any]
    header_bytes: int
    count: int

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the records ``start <= i < stop``, which must exist."""
        offset = self.header_bytes + start * self.dtype.itemsize
        # No memory map: a mapped file that is cut short while it is read kills the process.
        with open_file(self.path, is_buffered=False) as file:
            records = np.fromfile(file, self.dtype, stop - start, offset=offset)
        if len(records) != stop - start:
            end = offset + records.nbytes
            raise FormatError(self.path, f"ended at byte {end}, expected {self.count} records of {self.dtype}")
        return records


def open_plain(path: Path, dtype: np.dtype[Any], *, header_bytes: int = 0) -> PlainFile:
    """Open a file and check its size without reading it.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A size that is not a multiple of the record size.
    """
    with open_file(path, is_buffered=False) as file:
        size = os.fstat(file.fileno()).st_size
    # The size alone tells the number of records: these files have no other metadata.
    count, rest = divmod(size - header_bytes, dtype.itemsize)
    if size < header_bytes or rest:
        after = f" after {header_bytes} bytes of header" if header_bytes else ""
        raise FormatError(path, f"holds {size} bytes, expected records of {dtype.itemsize} bytes{after}")
    return PlainFile(path, dtype, header_bytes, count)


def as_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    """Return the bytes of `array` as rows of `dtype`, copied only if needed."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def spans(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of runs of at most `chunk` that cover ``0 <= i < count``."""
    for start in range(0, count, chunk):
        yield start, min(start + chunk, count)
