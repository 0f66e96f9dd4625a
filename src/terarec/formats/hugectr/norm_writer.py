"""Writing Norm files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.formats.block import Keys
from terarec.formats.hugectr.arguments import check_records
from terarec.formats.hugectr.key_types import key_dtype
from terarec.formats.hugectr.norm_header import header_bytes
from terarec.formats.hugectr.record_stream import RecordStream
from terarec.spec import RecordLayout


class NormWriter(RecordStream):
    """Writes one Norm file. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: where the file appears when the writer is closed.
        layout: what its records hold; `slot_sizes` are not looked at, since Norm files hold the final keys.
        checksum: whether every record gets a frame with a checksum.
    """

    def __init__(self, path: Path, layout: RecordLayout, *, checksum: bool) -> None:
        self._layout = layout
        self._checksum = checksum
        super().__init__(path)

    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys]) -> None:
        """Append n records.

        Args:
            label: float32[n, L].
            dense: float32[n, F].
            keys: per slot integers[n], or (values, offsets int64[n + 1]).

        Raises:
            FormatError: a wrong shape, bag or key; nothing was appended.
            StorageError: the disk is full; the partial file is gone.
        """
        bags = check_records(self._layout, label, dense, keys, str(self._file.path))
        content = _encode(label, dense, bags, self._layout.key_bytes, framed=self._checksum)
        self._append(content, len(label))

    def _header(self, num_records: int) -> bytes:
        return header_bytes(self._layout, num_records, checksum=self._checksum)


def _encode(
    label: NDArray[Any],
    dense: NDArray[Any],
    bags: Sequence[tuple[NDArray[Any], NDArray[np.int64]]],
    key_bytes: int,
    *,
    framed: bool,
) -> NDArray[np.uint8]:
    """The records' bytes, field by field: where a field begins differs from record to record."""
    lengths = [np.diff(offsets) for _, offsets in bags]
    fixed = 4 * (label.shape[1] + dense.shape[1] + len(bags))
    sizes = fixed + key_bytes * np.sum(lengths, axis=0, dtype=np.int64) if bags else np.full(len(label), fixed)
    strides = sizes + 5 if framed else sizes
    begins = np.cumsum(strides) - strides
    content = np.empty(int(strides.sum()), dtype=np.uint8)
    position = begins.copy()
    if framed:
        position = _put(content, position, sizes.astype("<i4")[:, None])
    position = _put(content, position, label.astype("<f4"))
    position = _put(content, position, dense.astype("<f4"))
    for (values, offsets), counts in zip(bags, lengths, strict=True):
        position = _put(content, position, counts.astype("<i4")[:, None])
        starts = np.repeat(position - key_bytes * offsets[:-1], counts) + key_bytes * np.arange(len(values))
        _put(content, starts, values.astype(key_dtype(key_bytes))[:, None])
        position = position + key_bytes * counts
    if framed:
        running = np.concatenate([[0], np.cumsum(content, dtype=np.uint8)]).astype(np.uint8)
        # What the frames' own bytes hold cancels out: the sum runs from a record's first byte to its last.
        content[position] = running[position] - running[begins + 4]
    return content


def _put(content: NDArray[np.uint8], starts: NDArray[np.int64], fields: NDArray[Any]) -> NDArray[np.int64]:
    """Write ``fields[n, width]`` at the bytes ``starts[n]``; returns the bytes after them."""
    columns = np.ascontiguousarray(fields).view(np.uint8)
    for byte in range(columns.shape[1]):
        content[starts + byte] = columns[:, byte]
    ends: NDArray[np.int64] = starts + columns.shape[1]
    return ends
