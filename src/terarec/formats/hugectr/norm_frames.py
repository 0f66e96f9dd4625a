"""Where the records of a Norm file begin and end."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.strided import Strided
from terarec.spec import RecordLayout

_LENGTH = struct.Struct("<i")
_FRAME_BYTES = 5
"""The length before a record and the checksum after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Where the payloads of n records lie in a file.

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
        """The records where ``mask[n]`` is true."""
        return self if mask.all() else Spans(starts=self.starts[mask], ends=self.ends[mask])


def even_spans(first: int, stride: int, size: int, count: int) -> Spans:
    """Records of `size` bytes, the first at byte `first`, the next ones `stride` bytes further on each."""
    starts = first + stride * np.arange(count, dtype=np.int64)
    return Spans(starts=starts, ends=starts + size)


def framed_spans(content: NDArray[np.uint8], first: int, count: int, where: str) -> Spans:
    """The payloads of `count` framed records, the first frame at byte `first`.

    Raises:
        FormatError: a frame that leaves the file, or bytes after the last one.
    """
    data = content.data
    if count and first + 4 <= len(data):
        (length,) = _LENGTH.unpack_from(data, first)
        stride = length + _FRAME_BYTES
        if length >= 0 and first + stride * count == len(data):
            lengths = Strided(content, first, stride, count).matrix(0, np.dtype("<i4"), 1)
            if (lengths == length).all():
                return even_spans(first + 4, stride, length, count)
    starts: list[int] = []
    ends: list[int] = []
    byte, size = first, len(data)
    for record in range(count):
        if byte + 4 > size:
            raise _ends(where, record, count, byte, size)
        (length,) = _LENGTH.unpack_from(data, byte)
        start, end = byte + 4, byte + 4 + length
        if length < 0 or end >= size:
            raise FormatError(
                f"{where}: record {record} at byte {byte}: its length is {length}, "
                f"expected 0 to {size - start - 1}, the bytes that are left"
            )
        starts.append(start)
        ends.append(end)
        byte = end + 1
    check_end(byte, count, content, where)
    return Spans(starts=np.array(starts, dtype=np.int64), ends=np.array(ends, dtype=np.int64))


def has_right_checksum(content: NDArray[np.uint8], spans: Spans) -> NDArray[np.bool_]:
    """bool[n]: whether the byte after each record is the sum of its bytes modulo 256."""
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


def plain_spans(content: NDArray[np.uint8], first: int, count: int, layout: RecordLayout, where: str) -> Spans:
    """The payloads of `count` records without frames, the first at byte `first`: their counts tell their sizes.

    Raises:
        FormatError: a record that leaves the file, a number of keys that no slot may hold, or bytes after the last
            record.
    """
    words = content[first : first + (len(content) - first) // 4 * 4].view("<i4")
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
                        f"{where}, slot {names[slot]!r} at byte {first + 4 * position}: record {record} holds "
                        f"{words[position]} keys, expected 0 to {layout.most_keys[slot]}"
                    )
                position += step
        except IndexError:
            position = len(steps) + 1
        if position > len(steps):
            raise _ends(where, record, count, first + 4 * bounds[record], len(content))
        bounds[record + 1] = position
    check_end(first + 4 * position, count, content, where)
    places = first + 4 * np.array(bounds, dtype=np.int64)
    return Spans(starts=places[:-1], ends=places[1:])


def check_end(byte: int, count: int, content: NDArray[np.uint8], where: str) -> None:
    """Raise `FormatError` unless the file ends at `byte`, after its `count` records."""
    if byte != len(content):
        raise FormatError(f"{where}: holds {len(content)} bytes, its {count} records end at byte {byte}")


def _ends(where: str, record: int, count: int, start: int, size: int) -> FormatError:
    return FormatError(f"{where}: ends at byte {size}, in record {record} at byte {start}, expected {count} records")
