"""One column of a block: its values, which of them are missing, and for lists where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Kind: TypeAlias = Literal["text", "integer", "number", "hex32", "id"]

DTYPES: dict[str, type[np.generic]] = {
    "number": np.float64,
    "integer": np.int64,
    "hex32": np.uint32,
    "id": np.int64,
}
"""NumPy type of the values of each kind but text; ids may also be int32."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What is known of a column before any row is seen.

    Attributes:
        kind: of the values.
        is_list: whether a row holds a list of them.
        max_length: the longest list, None where it has no bound.
    """

    kind: Kind
    is_list: bool = False
    max_length: int | None = None

    def __str__(self) -> str:
        return f"lists of {self.kind}" if self.is_list else self.kind


@dataclass(frozen=True, slots=True)
class Column:
    """n rows of one kind; with `offsets`, n lists whose items lie one after another in m `values`.

    Attributes:
        type: kind of the values.
        values: number: float64[m], NaN being missing. integer: int64[m]. hex32: uint32[m]. text: an Arrow large_string
            array [m], null and "" being missing. id: int64[m] or int32[m], none missing.
        missing: integer and hex32: bool[m], their values being 0 there; None where nothing is missing, and for other
            kinds.
        offsets: int64[n + 1], ``values[offsets[i]:offsets[i + 1]]`` is the list of row i, ``offsets[0]`` being 0; a
            missing list is an empty one. None: one value a row, m = n.
    """

    type: Kind
    values: Any
    missing: NDArray[np.bool_] | None = None
    offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Number of rows n."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def is_list(self) -> bool:
        """Whether each row holds a list."""
        return self.offsets is not None

    def is_missing(self) -> NDArray[np.bool_]:
        """Which of the m values are missing, bool[m]; "" among text is."""
        if self.type == "number":
            return np.isnan(np.asarray(self.values, dtype=np.float64))
        if self.type == "text":
            return np.equal(text_lengths(self.values), 0)
        if self.missing is None:
            return np.zeros(len(self.values), dtype=np.bool_)
        return self.missing

    def num_missing(self) -> int:
        """How many of the m values are missing."""
        if self.type in ("integer", "hex32", "id") and self.missing is None:
            return 0
        return int(np.count_nonzero(self.is_missing()))

    def numbers(self) -> NDArray[np.float64]:
        """The m numbers, integers or ids as float64, NaN where missing; may share memory with `values`."""
        numbers = np.asarray(self.values, dtype=np.float64)
        if self.missing is None:
            return numbers
        return np.where(self.missing, np.nan, numbers)

    def write_numbers(self, out: NDArray[np.floating[Any]]) -> None:
        """Write what `numbers` gives into ``out[m]``."""
        out[:] = self.values
        if self.missing is not None:
            out[self.missing] = np.nan

    def flat(self) -> Column:
        """The m values without their lists."""
        return self if self.offsets is None else Column(self.type, self.values, self.missing)

    def like(self, flat: Column) -> Column:
        """`flat`, m values, in the lists of this column."""
        return flat if self.offsets is None else Column(flat.type, flat.values, flat.missing, self.offsets)

    def take(self, rows: NDArray[np.int64]) -> Column:
        """The rows at these positions, int64[k], in this order."""
        if self.offsets is None:
            missing = None if self.missing is None else self.missing[rows]
            return Column(self.type, _taken(self.values, rows), missing)
        lengths = np.diff(self.offsets)[rows]
        offsets = offsets_of(lengths)
        items = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Column(
            self.type, _taken(self.values, items), None if self.missing is None else self.missing[items], offsets
        )

    def slice(self, start: int, stop: int) -> Column:
        """Rows ``start <= i < stop``, sharing memory."""
        if self.offsets is None:
            missing = None if self.missing is None else self.missing[start:stop]
            return Column(self.type, _cut(self.values, start, stop), missing)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        missing = None if self.missing is None else self.missing[first:last]
        return Column(self.type, _cut(self.values, first, last), missing, self.offsets[start : stop + 1] - first)


def concatenate_columns(columns: Sequence[Column]) -> Column:
    """The rows of at least one column of one kind, one after another."""
    first = columns[0]
    if len(columns) == 1:
        return first
    values: Any
    if first.type == "text":
        values = pa.concat_arrays([column.values for column in columns])
    else:
        values = np.concatenate([column.values for column in columns])
    missing = None
    if any(column.missing is not None for column in columns):
        missing = np.concatenate([column.is_missing() for column in columns])
    if first.offsets is None:
        return Column(first.type, values, missing)
    lengths = [np.diff(column.offsets) for column in columns if column.offsets is not None]
    return Column(first.type, values, missing, offsets_of(np.concatenate(lengths)))


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[n + 1], where lists of these lengths begin and end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def text_buffers(array: pa.LargeStringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of Arrow text, and int64[n + 1] where each text begins in them; views. A null has no bytes."""
    _, offsets, text = array.buffers()
    if offsets is None or offsets.size == 0:  # Arrow may leave the buffers of an empty array out
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    all_offsets = np.frombuffer(offsets, dtype=np.int64, count=array.offset + len(array) + 1)
    return np.frombuffer(text or b"", dtype=np.uint8), all_offsets[array.offset :]


def text_lengths(array: pa.LargeStringArray) -> NDArray[np.int64]:
    """Bytes of each text, int64[n]; 0 for a null."""
    _, offsets = text_buffers(array)
    lengths = np.diff(offsets)
    if array.null_count:  # a null may stand over bytes
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _taken(values: Any, rows: NDArray[np.int64]) -> Any:
    return values.take(pa.array(rows)) if isinstance(values, pa.Array) else values[rows]


def _cut(values: Any, start: int, stop: int) -> Any:
    return values.slice(start, stop - start) if isinstance(values, pa.Array) else values[start:stop]
