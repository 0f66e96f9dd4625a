# SPDX-License-Identifier: Apache-2.0
"""Norm files: a header, then records with any number of keys in each slot. See docs/hugectr-formats.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys, merge
from terarec.formats.hugectr.fields import (
    RecordStream,
    check_records,
    key_dtype,
)
from terarec.formats.hugectr.norm_records import (
    CutShortError,
    NormBytes,
    Spans,
    decode,
    decode_even,
    even_slots,
    even_spans,
    framed_spans,
    has_right_checksum,
    plain_spans,
)
from terarec.io.remote import locate
from terarec.ragged import ArrayLists
from terarec.spec import RecordLayout

GROUP_ROWS = 16_384
"""Records that are read at once, as of files of fixed width: 2.9 MB of Criteo's."""


class NormFile:
    """Norm file, read by groups of records from any thread.

    Where a group begins follows from the size of a record if all records before have one size. Where they have several,
    it is known once the sizes of all records before were looked at. The first reading in order does both on its way.

    Args:
        path: A path or URL.
        layout: Layout of the records; `slot_sizes` are ignored, since Norm files hold the final keys.
        checksum: Whether every record has a frame with a checksum.
        group_rows: Records of a group.

    Attributes:
        num_records: Number of records in its header.
        group_rows: Records of each group; a file without records has one group without.

    Raises:
        DataNotFoundError: No such file.
        FormatError: The header is cut short, damaged, or of another layout.
    """

    def __init__(self, path: str | Path, layout: RecordLayout, *, checksum: bool, group_rows: int = GROUP_ROWS) -> None:
        self._file = locate(path)
        self._layout = layout
        self._checksum = checksum
        first = header_size(checksum=checksum)
        head = self._file.read(0, min(self._file.size, first))
        self.num_records = parse_header(head, layout, self._file.name, checksum=checksum)
        # A damaged header can promise 2^62 records; what follows takes time and memory for each group of them.
        least = 5 if checksum else max(1, 4 * (layout.label_dim + layout.dense_dim + layout.num_slots))
        if self.num_records > max(self._file.size - first, 0) // least:
            raise FormatError(
                path,
                f"ends at byte {self._file.size}, expected at least {first + self.num_records * least} for the "
                f"{self.num_records} records of its header: it is cut short, or the header is damaged",
            )
        self._at_once = group_rows
        self.group_rows = [
            min(group_rows, self.num_records - start) for start in range(0, max(self.num_records, 1), group_rows)
        ]
        # A guess that is checked group by group: only files of one-hot data surely have records of one size.
        stride, rest = divmod(self._file.size - first, max(self.num_records, 1))
        self._stride = 0 if rest else stride  # of records of one size; 0 where they are known to have several
        self._even_groups = 0  # of which it is known that they, and all before them, have records of that size alone
        self._bounds = [first]  # of groups of records of several sizes, as far as they are known
        # Bounds follow from one group to the next, so that one thread at a time finds them.
        self._walks = Lock()

    def read(self, group: int = 0) -> tuple[ColumnBlock, int]:
        """Return the records of a group with the right checksum, and the number of the others.

        Labels and dense numbers are float32; keys int64[n] where every sample holds one, n lists elsewhere.

        Raises:
            FormatError: The file is cut short or continues after its records, or a record does not hold what its
                length or the layout promises.
        """
        # Records of one size, as of one-hot data, are found without reading the groups before.
        even = self._read_even(group) if self._stride else None
        if even is not None:
            return even
        self._stride = 0
        piece, spans = self._uneven_piece(group)
        if not self._checksum:
            return decode(piece, spans, self._layout), 0
        return self._decode_checked(piece, spans)

    def kept(self, group: int) -> int:
        """Return how many records of a group have a right checksum; all where there are none.

        Raises:
            FormatError: The file is cut short or continues after its records.
        """
        if not self._checksum:
            return self.group_rows[group]
        piece, spans = self._framed(group)
        return int(has_right_checksum(piece.content, spans).sum())

    def read_part(self, group: int, rows: Sequence[slice]) -> ColumnBlock:
        """Return some of the records that `read` returns, decoding no others.

        Raises:
            FormatError: See `read`; of the records that are not decoded, the frames or counts alone are checked.
        """
        piece, spans = self._framed(group)
        if self._checksum:
            spans = spans.keep(has_right_checksum(piece.content, spans))
        # Rows are numbered without the skipped records, as `read` returns them.
        parts = [Spans(starts=spans.starts[part], ends=spans.ends[part]) for part in rows]
        return merge([decode(piece, part, self._layout) for part in parts], None)

    def _framed(self, group: int) -> tuple[NormBytes, Spans]:
        """Return the bytes and records of a group."""
        known = self._known_even_piece(group) if self._stride else None
        if known is None or not (self._checksum or even_slots(*known, self._layout) is not None):
            self._stride = 0
            return self._uneven_piece(group)
        return known

    def _known_even_piece(self, group: int) -> tuple[NormBytes, Spans] | None:
        """Return a group, if all of it and those before have the size that the file's size implies."""
        with self._walks:
            # A group starts where the size of a record says only if no record before has another size. Threads may ask
            # for groups in any order, so unread groups are read here.
            while self._even_groups < group and self._is_even(self._even_groups):
                self._even_groups += 1
            if self._even_groups < group:
                return None
        return self._even_piece(group)

    def _read_even(self, group: int) -> tuple[ColumnBlock, int] | None:
        """Return the records of a group where `_known_even_piece` does and their slots have keys alike."""
        known = self._known_even_piece(group)
        if known is None:
            return None
        if self._checksum:
            return self._decode_checked(*known)
        block = decode_even(*known, self._layout)
        return None if block is None else (block, 0)

    def _is_even(self, group: int) -> bool:
        even = self._even_piece(group)
        return even is not None and (self._checksum or even_slots(*even, self._layout) is not None)

    def _even_piece(self, group: int) -> tuple[NormBytes, Spans] | None:
        """Return a group and its records if these can have the size that the file's size implies; check frames."""
        rows, first = self.group_rows[group], group * self._at_once
        start = self._bounds[0] + first * self._stride
        piece = self._piece(group, start, start + rows * self._stride)
        if not self._checksum:
            return piece, even_spans(self._stride, self._stride, rows)
        try:
            spans, end = framed_spans(piece, rows, self.num_records)
        except (CutShortError, FormatError):  # which decoding record by record reports
            return None
        return (piece, spans) if spans.stride == self._stride and end == rows * self._stride else None

    def _decode_checked(self, piece: NormBytes, spans: Spans) -> tuple[ColumnBlock, int]:
        good = has_right_checksum(piece.content, spans)
        return decode(piece, spans.keep(good), self._layout), len(good) - int(good.sum())

    def _uneven_piece(self, group: int) -> tuple[NormBytes, Spans]:
        with self._walks:
            while len(self._bounds) < group + 2:
                piece, spans, end = self._walk(len(self._bounds) - 1)
                self._bounds.append(piece.start + end)
                if len(self._bounds) == len(self.group_rows) + 1:
                    self._check_end()
                if len(self._bounds) == group + 2:
                    return piece, spans
        piece = self._piece(group, self._bounds[group], self._bounds[group + 1])
        return piece, self._spans(piece, self.group_rows[group])[0]

    def _walk(self, group: int) -> tuple[NormBytes, Spans, int]:
        """Return a group that begins where the known ones end, its records, and the byte behind them."""
        start, size = self._bounds[group], self._file.size
        mean = (size - start) // max(1, self.num_records - group * self._at_once)
        # A quarter above the mean size of what is left is mostly enough; else twice as much is read.
        wanted = (mean + mean // 4) * self.group_rows[group] + 4096
        while True:
            piece = self._piece(group, start, min(start + wanted, size))
            try:
                return piece, *self._spans(piece, self.group_rows[group])
            except CutShortError:
                wanted *= 2

    def _spans(self, piece: NormBytes, rows: int) -> tuple[Spans, int]:
        if self._checksum:
            return framed_spans(piece, rows, self.num_records)
        return plain_spans(piece, rows, self._layout, self.num_records)

    def _piece(self, group: int, start: int, stop: int) -> NormBytes:
        return NormBytes(
            content=self._file.read(start, stop),
            start=start,
            first_record=group * self._at_once,
            file_bytes=self._file.size,
            where=self._file.name,
        )

    def _check_end(self) -> None:
        if self._bounds[-1] != self._file.size:
            size, end = self._file.size, self._bounds[-1]
            # Remove the last bound, so that a second request finds the damage, too.
            self._bounds.pop()
            raise FormatError(self._file.name, f"holds {size} bytes, its {self.num_records} records end at byte {end}")


class NormWriter(RecordStream):
    """Writer of a Norm file. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: Path of the file, which appears when the writer is closed.
        layout: Layout of the records; `slot_sizes` are ignored, since Norm files hold the final keys.
        checksum: Whether every record gets a frame with a checksum.
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
            keys: For each slot integers[n], or n lists of them.

        Raises:
            FormatError: A wrong shape, bag or key; nothing was appended.
            StorageError: The disk is full; the partial file is gone.
        """
        bags = check_records(self._layout, label, dense, keys, str(self._file.path))
        content = _encode(label, dense, bags, self._layout.key_bytes, framed=self._checksum)
        self._append(content, len(label))

    @override
    def _header(self, num_records: int) -> bytes:
        return header_bytes(self._layout, num_records, checksum=self._checksum)


def _encode(
    label: NDArray[Any],
    dense: NDArray[Any],
    bags: Sequence[ArrayLists],
    key_bytes: int,
    *,
    framed: bool,
) -> NDArray[np.uint8]:
    """Encode the records field by field: where a field begins differs from record to record."""
    lengths = [np.diff(offsets) for _, offsets in bags]
    fixed = 4 * (label.shape[1] + dense.shape[1] + len(bags))
    sizes = fixed + key_bytes * np.sum(lengths, axis=0, dtype=np.int64) if bags else np.full(len(label), fixed)
    # Four bytes of length before the payload and one of checksum behind it.
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
        # Running sums modulo 256: that of a record is the difference of two, without a loop over records.
        running = np.concatenate([[0], np.cumsum(content, dtype=np.uint8)]).astype(np.uint8)
        # The bytes of frames cancel out: the sum runs from a record's first byte to its last.
        content[position] = running[position] - running[begins + 4]
    return content


def _put(content: NDArray[np.uint8], starts: NDArray[np.int64], fields: NDArray[Any]) -> NDArray[np.int64]:
    """Write ``fields[n, width]`` at the bytes ``starts[n]`` and return the bytes after them."""
    columns = np.ascontiguousarray(fields).view(np.uint8)
    # Byte by byte: the fields of records of several sizes lie at any address.
    for byte in range(columns.shape[1]):
        content[starts + byte] = columns[:, byte]
    ends: NDArray[np.int64] = starts + columns.shape[1]
    return ends


# Fields of `_FIELDS`, and three words that are reserved.
HEADER = struct.Struct("<8q")


_FIELDS = ("error_check", "number_of_records", "label_dim", "dense_dim", "slot_num")


def header_bytes(layout: RecordLayout, num_records: int, *, checksum: bool) -> bytes:
    """Return the header, in its frame if there is a `checksum`."""
    # The last three words are reserved: HugeCTR writes zeros, and readers ignore them.
    payload = HEADER.pack(checksum, num_records, layout.label_dim, layout.dense_dim, layout.num_slots, 0, 0, 0)
    return frame(payload) if checksum else payload


def frame(payload: bytes) -> bytes:
    """Return length, `payload`, and the sum of its bytes modulo 256."""
    return struct.pack("<i", len(payload)) + payload + bytes([sum(payload) % 256])


def header_size(*, checksum: bool) -> int:
    """Return the number of bytes before the first record."""
    return HEADER.size + (5 if checksum else 0)


def parse_header(content: NDArray[np.uint8], layout: RecordLayout, where: str, *, checksum: bool) -> int:
    """Return the number of records of the file that begins with `content`.

    Raises:
        FormatError: Too few bytes, another type of file, a wrong checksum, or dimensions that are not the layout's;
            the message starts with `where` and names the byte.
    """
    size = header_size(checksum=checksum)
    if len(content) < size:
        raise FormatError(where, f"ends at byte {len(content)}, expected a header of {size} bytes")
    first = HEADER.size if not checksum else _framed_payload(content, where)
    numbers = HEADER.unpack(content[first - HEADER.size : first].tobytes())
    expected = (int(checksum), numbers[1], layout.label_dim, layout.dense_dim, layout.num_slots)
    # The number of records is compared with itself: it is only checked to be 0 or more.
    for index, (field, value, right) in enumerate(zip(_FIELDS, numbers, expected, strict=False)):
        byte = first - HEADER.size + 8 * index
        if value != right:
            raise FormatError(f"{where}: byte {byte}", f"{field} is {value}, expected {right}")
        if value < 0:
            raise FormatError(f"{where}: byte {byte}", f"{field} is {value}, expected 0 or more")
    return int(numbers[1])


def _framed_payload(content: NDArray[np.uint8], where: str) -> int:
    """Return the byte after the header's payload."""
    (length,) = struct.unpack_from("<i", content.data)
    if length != HEADER.size:
        raise FormatError(
            f"{where}: byte 0", f"the header's length is {length}, expected {HEADER.size} (a file with checksums)"
        )
    end = 4 + HEADER.size
    total, checksum = int(content[4:end].sum()) % 256, int(content[end])
    if total != checksum:
        raise FormatError(f"{where}: byte {end}", f"the header's checksum is {checksum}, its bytes sum to {total}")
    return end
