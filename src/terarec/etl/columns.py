"""Columns and blocks, what flows between the sources, the operators and the sinks of a workflow; columns <-> Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import offsets_of

REFUSED_SHOWN = 10
"""Largest number of rejected values in an error."""


class RowFaultError(FormatError):
    """A value of some rows is invalid. A caller that knows the source of the rows adds their places.

    Attributes:
        column: Column of the values.
        rows: int64[k], the ids of these rows, rising.
        got: Values of the first `REFUSED_SHOWN` of them.
        expected: Accepted values.
        kind: One word for the kind of fault.
    """

    def __init__(
        self, column: str, rows: NDArray[np.int64], got: Sequence[str], expected: str, *, kind: str = "rejected"
    ) -> None:
        super().__init__(f"column {column!r}, row {rows[0]}: {got[0]}, expected {expected}")
        self.column = column
        self.rows = rows
        self.got = tuple(got[:REFUSED_SHOWN])
        self.expected = expected
        self.kind = kind


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
    """The type of a column.

    Attributes:
        kind: Kind of the values.
        is_list: Whether a row holds a list of them.
        max_length: The longest list; None for no bound.
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
        type: Kind of the values.
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
        """Return which of the m values are missing, bool[m]; "" among text is."""
        if self.type == "number":
            return np.isnan(np.asarray(self.values, dtype=np.float64))
        if self.type == "text":
            return np.equal(text_lengths(self.values), 0)
        if self.missing is None:
            return np.zeros(len(self.values), dtype=np.bool_)
        return self.missing

    def num_missing(self) -> int:
        """Count the missing ones of the m values."""
        if self.type in ("integer", "hex32", "id") and self.missing is None:
            return 0
        return int(np.count_nonzero(self.is_missing()))

    def numbers(self) -> NDArray[np.float64]:
        """Return the m numbers, integers or ids as float64, NaN where missing; may share memory with `values`."""
        numbers = np.asarray(self.values, dtype=np.float64)
        if self.missing is None:
            return numbers
        return np.where(self.missing, np.nan, numbers)

    def write_numbers(self, out: NDArray[np.floating[Any]]) -> None:
        """Write `numbers` into ``out[m]``."""
        out[:] = self.values
        if self.missing is not None:
            out[self.missing] = np.nan

    def flat(self) -> Column:
        """Return the m values without their lists."""
        return self if self.offsets is None else Column(self.type, self.values, self.missing)

    def like(self, flat: Column) -> Column:
        """Return `flat`, m values, in the lists of this column."""
        return flat if self.offsets is None else Column(flat.type, flat.values, flat.missing, self.offsets)

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Return the rows at these positions, int64[k], in this order."""
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
        """Return rows ``start <= i < stop``, sharing memory."""
        if self.offsets is None:
            missing = None if self.missing is None else self.missing[start:stop]
            return Column(self.type, _cut(self.values, start, stop), missing)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        missing = None if self.missing is None else self.missing[first:last]
        return Column(self.type, _cut(self.values, first, last), missing, self.offsets[start : stop + 1] - first)


def concatenate_columns(columns: Sequence[Column]) -> Column:
    """Concatenate at least one column of one kind."""
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


def text_buffers(array: pa.LargeStringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of Arrow text and its offsets int64[n + 1], as views. A null has no bytes."""
    _, offsets, text = array.buffers()
    if offsets is None or offsets.size == 0:  # Arrow may leave the buffers of an empty array out
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    all_offsets = np.frombuffer(offsets, dtype=np.int64, count=array.offset + len(array) + 1)
    return np.frombuffer(text or b"", dtype=np.uint8), all_offsets[array.offset :]


def text_lengths(array: pa.LargeStringArray) -> NDArray[np.int64]:
    """Return the bytes of each text, int64[n]; 0 for a null."""
    _, offsets = text_buffers(array)
    lengths = np.diff(offsets)
    if array.null_count:  # a null may have bytes
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _taken(values: Any, rows: NDArray[np.int64]) -> Any:
    return values.take(pa.array(rows)) if isinstance(values, pa.Array) else values[rows]


def _cut(values: Any, start: int, stop: int) -> Any:
    return values.slice(start, stop - start) if isinstance(values, pa.Array) else values[start:stop]


ARROW_TYPES: dict[Kind, pa.DataType] = {
    "text": pa.large_string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "hex32": pa.uint32(),
    "id": pa.int64(),
}
"""The Arrow type of the values of each kind."""


def to_arrow(column: Column) -> pa.Array:
    """Return `column` as an Arrow array of its kind's type, or a large_list of it; missing values are null."""
    if column.type == "text":
        text = column.values
        missing = column.is_missing()
        values = pc.if_else(pa.array(~missing), text, None) if int(missing.sum()) > text.null_count else text
    elif column.type == "number":
        values = pa.array(column.values, type=pa.float64(), from_pandas=True)
    else:
        values = pa.array(column.values, type=ARROW_TYPES[column.type], mask=column.missing)
    if column.offsets is None:
        return values
    return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)


def from_arrow(array: Any, kind: Kind) -> Column:
    """Return the column of an Arrow array (or chunked array) whose values cast to the type of `kind` without loss.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: Values of another type.
    """
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        flat = from_arrow(array.flatten(), kind)
        return Column(kind, flat.values, flat.missing, offsets_of(lengths))
    values = array.cast(ARROW_TYPES[kind])
    if kind == "text":
        return Column(kind, values)
    if kind == "number":
        return Column(kind, values.fill_null(float("nan")).to_numpy(zero_copy_only=False))
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return Column(kind, values.fill_null(0).to_numpy(zero_copy_only=False), missing)


TRAIN, VALID, TEST = 0, 1, 2
"""Values of `Block.split`."""
SPLIT_NAMES = ("train", "valid", "test")
"""Names of the splits in a data set, by the values of `Block.split`."""


@dataclass(frozen=True, slots=True)
class Block:
    """n rows. Blocks are not changed: each step makes a new one, which shares the columns it leaves alone.

    Attributes:
        columns: Name -> column of n rows.
        rows: int64[n], row ids, rising; described in docs/workflows.md.
        split: uint8[n], `TRAIN`, `VALID` or `TEST`; None before rows are split, and for records that are served.
    """

    columns: Mapping[str, Column]
    rows: NDArray[np.int64]
    split: NDArray[np.uint8] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.rows)

    def with_columns(self, columns: Mapping[str, Column]) -> Block:
        """Return this block with `columns` added or replaced."""
        return Block({**self.columns, **columns}, self.rows, self.split)

    def only(self, names: Sequence[str]) -> Block:
        """Return this block with the columns `names` alone, in this order."""
        return Block({name: self.columns[name] for name in names}, self.rows, self.split)

    def to_batch(self, names: Sequence[str]) -> pa.RecordBatch:
        """Return the columns `names` as an Arrow batch; missing values are null."""
        return pa.RecordBatch.from_arrays([to_arrow(self.columns[name]) for name in names], names=list(names))

    def with_split(self, split: NDArray[np.uint8]) -> Block:
        """Return this block with a split of its rows, uint8[n]."""
        return Block(self.columns, self.rows, split)

    def take(self, positions: NDArray[np.int64]) -> Block:
        """Return the rows at these positions, int64[k], in this order."""
        columns = {name: column.take(positions) for name, column in self.columns.items()}
        return Block(columns, self.rows[positions], None if self.split is None else self.split[positions])

    def slice(self, start: int, stop: int) -> Block:
        """Return rows ``start <= i < stop``, sharing memory."""
        columns = {name: column.slice(start, stop) for name, column in self.columns.items()}
        split = None if self.split is None else self.split[start:stop]
        return Block(columns, self.rows[start:stop], split)

    def keep(self, kept: NDArray[np.bool_]) -> Block:
        """Return the rows that are `kept`, bool[n]."""
        return self if kept.all() else self.take(np.flatnonzero(kept))

    def training(self) -> Block:
        """Return the rows of the training part; all where rows are not split."""
        return self if self.split is None else self.keep(self.split == TRAIN)


def concatenate_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate at least one block; all have the same columns, and splits or none."""
    first = blocks[0]
    columns = {name: concatenate_columns([block.columns[name] for block in blocks]) for name in first.columns}
    splits = [block.split for block in blocks if block.split is not None]
    rows = np.concatenate([block.rows for block in blocks])
    return Block(columns, rows, np.concatenate(splits) if splits else None)
