"""Norm files: a header, then records with any number of keys in each slot. See docs/hugectr-formats.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.hugectr.fields import (
    RecordStream,
    Strided,
    check_bag_lengths,
    check_records,
    copy_transposed,
    key_dtype,
)
from terarec.io import locate
from terarec.ragged import ArrayLists, Ragged, offsets_of
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


_COUNT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


def decode(piece: Piece, spans: Spans, layout: RecordLayout) -> ColumnBlock:
    """Decode the records in `spans`: labels and dense numbers float32, keys as `ColumnBlock` has them.

    Raises:
        FormatError: A record whose fields take more or fewer bytes than it has, or a bag of too many or too few keys.
    """
    block = decode_even(piece, spans, layout)
    return decode_uneven(piece, spans, layout) if block is None else block


def decode_even(piece: Piece, spans: Spans, layout: RecordLayout) -> ColumnBlock | None:
    """Decode the records in `spans` if each slot holds the same number of keys in all of them; None otherwise."""
    slots = even_slots(piece, spans, layout)
    if slots is None:
        return None
    counts = [count for _, width, count in slots for _ in range(width)]
    for name, count, most in zip(layout.slot_names, counts, layout.most_keys, strict=True):
        check_bag_lengths(np.array([count]), most, f"{piece.where}, slot {name!r}")
    records = _records(piece, spans)
    label = np.ascontiguousarray(records.matrix(0, _FLOAT, layout.label_dim))
    dense = np.ascontiguousarray(records.matrix(4 * layout.label_dim, _FLOAT, layout.dense_dim))
    num_rows = len(spans.starts)
    keys: list[Keys] = []
    for byte, width, count in slots:
        keys += _even_slots(records, num_rows, (byte, width, count), layout.key_bytes)
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys))


def even_slots(piece: Piece, spans: Spans, layout: RecordLayout) -> list[tuple[int, int, int]] | None:
    """Group neighbouring slots of as many keys in `spans`: (first byte, slots, keys in each).

    Returns:
        None if a slot holds more keys in one record than in another.
    """
    counts = None if spans.stride is None else _counts_of_first(piece.content, spans, layout)
    if counts is None:
        return None
    records = _records(piece, spans)
    byte = 4 * (layout.label_dim + layout.dense_dim)
    slots: list[tuple[int, int, int]] = []
    for count, members in groupby(counts):
        width = len(list(members))
        step = 4 + count * layout.key_bytes
        if (records.matrix(byte, _COUNT, width, step) != count).any():
            return None
        slots.append((byte, width, count))
        byte += width * step
    return slots


def _records(piece: Piece, spans: Spans) -> Strided:
    assert spans.stride is not None
    return Strided(piece.content, int(spans.starts[0]), spans.stride, len(spans.starts))


def _counts_of_first(content: NDArray[np.uint8], spans: Spans, layout: RecordLayout) -> list[int] | None:
    """Count the keys of each slot in the first record; None if they do not add up to its size."""
    payload = content[spans.starts[0] : spans.ends[0]]
    words = payload[: len(payload) // 4 * 4].view(_COUNT).tolist()
    position = layout.label_dim + layout.dense_dim
    counts = []
    for _ in range(layout.num_slots):
        if position >= len(words) or words[position] < 0:
            return None
        counts.append(words[position])
        position += 1 + counts[-1] * (layout.key_bytes // 4)
    return counts if 4 * position == len(payload) else None


def _even_slots(records: Strided, num_rows: int, slots: tuple[int, int, int], key_bytes: int) -> list[Keys]:
    """Yield columns of neighbouring slots: (first byte, number of slots, keys in each)."""
    byte, width, count = slots
    step = 4 + count * key_bytes
    if count == 1:
        keys = np.empty((width, num_rows), dtype=np.int64)
        copy_transposed(records.matrix(byte + 4, key_dtype(key_bytes), width, step), keys)
        return list(keys)
    offsets = np.arange(num_rows + 1, dtype=np.int64) * count
    columns: list[Keys] = []
    for slot in range(width):
        values = records.matrix(byte + 4 + slot * step, key_dtype(key_bytes), count)
        columns.append(Ragged(values.astype(np.int64).reshape(-1), offsets))
    return columns


def decode_uneven(piece: Piece, spans: Spans, layout: RecordLayout) -> ColumnBlock:
    """Decode the records in `spans`, whatever the number of their keys; see `decode`."""
    where = f"{piece.where} (with {layout.key_bytes}-byte keys)"  # what does not fit may be keys of the other size
    fields = _Fields(piece, spans, where)
    label = fields.take(layout.label_dim).view(_FLOAT)
    dense = fields.take(layout.dense_dim).view(_FLOAT)
    keys: list[Keys] = []
    for name, most in zip(layout.slot_names, layout.most_keys, strict=True):
        counts = fields.take(1)[:, 0].astype(np.int64)
        check_bag_lengths(counts, most, f"{where}, slot {name!r}")
        values = fields.take_keys(counts, layout.key_bytes)
        keys.append(values if (counts == 1).all() else Ragged(values, offsets_of(counts)))
    fields.finish()
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys))


class _Fields:
    """Cursor over the fields of all records; no record is read beyond its end."""

    def __init__(self, piece: Piece, spans: Spans, where: str) -> None:
        self._spans, self._start = spans, piece.start
        self._where = where
        sizes = spans.ends - spans.starts
        self._check(sizes % 4 != 0, "a multiple of 4")
        self._words = _joined(piece.content, spans).view(_COUNT)
        self._ends = np.cumsum(sizes // 4)
        self._position: NDArray[np.int64] = self._ends - sizes // 4

    def take(self, columns: int) -> NDArray[Any]:
        """Return the next words of each record, ``int32[n, columns]``."""
        starts = self._advance(np.full(len(self._position), columns))
        return self._words.take(starts[:, None] + np.arange(columns))

    def take_keys(self, counts: NDArray[np.int64], key_bytes: int) -> NDArray[np.int64]:
        """Return the next ``counts[n]`` keys of each record, one record after the other."""
        step = key_bytes // 4
        starts = self._advance(counts * step)
        if (counts == 1).all():
            index = starts
        else:
            offsets = offsets_of(counts)
            index = np.repeat(starts - step * offsets[:-1], counts) + step * np.arange(offsets[-1])
        low: NDArray[np.int64] = self._words.take(index).view(np.uint32).astype(np.int64)
        if step == 1:
            return low
        high = self._words.take(index + 1).astype(np.int64)
        keys: NDArray[np.int64] = high << 32 | low
        return keys

    def finish(self) -> None:
        """Raise `FormatError` unless every record is used up."""
        self._check(self._position != self._ends, "fewer")

    def _advance(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        starts: NDArray[np.int64] = self._position
        self._position = starts + words
        self._check(self._position > self._ends, "more")
        return starts

    def _check(self, wrong: NDArray[np.bool_], expected: str) -> None:
        if wrong.any():
            record = int(np.argmax(wrong))
            start, end = int(self._spans.starts[record]), int(self._spans.ends[record])
            problem = f"record at byte {self._start + start}: holds {end - start} bytes, its fields take {expected}"
            raise FormatError(self._where, problem)


def _joined(content: NDArray[np.uint8], spans: Spans) -> NDArray[np.uint8]:
    """Concatenate the records' bytes, without the bytes between them."""
    if len(spans.starts) == 0:
        return content[:0]
    first, last = int(spans.starts[0]), int(spans.ends[-1])
    gaps = spans.starts[1:] - spans.ends[:-1]
    if not gaps.any():
        return content[first:last]
    offsets = offsets_of(gaps)
    keep = np.ones(last - first, dtype=bool)
    keep[np.repeat(spans.ends[:-1] - first - offsets[:-1], gaps) + np.arange(offsets[-1])] = False
    return content[first:last][keep]


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
        num_records: Records that its header promises.
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
        stride, rest = divmod(self._file.size - first, max(self.num_records, 1))
        self._stride = 0 if rest else stride  # of records of one size; 0 where they are known to have several
        self._even_groups = 0  # of which it is known that they, and all before them, have records of that size alone
        self._bounds = [first]  # of groups of records of several sizes, as far as they are known
        self._walks = Lock()

    def read(self, group: int = 0) -> tuple[ColumnBlock, int]:
        """Return the records of a group whose checksum is right, and the number of the others.

        Labels and dense numbers are float32; keys int64[n] where every sample holds one, n lists elsewhere.

        Raises:
            FormatError: The file is cut short or continues after its records, or a record does not hold what its
                length or the layout promises.
        """
        even = self._read_even(group) if self._stride else None
        if even is not None:
            return even
        self._stride = 0
        piece, spans = self._uneven_piece(group)
        if not self._checksum:
            return decode(piece, spans, self._layout), 0
        return self._decode_checked(piece, spans)

    def _read_even(self, group: int) -> tuple[ColumnBlock, int] | None:
        """Return the records of a group, if all of it and those before have the size that the file's size implies."""
        with self._walks:
            while self._even_groups < group and self._is_even(self._even_groups):
                self._even_groups += 1
            if self._even_groups < group:
                return None
        found = self._even_piece(group)
        if found is None:
            return None
        if self._checksum:
            return self._decode_checked(*found)
        block = decode_even(*found, self._layout)
        return None if block is None else (block, 0)

    def _is_even(self, group: int) -> bool:
        found = self._even_piece(group)
        return found is not None and (self._checksum or even_slots(*found, self._layout) is not None)

    def _even_piece(self, group: int) -> tuple[Piece, Spans] | None:
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

    def _decode_checked(self, piece: Piece, spans: Spans) -> tuple[ColumnBlock, int]:
        good = has_right_checksum(piece.content, spans)
        return decode(piece, spans.keep(good), self._layout), len(good) - int(good.sum())

    def _uneven_piece(self, group: int) -> tuple[Piece, Spans]:
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

    def _walk(self, group: int) -> tuple[Piece, Spans, int]:
        """Return a group that begins where the known ones end, its records, and the byte behind them."""
        start, size = self._bounds[group], self._file.size
        mean = (size - start) // max(1, self.num_records - group * self._at_once)
        wanted = (mean + mean // 4) * self.group_rows[group] + 4096
        while True:
            piece = self._piece(group, start, min(start + wanted, size))
            try:
                return piece, *self._spans(piece, self.group_rows[group])
            except CutShortError:
                wanted *= 2

    def _spans(self, piece: Piece, rows: int) -> tuple[Spans, int]:
        if self._checksum:
            return framed_spans(piece, rows, self.num_records)
        return plain_spans(piece, rows, self._layout, self.num_records)

    def _piece(self, group: int, start: int, stop: int) -> Piece:
        return Piece(
            content=self._file.read(start, stop),
            start=start,
            first_record=group * self._at_once,
            file_bytes=self._file.size,
            where=self._file.name,
        )

    def _check_end(self) -> None:
        if self._bounds[-1] != self._file.size:
            size, end = self._file.size, self._bounds[-1]
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
    """Write ``fields[n, width]`` at the bytes ``starts[n]`` and return the bytes after them."""
    columns = np.ascontiguousarray(fields).view(np.uint8)
    for byte in range(columns.shape[1]):
        content[starts + byte] = columns[:, byte]
    ends: NDArray[np.int64] = starts + columns.shape[1]
    return ends
