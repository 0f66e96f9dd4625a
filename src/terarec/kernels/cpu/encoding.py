# SPDX-License-Identifier: Apache-2.0
"""Columns of values: their hashes, how often each occurs, ids, numbers of lists, columns as rows, without the GIL.

Hashes are XXH64 as signed integers, as Spark's ``xxhash64`` gives them:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

Ids of b hash buckets and a list of values: 0 is missing; 1 to b are values that are not in the list,
``1 + xxh64(value) mod b`` (seed 42, the remainder never negative); ``b + 1 + i`` is the value at position i.

Several threads may use a table at the same time: while one works on it others wait, without the GIL. One call takes all
columns of numbers: of several threads that convert column by column, each waits for the GIL after each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.kernels.cpu import _encoding

HASH_SEED = 42
"""Of the XXH64 that gives hash buckets: Spark's ``xxhash64`` has it built in."""


class InvalidValueError(FormatError):
    """A value of a column that does not have the column's type.

    Attributes:
        row: Position of the value in the column, from 0.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"position {row}", "got a value of another type or out of range")
        self.row = row


def xxh64_int64(values: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return hashes int64[n] of the eight little-endian bytes of each of ``values int64[n]``; ``0 <= seed < 2^64``."""
    hashes = np.empty(len(values), dtype=np.int64)
    _encoding.xxh64_int64(values, seed, hashes)
    return hashes


def xxh64_text(text: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return the hashes int64[n] of n texts: text i is ``text[offsets[i]:offsets[i + 1]]``."""
    hashes = np.empty(len(offsets) - 1, dtype=np.int64)
    _encoding.xxh64_text(text, offsets, seed, hashes)
    return hashes


def xxh64_list(values: list[Any], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Return the hashes int64[n] of Python texts and integers; that of None is 0.

    Raises:
        InvalidValueError: A value of another type, a lone surrogate, or an integer of more than 64 bits.
    """
    hashes = np.empty(len(values), dtype=np.int64)
    # A position, of which callers make an error with the name of the column.
    invalid_row = _encoding.xxh64_list(values, seed, hashes)
    if invalid_row >= 0:
        raise InvalidValueError(invalid_row)
    return hashes


IntegerT = TypeVar("IntegerT", np.uint32, np.int64)


class _Counts:
    """A compiled table. `valid` of its methods is Arrow's validity bitmap, a bit for each value; None: all are."""

    __slots__ = ("_table",)

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def memory_bytes(self) -> int:
        """Memory of the table."""
        num_bytes: int = self._table.memory_bytes()
        return num_bytes

    def __len__(self) -> int:
        """Return the number of distinct values."""
        return len(self._table)


class _IntegerCounts(_Counts, Generic[IntegerT]):
    """A table of integers of one type."""

    __slots__ = ()

    def add(
        self,
        values: NDArray[IntegerT],
        valid: NDArray[np.uint8] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count ``values[n]`` that are `valid`; value i ``times int64[n][i]`` >= 1 times if given."""
        self._table.add(values, valid, times)

    def at_least(self, min_count: int) -> tuple[NDArray[IntegerT], NDArray[np.int64]]:
        """Return values that occurred `min_count` times and their counts, by decreasing count, then by value."""
        counts: tuple[NDArray[IntegerT], NDArray[np.int64]] = self._table.at_least(min_count)
        return counts

    def drain(self) -> tuple[NDArray[IntegerT], NDArray[np.int64]]:
        """Return all values, increasing, and their counts; the table is empty afterwards."""
        counts: tuple[NDArray[IntegerT], NDArray[np.int64]] = self._table.drain()
        return counts


class Hex32Counts(_IntegerCounts[np.uint32]):
    """Counts of 32-bit values, ``uint32[n]``; they stop at 2^32 - 1."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.Hex32Counts())


class Int64Counts(_IntegerCounts[np.int64]):
    """Counts of 64-bit integers, ``int64[n]``."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.Int64Counts())


class TextCounts(_Counts):
    """Counts of texts, compared byte by byte. Text i of n is ``text[offsets[i]:offsets[i + 1]]``, as in Arrow."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.TextCounts())

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        valid: NDArray[np.uint8] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count n texts that are `valid` and not empty; text i ``times[i]`` >= 1 times if given."""
        self._table.add(text, offsets, valid, times)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return texts, as bytes and offsets, and counts of those that occurred `min_count` times.

        They are sorted by decreasing count, ties by increasing bytes.
        """
        counts: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]] = self._table.at_least(min_count)
        return counts

    def drain(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return all texts by increasing bytes, as bytes and offsets, and their counts; then the table is empty."""
        counts: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]] = self._table.drain()
        return counts


_INT64 = np.dtype(np.int64)


class _Ids:
    """Ids of the values that a compiled table holds. `valid` is Arrow's validity bitmap as for `_Counts`."""

    __slots__ = ("_table",)
    _table: Any

    def find_list(self, values: list[Any]) -> NDArray[np.int64]:
        """Return the ids int64[n] of Python values; the class describes which are valid and which are missing.

        Raises:
            InvalidValueError: Any other value.
        """
        ids = np.empty(len(values), _INT64)
        invalid_row = self._table.find_list(values, ids)
        if invalid_row >= 0:
            raise InvalidValueError(invalid_row)
        return ids


class _IntegerIds(_Ids, Generic[IntegerT]):
    """Ids of integers of one type."""

    __slots__ = ()

    def find_all(
        self,
        values: NDArray[IntegerT],
        valid: NDArray[np.uint8] | None = None,
        out: NDArray[np.int32] | NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """Return ids of ``values[n]``, missing unless `valid`: int64[n], or into ``out`` if given."""
        ids = np.empty(len(values), dtype=np.int64) if out is None else out
        self._table.find_all(values, valid, ids)
        return ids


class Hex32Ids(_IntegerIds[np.uint32]):
    """Ids of 32-bit values; the hash is that of the value as int64.

    `find_list` takes hexadecimal strings; None and ``""`` are missing.

    Args:
        values: uint32[V].
        hash_buckets: Number of ids that values outside the list share.

    Raises:
        ValueError: A value occurs twice, or `hash_buckets` is not in [1, 2^31).
    """

    __slots__ = ()

    def __init__(self, values: NDArray[np.uint32], hash_buckets: int = 1) -> None:
        self._table = _encoding.Hex32Ids(values, hash_buckets)


class Int64Ids(_IntegerIds[np.int64]):
    """Ids of 64-bit integers.

    `find_list` takes Python or NumPy integers, but no truth values nor integers beyond 64 bits; None is missing.

    Args:
        values: int64[V].
        hash_buckets: Number of ids that values outside the list share.

    Raises:
        ValueError: A value occurs twice, or `hash_buckets` is not in [1, 2^31).
    """

    __slots__ = ()

    def __init__(self, values: NDArray[np.int64], hash_buckets: int = 1) -> None:
        self._table = _encoding.Int64Ids(values, hash_buckets)


class TextIds(_Ids):
    """Ids of texts, compared byte by byte.

    `find_list` takes strings without lone surrogates; None and ``""`` are missing.

    Args:
        text: uint8[n], UTF-8; copied.
        offsets: int64[V + 1]; text i is ``text[offsets[i]:offsets[i + 1]]``.
        hash_buckets: Number of ids that texts outside the list share.

    Raises:
        ValueError: A text occurs twice, or `hash_buckets` is not in [1, 2^31).
    """

    __slots__ = ()

    def __init__(self, text: NDArray[np.uint8], offsets: NDArray[np.int64], hash_buckets: int = 1) -> None:
        self._table = _encoding.TextIds(text, offsets, hash_buckets)

    def find_all(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        valid: NDArray[np.uint8] | None = None,
        out: NDArray[np.int32] | NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """Return ids of n texts, missing where empty or not `valid`: int64[n], or into ``out`` if given."""
        ids = np.empty(len(offsets) - 1, dtype=np.int64) if out is None else out
        self._table.find_all(text, offsets, valid, ids)
        return ids


class TablesOfColumns:
    """The tables of several columns, whose values are looked up in one call: a served record has one value of each.

    Args:
        tables: One for each column; the same may serve several.
    """

    __slots__ = ("_tables",)

    def __init__(self, tables: Sequence[Hex32Ids | Int64Ids | TextIds]) -> None:
        self._tables = _encoding.TablesOfColumns([table._table for table in tables])

    def find_lists(self, columns: list[list[Any]]) -> NDArray[np.int64]:
        """Return the ids int64[m] of the m Python values of all columns, one column after another.

        Raises:
            InvalidValueError: An invalid value for its table; its row is its position among the m values.
        """
        ids = np.empty(sum(map(len, columns)), _INT64)
        invalid_place = self._tables.find_lists(columns, ids)
        if invalid_place >= 0:
            raise InvalidValueError(invalid_place)
        return ids


def find_columns(
    tables: Sequence[Hex32Ids] | Sequence[Int64Ids],
    values: Sequence[NDArray[Any]],
    valid: Sequence[NDArray[np.uint8] | None],
) -> NDArray[np.int32]:
    """Return the ids int32[S, n] of S columns of n values, each found in the table of its own; all ids must fit.

    The GIL is released once: of several threads that look up column by column, each waits for it after each column.
    """
    ids = np.empty((len(tables), len(values[0])), dtype=np.int32)
    _encoding.find_columns([table._table for table in tables], values, valid, ids)
    return ids


def numbers_of_list(values: list[Any], *, whole: bool = False) -> NDArray[np.float64]:
    """Return float64[n] from a list of Python or NumPy numbers; None and ``""`` are missing, which is NaN.

    Args:
        values: List.
        whole: Whether only Python integers of 64 bits and None are accepted.

    Raises:
        InvalidValueError: Text, truth values, infinity, or anything else that is not a number.
    """
    return numbers_of_lists([values], whole=whole)


def numbers_of_lists(columns: list[list[Any]], *, whole: bool = False) -> NDArray[np.float64]:
    """Return the numbers float64[m] of the m values of all columns, one column after another.

    Args:
        columns: Lists as for `numbers_of_list`.
        whole: Whether only Python integers of 64 bits and None are accepted.

    Raises:
        InvalidValueError: As for `numbers_of_list`; its row is its position among the m values.
    """
    numbers = np.empty(sum(map(len, columns)), dtype=np.float64)
    invalid_place = _encoding.numbers_of_lists(columns, whole, numbers)
    if invalid_place >= 0:
        raise InvalidValueError(invalid_place)
    return numbers


def read_hex32(
    text: NDArray[np.uint8], offsets: NDArray[np.int64], valid: NDArray[np.uint8] | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return the numbers uint32[n] of n texts of 1 to 8 hexadecimal digits, and which are missing, bool[n].

    Text i is ``text[offsets[i]:offsets[i + 1]]``; it is missing, and 0, where it is empty or not `valid`.

    Raises:
        InvalidValueError: Any other text.
    """
    numbers = np.empty(len(offsets) - 1, dtype=np.uint32)
    missing = np.empty(len(numbers), dtype=np.bool_)
    invalid_row = _encoding.read_hex32(text, offsets, valid, numbers, missing)
    if invalid_row >= 0:
        raise InvalidValueError(invalid_row)
    return numbers, missing


def cut_texts(raw: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of texts and their offsets int64[count + 1].

    Args:
        raw: UTF-8 of each text, behind its length in 4 bytes, the lowest first.
        count: Number of texts.

    Raises:
        InvalidValueError: A text that is cut short or no UTF-8; its row is `count` for bytes behind the last text.
    """
    if len(raw) < 4 * count:
        raise InvalidValueError(len(raw) // 4)
    text, offsets = np.empty(len(raw) - 4 * count, dtype=np.uint8), np.empty(count + 1, dtype=np.int64)
    invalid_row = _encoding.cut_texts(raw, text, offsets)
    if invalid_row >= 0:
        raise InvalidValueError(invalid_row)
    return text, offsets


def stack_columns(columns: Sequence[NDArray[Any]], out: NDArray[np.float32]) -> None:
    """Write the F columns side by side into rows, as ``numpy.stack(columns, axis=1, out=out)`` does.

    Args:
        columns: Columns of n numbers each, of type float32, float64, int32 or int64, with any stride.
        out: float32[n, F].

    Raises:
        ValueError: An array of another type or length.
    """
    _encoding.stack_columns(list(columns), out)


def concatenate_keys(arrays: Sequence[NDArray[Any]], offsets: Sequence[int], out: NDArray[np.int64]) -> None:
    """Write keys one array after another, each array plus its offset.

    Args:
        arrays: Contiguous int32[n] or int64[n], each of its own n.
        offsets: Integer to add to each array; sums wrap around at 2^63.
        out: int64[sum of n].

    Raises:
        ValueError: An array of another type, another number of offsets, or an `out` of another length.
    """
    _encoding.concatenate_keys(list(arrays), list(offsets), out)


def nulls_hold(numbers: NDArray[Any], valid: NDArray[np.uint8], fill: float) -> bool:
    """Return whether each number under a null is `fill`; NaN is NaN.

    Args:
        numbers: Contiguous int64[n], float64[n] or uint32[n].
        valid: Arrow's validity bitmap, a bit for each number, 0 for a null.
        fill: A number of the type of `numbers`.

    Raises:
        TypeError: Arrays of other types, or a number that the type does not hold.
        ValueError: A bitmap that is shorter than the array.
    """
    return _encoding.nulls_hold(numbers, valid, fill)
