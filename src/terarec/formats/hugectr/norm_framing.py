"""The header and the bounds of records in Norm files, with checksums and without."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.fields import Strided
from terarec.spec import RecordLayout

HEADER = struct.Struct("<8q")
_FIELDS = ("error_check", "number_of_records", "label_dim", "dense_dim", "slot_num")


def header_bytes(layout: RecordLayout, num_records: int, *, checksum: bool) -> bytes:
    """Return the header, in its frame if there is a `checksum`."""
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
    found = HEADER.unpack(content[first - HEADER.size : first].tobytes())
    expected = (int(checksum), found[1], layout.label_dim, layout.dense_dim, layout.num_slots)
    for index, (field, value, right) in enumerate(zip(_FIELDS, found, expected, strict=False)):
        byte = first - HEADER.size + 8 * index
        if value != right:
            raise FormatError(f"{where}: byte {byte}", f"{field} is {value}, expected {right}")
        if value < 0:
            raise FormatError(f"{where}: byte {byte}", f"{field} is {value}, expected 0 or more")
    return int(found[1])


def _framed_payload(content: NDArray[np.uint8], where: str) -> int:
    """Return the byte after the header's payload."""
    (length,) = struct.unpack_from("<i", content.data)
    if length != HEADER.size:
        raise FormatError(
            f"{where}: byte 0", f"the header's length is {length}, expected {HEADER.size} (a file with checksums)"
        )
    end = 4 + HEADER.size
    total, found = int(content[4:end].sum()) % 256, int(content[end])
    if total != found:
        raise FormatError(f"{where}: byte {end}", f"the header's checksum is {found}, its bytes sum to {total}")
    return end


_LENGTH = struct.Struct("<i")
_FRAME_BYTES = 5
"""The length before a record and the checksum after it."""


class CutShortError(Exception):
    """Error of a piece that ends before its records do, in a longer file: more bytes are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes of a Norm file, from the start of a record on.

    Attributes:
        content: Bytes of the records.
        start: Offset of the bytes in the file.
        first_record: Number of the record at `start`.
        file_bytes: Size of the file.
        where: Name of the file, for errors.
    """

    content: NDArray[np.uint8]
    start: int
    first_record: int
    file_bytes: int
    where: str

    def ends(self, record: int, byte: int, total: int) -> Exception:
        """Return the error for a record of the piece, at its byte `byte`, that goes beyond it."""
        if self.start + len(self.content) < self.file_bytes:
            return CutShortError()
        return FormatError(
            self.where,
            f"ends at byte {self.file_bytes}, in record {self.first_record + record} at byte "
            f"{self.start + byte}, expected {total} records",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Locations of the payloads of n records in a piece.

    Attributes:
        starts: int64[n], their first bytes.
        ends: int64[n], the bytes after them.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def stride(self) -> int | None:
        """Bytes from one record to the next, if all records have one size; None otherwise."""
        if len(self.starts) == 0:
            return None
        step = int(self.starts[1] - self.starts[0]) if len(self.starts) > 1 else int(self.ends[0] - self.starts[0])
        sizes = self.ends - self.starts
        is_even = bool((np.diff(self.starts) == step).all()) and bool((sizes == sizes[0]).all())
        return step if is_even else None

    def keep(self, mask: NDArray[np.bool_]) -> Spans:
        """Return the records where ``mask[n]`` is true."""
        return self if mask.all() else Spans(starts=self.starts[mask], ends=self.ends[mask])


def even_spans(stride: int, size: int, count: int, *, first: int = 0) -> Spans:
    """Return spans of records of `size` bytes, the first at byte `first`, each next one `stride` bytes further."""
    starts = first + stride * np.arange(count, dtype=np.int64)
    return Spans(starts=starts, ends=starts + size)


def framed_spans(piece: Piece, count: int, total: int) -> tuple[Spans, int]:
    """Locate the payloads of the first `count` framed records of a piece, and the byte behind them.

    Args:
        piece: Piece that starts with a frame.
        count: Number of records.
        total: Number of records of the file.

    Raises:
        FormatError: A frame that leaves the file.
        CutShortError: More bytes are needed.
    """
    data = piece.content.data
    if count and len(data) >= 4:
        (length,) = _LENGTH.unpack_from(data)
        stride = length + _FRAME_BYTES
        if length >= 0 and stride * count <= len(data):
            lengths = Strided(piece.content, 0, stride, count).matrix(0, np.dtype("<i4"), 1)
            if (lengths == length).all():
                return even_spans(stride, length, count, first=4), stride * count
    starts: list[int] = []
    ends: list[int] = []
    byte, size = 0, len(data)
    left = piece.file_bytes - piece.start
    for record in range(count):
        if byte + 4 > size:
            raise piece.ends(record, byte, total)
        (length,) = _LENGTH.unpack_from(data, byte)
        start, end = byte + 4, byte + 4 + length
        if length < 0 or end >= left:
            raise FormatError(
                f"{piece.where}: record {piece.first_record + record} at byte {piece.start + byte}",
                f"its length is {length}, expected 0 to {left - start - 1}, the bytes that are left",
            )
        if end >= size:
            raise CutShortError
        starts.append(start)
        ends.append(end)
        byte = end + 1
    return Spans(starts=np.array(starts, dtype=np.int64), ends=np.array(ends, dtype=np.int64)), byte


def has_right_checksum(content: NDArray[np.uint8], spans: Spans) -> NDArray[np.bool_]:
    """Return bool[n]: whether the byte after each record is the sum of its bytes modulo 256."""
    if len(spans.starts) == 0:
        return np.ones(0, dtype=bool)
    stride = spans.stride
    if stride is not None:
        size = int(spans.ends[0] - spans.starts[0])
        payloads = Strided(content, int(spans.starts[0]), stride, len(spans.starts)).matrix(0, np.dtype("u1"), size)
        sums = np.add.reduce(payloads, axis=1, dtype=np.uint8)
    else:
        bounds = np.stack([spans.starts, spans.ends], axis=1).reshape(-1)
        sums = np.add.reduceat(content, bounds, dtype=np.uint8)[::2]
        sums[spans.starts == spans.ends] = 0  # where `reduceat` gives the byte itself
    good: NDArray[np.bool_] = sums == content[spans.ends]
    return good


def plain_spans(piece: Piece, count: int, layout: RecordLayout, total: int) -> tuple[Spans, int]:
    """Locate the payloads of the first `count` records without frames by their counts; see `framed_spans`.

    Raises:
        FormatError: A record that leaves the file, or a number of keys that no slot may hold.
        CutShortError: More bytes are needed.
    """
    content = piece.content
    words = content[: len(content) // 4 * 4].view("<i4")
    most, names = max(layout.most_keys, default=0), layout.slot_names
    # How far each word leads if it is a number of keys; 0 where it cannot be one. Few distinct small ints, which
    # Python keeps ready: a list of all words as they are would take four times as long to make.
    counts_keys = (words >= 0) & (words <= most)
    steps = np.where(counts_keys, words * (layout.key_bytes // 4) + 1, 0).tolist()
    bounds = [0] * (count + 1)
    position, fixed, slots = 0, layout.label_dim + layout.dense_dim, range(layout.num_slots)
    for record in range(count):
        position += fixed
        try:
            for slot in slots:
                step = steps[position]
                if not step:
                    raise FormatError(
                        f"{piece.where}, slot {names[slot]!r} at byte {piece.start + 4 * position}",
                        f"record {piece.first_record + record} holds {words[position]} keys, expected 0 to "
                        f"{layout.most_keys[slot]}",
                    )
                position += step
        except IndexError:
            position = len(steps) + 1
        if position > len(steps):
            raise piece.ends(record, 4 * bounds[record], total)
        bounds[record + 1] = position
    places = 4 * np.array(bounds, dtype=np.int64)
    return Spans(starts=places[:-1], ends=places[1:]), 4 * position
