"""Raw columns as callers hold them (lists, NumPy, Arrow) -> one of three forms, with errors that name the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.spec.quoting import quoted

RawValues: TypeAlias = Sequence[Any] | NDArray[Any] | pa.Array | pa.ChunkedArray
"""A column of raw values, None (Arrow: null) or ``""`` being missing; lists of them for a multi-hot column."""

SMALL_ROWS = 128
"""Up to so many rows, arrays are taken as lists: a call of an Arrow function costs as much as 100 to 200 values of a
list (Zen 3)."""


class RawColumn:
    """One column of n raw values.

    Attributes:
        name: of the raw column.
        values: a list, a NumPy array of numbers, or an Arrow array of more than `SMALL_ROWS` values.
        offsets: int64[records + 1], where the values of each record begin, for a flattened column of lists.
    """

    __slots__ = ("name", "offsets", "values")

    def __init__(self, name: str, values: RawValues, offsets: NDArray[np.int64] | None = None) -> None:
        self.name = name
        self.values = values if type(values) is list else _plain(name, values)
        self.offsets = offsets

    def __len__(self) -> int:
        """Number of values n."""
        return len(self.values)

    def flatten(self, hotness: int | None) -> tuple[RawColumn, NDArray[np.int64]]:
        """The values of a column of lists, and their offsets int64[n + 1]; a missing list is an empty one.

        Args:
            hotness: the longest list; None for any.

        Raises:
            ConfigError: not a column of lists, or a list of more than `hotness` values.
        """
        values = self.values
        accepted = "list" if hotness is None else f"list of at most {hotness} values"
        if isinstance(values, pa.Array):
            if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
                raise self.mistyped(accepted.replace("list", "lists", 1))
            lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            flat: RawValues = values.flatten()
        else:
            lists = values.tolist() if isinstance(values, np.ndarray) else values
            listed = [_listed(item) for item in lists]
            if None in listed:
                raise self.refused(listed.index(None), f"a {accepted}")
            lengths = np.fromiter(map(len, listed), dtype=np.int64, count=len(listed))  # type: ignore[arg-type]
            flat = [value for item in listed for value in item or ()]
        if hotness is not None and lengths.size and lengths.max() > hotness:
            raise self.refused(int(np.argmax(lengths > hotness)), f"a {accepted}")
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return RawColumn(self.name, flat, offsets), offsets

    def refused(self, row: int, accepted: str) -> ConfigError:
        """The error for the value at position `row`; it names the record that holds it."""
        value = self.values[row]
        if isinstance(value, pa.Scalar):
            value = value.as_py()
        record = row if self.offsets is None else int(np.searchsorted(self.offsets, row, side="right")) - 1
        return ConfigError(f"column {self.name!r}, row {record}: got {quoted(value)}, expected {accepted}")

    def mistyped(self, accepted: str) -> ConfigError:
        """The error for a column of another type as a whole."""
        kind = self.values.type if isinstance(self.values, pa.Array) else getattr(self.values, "dtype", "list")
        return ConfigError(f"column {self.name!r}: got values of type {kind}, expected {accepted}")


def few_as_list(values: Any) -> Any:
    """A NumPy or Arrow array of at most `SMALL_ROWS` values as a list; anything else as it is."""
    if isinstance(values, pa.Array | pa.ChunkedArray | np.ndarray) and len(values) <= SMALL_ROWS:
        return values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return values


def _plain(name: str, values: Any) -> Any:
    values = few_as_list(values) if isinstance(values, pa.Array | pa.ChunkedArray) else values
    if isinstance(values, list):
        return values
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], type=values.type)
    if isinstance(values, pa.Array):
        if pa.types.is_dictionary(values.type):
            return values.dictionary_decode()
        return values.to_pylist() if pa.types.is_null(values.type) else values
    if isinstance(values, np.ndarray) and values.ndim >= 1:
        return values if values.dtype.kind in "iuf" and values.ndim == 1 else values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise ConfigError(f"column {name!r}: got {type(values).__name__}, expected a list, a NumPy array or an Arrow array")


def _listed(item: Any) -> Sequence[Any] | None:
    """A list as it is, () for a missing one, None for anything else."""
    if item is None:
        return ()
    if isinstance(item, np.ndarray):
        return list(item)
    return item if isinstance(item, list | tuple) else None
