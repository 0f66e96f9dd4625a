# SPDX-License-Identifier: Apache-2.0
"""The records of Norm files: their bounds, with checksums and without, and their fields as columns."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.hugectr.fields import (
    Strided,
    check_bag_lengths,
    copy_transposed,
    key_dtype,
)
from terarec.ragged import Ragged, offsets_of
from terarec.spec import RecordLayout

_LENGTH = struct.Struct("<i")
_FRAME_BYTES = 5
"""The length before a record and the checksum after it."""


class CutShortError(Exception):
    """Error of a piece that ends inside a record, but before the end of the file: more bytes are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormBytes:
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
        # Both: frames of other records may lie between records of one size, and records of several at equal steps.
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


def framed_spans(piece: NormBytes, count: int, total: int) -> tuple[Spans, int]:
    """Locate the payloads of the first `count` framed records of a piece, and the byte behind them.

    Raises:
        FormatError: A frame that leaves the file.
        CutShortError: More bytes are needed.
    """
    data = piece.content.data
    # Records of one size are common: one strided comparison of all lengths takes the place of the loop below.
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
        # `end` is the byte of the checksum, so that has to be in the file, too.
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
        # Sums of uint8 wrap around, which is the modulo 256 of the format.
        sums = np.add.reduce(payloads, axis=1, dtype=np.uint8)
    else:
        bounds = np.stack([spans.starts, spans.ends], axis=1).reshape(-1)
        # Every other sum is that of the frame between two records.
        sums = np.add.reduceat(content, bounds, dtype=np.uint8)[::2]
        sums[spans.starts == spans.ends] = 0  # where `reduceat` gives the byte itself
    good: NDArray[np.bool_] = sums == content[spans.ends]
    return good


def plain_spans(piece: NormBytes, count: int, layout: RecordLayout, total: int) -> tuple[Spans, int]:
    """Locate the payloads of the first `count` records without frames by their counts; see `framed_spans`.

    Raises:
        FormatError: A record that leaves the file, or a number of keys that no slot may hold.
        CutShortError: More bytes are needed.
    """
    content = piece.content
    # Every field takes 4 or 8 bytes, so records without frames are walked in words. One bound holds for all slots;
    # `decode` compares each slot with its own.
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
        # The list ends with the piece, so a record that leaves it needs no comparison for each slot.
        except IndexError:
            position = len(steps) + 1
        if position > len(steps):
            raise piece.ends(record, 4 * bounds[record], total)
        bounds[record + 1] = position
    places = 4 * np.array(bounds, dtype=np.int64)
    return Spans(starts=places[:-1], ends=places[1:]), 4 * position


_COUNT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


def decode(piece: NormBytes, spans: Spans, layout: RecordLayout) -> ColumnBlock:
    """Decode the records in `spans`: labels and dense numbers float32, keys as `ColumnBlock` has them.

    Raises:
        FormatError: A record whose fields take more or fewer bytes than it has, or a bag of too many or too few keys.
    """
    block = decode_even(piece, spans, layout)
    return decode_uneven(piece, spans, layout) if block is None else block


def decode_even(piece: NormBytes, spans: Spans, layout: RecordLayout) -> ColumnBlock | None:
    """Decode the records in `spans` if each slot holds the same number of keys in all of them; None otherwise."""
    slots = even_slots(piece, spans, layout)
    if slots is None:
        return None
    counts = [count for _, width, count in slots for _ in range(width)]
    # One check of a slot counts for all records, which hold as many keys there.
    for name, count, most in zip(layout.slot_names, counts, layout.most_keys, strict=True):
        check_bag_lengths(np.array([count]), most, f"{piece.where}, slot {name!r}")
    records = _records(piece, spans)
    label = np.ascontiguousarray(records.matrix(0, _FLOAT, layout.label_dim))
    dense = np.ascontiguousarray(records.matrix(4 * layout.label_dim, _FLOAT, layout.dense_dim))
    num_rows = len(spans.starts)
    keys: list[Keys] = []
    for byte, width, count in slots:
        keys += _columns_of(records, num_rows, (byte, width, count), layout.key_bytes)
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys))


def even_slots(piece: NormBytes, spans: Spans, layout: RecordLayout) -> list[tuple[int, int, int]] | None:
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


def _records(piece: NormBytes, spans: Spans) -> Strided:
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


def _columns_of(records: Strided, num_rows: int, slots: tuple[int, int, int], key_bytes: int) -> list[Keys]:
    """Return the columns of neighbouring slots: (first byte, number of slots, keys in each)."""
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


def decode_uneven(piece: NormBytes, spans: Spans, layout: RecordLayout) -> ColumnBlock:
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

    def __init__(self, piece: NormBytes, spans: Spans, where: str) -> None:
        self._spans, self._start = spans, piece.start
        self._where = where
        sizes = spans.ends - spans.starts
        self._check(sizes % 4 != 0, "a multiple of 4")
        self._words = _joined(piece.content, spans).view(_COUNT)
        # Positions in words of the joined records; a cursor for each, which all fields move.
        self._ends = np.cumsum(sizes // 4)
        self._position: NDArray[np.int64] = self._ends - sizes // 4

    def take(self, columns: int) -> NDArray[Any]:
        """Return the next words of each record, ``int32[n, columns]``."""
        # Indices int64[n, columns]: in each record the fields begin where its own last one ended.
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
        # A key of 8 bytes lies at a multiple of 4 only, which no view of int64 could read: it is joined from two words.
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
    # Gaps are frames, and records that a wrong checksum left out.
    gaps = spans.starts[1:] - spans.ends[:-1]
    if not gaps.any():
        return content[first:last]
    offsets = offsets_of(gaps)
    keep = np.ones(last - first, dtype=bool)
    keep[np.repeat(spans.ends[:-1] - first - offsets[:-1], gaps) + np.arange(offsets[-1])] = False
    return content[first:last][keep]
