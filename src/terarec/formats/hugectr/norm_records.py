"""The payloads of Norm records -> columns: at once where all records are alike, slot by slot elsewhere."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys, offsets_of
from terarec.formats.hugectr.arguments import check_bag_lengths
from terarec.formats.hugectr.key_types import key_dtype
from terarec.formats.hugectr.norm_frames import Spans
from terarec.formats.hugectr.strided import Strided, copy_transposed
from terarec.spec import RecordLayout

_COUNT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


def decode(content: NDArray[np.uint8], spans: Spans, layout: RecordLayout, where: str) -> ColumnBlock:
    """The records in `spans`: labels and dense numbers float32, keys as `ColumnBlock` has them.

    Raises:
        FormatError: a record whose fields take more or fewer bytes than it has, or a bag of too many or too few keys;
            the message starts with `where`.
    """
    block = decode_even(content, spans, layout, where)
    return decode_uneven(content, spans, layout, where) if block is None else block


def decode_even(content: NDArray[np.uint8], spans: Spans, layout: RecordLayout, where: str) -> ColumnBlock | None:
    """The records in `spans` if each slot holds the same number of keys in all of them; None otherwise."""
    stride = spans.stride
    if stride is None:
        return None
    counts = _counts_of_first(content, spans, layout)
    if counts is None:
        return None
    records = Strided(content, int(spans.starts[0]), stride, len(spans.starts))
    byte = 4 * (layout.label_dim + layout.dense_dim)
    slots: list[tuple[int, int, int]] = []  # (first byte, slots, keys in each) of neighbours with as many keys
    for count, members in groupby(counts):
        width = len(list(members))
        step = 4 + count * layout.key_bytes
        if (records.matrix(byte, _COUNT, width, step) != count).any():
            return None
        slots.append((byte, width, count))
        byte += width * step
    for name, count, most in zip(layout.slot_names, counts, layout.most_keys, strict=True):
        check_bag_lengths(np.array([count]), most, f"{where}, slot {name!r}")
    label = np.ascontiguousarray(records.matrix(0, _FLOAT, layout.label_dim))
    dense = np.ascontiguousarray(records.matrix(4 * layout.label_dim, _FLOAT, layout.dense_dim))
    num_rows = len(spans.starts)
    keys: list[Keys] = []
    for byte, width, count in slots:
        keys += _even_slots(records, num_rows, (byte, width, count), layout.key_bytes)
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys))


def _counts_of_first(content: NDArray[np.uint8], spans: Spans, layout: RecordLayout) -> list[int] | None:
    """Keys of each slot in the first record; None if they do not add up to its size."""
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
    """Columns of neighbouring slots: (first byte, number of slots, keys in each)."""
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
        columns.append((values.astype(np.int64).reshape(-1), offsets))
    return columns


def decode_uneven(content: NDArray[np.uint8], spans: Spans, layout: RecordLayout, where: str) -> ColumnBlock:
    """The records in `spans`, whatever the number of their keys; see `decode`."""
    reader = _Fields(content, spans, where)
    label = reader.take(_FLOAT, layout.label_dim)
    dense = reader.take(_FLOAT, layout.dense_dim)
    keys: list[Keys] = []
    for name, most in zip(layout.slot_names, layout.most_keys, strict=True):
        counts = reader.take(_COUNT, 1)[:, 0].astype(np.int64)
        check_bag_lengths(counts, most, f"{where}, slot {name!r}")
        values = reader.take_bags(key_dtype(layout.key_bytes), counts).astype(np.int64)
        keys.append(values if (counts == 1).all() else (values, offsets_of(counts)))
    reader.finish()
    return ColumnBlock(label=label, dense=dense, keys=tuple(keys))


class _Fields:
    """Takes the fields of all records one after the other; no record is read beyond its end."""

    def __init__(self, content: NDArray[np.uint8], spans: Spans, where: str) -> None:
        self._content = content
        self._spans = spans
        self._where = where
        self._position = spans.starts.copy()

    def take(self, dtype: np.dtype[Any], columns: int) -> NDArray[Any]:
        """``dtype[n, columns]``."""
        starts = self._advance(np.full(len(self._position), columns * dtype.itemsize))
        index = starts[:, None] + dtype.itemsize * np.arange(columns)
        return self._at(index, dtype)

    def take_bags(self, dtype: np.dtype[Any], counts: NDArray[np.int64]) -> NDArray[Any]:
        """The next ``counts[n]`` elements of each record, one record after the other."""
        starts = self._advance(counts * dtype.itemsize)
        offsets = offsets_of(counts)
        index = np.repeat(starts - offsets[:-1] * dtype.itemsize, counts) + dtype.itemsize * np.arange(offsets[-1])
        return self._at(index, dtype)

    def finish(self) -> None:
        """Raise `FormatError` unless every record is used up."""
        self._check(self._position != self._spans.ends)

    def _advance(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = self._position
        self._position = starts + sizes
        self._check(self._position > self._spans.ends)
        return starts

    def _check(self, wrong: NDArray[np.bool_]) -> None:
        if wrong.any():
            record = int(np.argmax(wrong))
            start, end = int(self._spans.starts[record]), int(self._spans.ends[record])
            needed = int(self._position[record]) - start
            raise FormatError(
                f"{self._where}: record at byte {start}: holds {end - start} bytes, its fields take "
                f"{needed if needed < end - start else f'at least {needed}'}"
            )

    def _at(self, index: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Elements that begin at the bytes `index`, aligned or not."""
        if index.size == 0:
            return np.empty(index.shape, dtype=dtype)
        last = len(self._content) - dtype.itemsize + 1
        return np.ndarray((last,), dtype, buffer=self._content.data, strides=(1,))[index]
