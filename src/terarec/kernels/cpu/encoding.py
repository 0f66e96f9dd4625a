"""The compiled encoding kernels: single-threaded, and without the GIL wherever they work on arrays or bytes."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.encoding_types import (
    EXPECTED_CATEGORY,
    EXPECTED_INTEGER,
    EXPECTED_INTEGER_RANGE,
    EXPECTED_LABEL,
    NUM_CATEGORIES,
    NUM_INTEGERS,
    CriteoBlock,
    RefusedValueError,
    column_count_fault,
    field_fault,
)

Id = TypeVar("Id", np.int32, np.int64)

# The values of LineFault in csrc/encoding/criteo_lines.h.
_COLUMN_COUNT_FAULT = 1
_EXPECTED = {2: EXPECTED_LABEL, 3: EXPECTED_INTEGER, 4: EXPECTED_INTEGER_RANGE, 5: EXPECTED_CATEGORY}


def count_lines(block: bytes) -> int:
    """Number of lines in `block`; a last one may lack its line end."""
    return _encoding.count_lines(np.frombuffer(block, dtype=np.uint8))


def parse_criteo(block: bytes) -> CriteoBlock:
    r"""Parse whole lines in Criteo's layout; lines end in ``\n`` or ``\r\n``, the last one's end may be absent.

    Raises:
        LineFaultError: the first line with another number of columns or a field of another kind.
    """
    text = np.frombuffer(block, dtype=np.uint8)
    lines = _encoding.count_lines(text)
    parsed = CriteoBlock(
        label=np.empty(lines, dtype=np.float32),
        integers=np.empty((NUM_INTEGERS, lines), dtype=np.int32),
        categories=np.empty((NUM_CATEGORIES, lines), dtype=np.uint32),
        missing=np.empty(lines, dtype=np.uint64),
    )
    row, fault, column, begin, end = _encoding.parse_criteo(
        text, parsed.label, parsed.integers, parsed.categories, parsed.missing
    )
    if fault == _COLUMN_COUNT_FAULT:
        raise column_count_fault(row, column)
    if fault:
        raise field_fault(row, column, block[begin:end], _EXPECTED[fault])
    return parsed


def log_shift(
    values: NDArray[np.int32] | NDArray[np.float64], shift: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """ln(max(x, 1 - shift) + shift), a NaN x being 0; float32[n] from int32[n] or float64[n], into `out` if given."""
    if out is None:
        out = np.empty(len(values), dtype=np.float32)
    _encoding.log_shift(values, shift, out)
    return out


def numbers_of_list(values: list[Any]) -> NDArray[np.float64]:
    """float64[n] from a list of Python or NumPy numbers; None and ``""`` are missing, which is NaN.

    Raises:
        RefusedValueError: text, truth values, infinity, or anything else that is no number.
    """
    numbers = np.empty(len(values), dtype=np.float64)
    _accept(_encoding.numbers_of_list(values, numbers))
    return numbers


class CountTable:
    """How often each 32-bit value of a column occurs. Several threads may add; counts stop at 2^32 - 1."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = _encoding.CountTable()

    def add(self, keys: NDArray[np.uint32], missing: NDArray[np.uint64], bit: int) -> None:
        """Count ``keys uint32[n]`` but those whose `bit` is set in ``missing uint64[n]``."""
        self._table.add(keys, missing, bit)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        return self._table.at_least(min_count)

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._table)


class _Ids:
    """Ids of the values that a compiled table holds."""

    __slots__ = ("_table",)
    _table: Any

    def find_list(self, values: list[Any]) -> NDArray[np.int64]:
        """Ids int64[n] of Python values; the class says which it takes and which are missing.

        Raises:
            RefusedValueError: any other value.
        """
        ids = np.empty(len(values), dtype=np.int64)
        _accept(self._table.find_list(values, ids))
        return ids


class Hex32Ids(_Ids):
    """Ids of 32-bit values: 0 missing, 1 not in the list, i + 2 for ``values[i]``.

    `find_list` takes hexadecimal strings; None and ``""`` are missing.

    Args:
        values: uint32[V].

    Raises:
        ValueError: a value occurs twice.
    """

    __slots__ = ()

    def __init__(self, values: NDArray[np.uint32]) -> None:
        self._table = _encoding.Hex32Ids(values)

    def find_all(
        self, keys: NDArray[np.uint32], missing: NDArray[np.uint64], bit: int, out: NDArray[Id]
    ) -> NDArray[Id]:
        """Ids of ``keys uint32[n]`` into ``out``, int32[n] or int64[n]; missing where `bit` of ``missing`` is set."""
        self._table.find_all(keys, missing, bit, out)
        return out

    def find_text(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids int64[n] of hexadecimal texts: text i is ``text[offsets[i]:offsets[i + 1]]``; an empty one is missing.

        Raises:
            RefusedValueError: a text that is not up to eight hexadecimal digits.
        """
        ids = np.empty(len(offsets) - 1, dtype=np.int64)
        _accept(self._table.find_text(text, offsets, ids))
        return ids


class Int64Ids(_Ids):
    """Ids of 64-bit integers: 0 missing, 1 not in the list, i + 2 for ``values[i]``.

    `find_list` takes Python or NumPy integers, but no truth values nor integers beyond 64 bits; None is missing.

    Args:
        values: int64[V].

    Raises:
        ValueError: a value occurs twice.
    """

    __slots__ = ()

    def __init__(self, values: NDArray[np.int64]) -> None:
        self._table = _encoding.Int64Ids(values)

    def find_all(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids int64[n] of ``keys int64[n]``, none of them missing."""
        ids = np.empty(len(keys), dtype=np.int64)
        self._table.find_all(keys, ids)
        return ids


class TextIds(_Ids):
    """Ids of texts, compared byte by byte: 0 missing, 1 not in the list, i + 2 for text i.

    `find_list` takes strings without lone surrogates; None and ``""`` are missing.

    Args:
        text: uint8[n], UTF-8; copied.
        offsets: int64[V + 1]; text i is ``text[offsets[i]:offsets[i + 1]]``.

    Raises:
        ValueError: a text occurs twice.
    """

    __slots__ = ()

    def __init__(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self._table = _encoding.TextIds(text, offsets)

    def find_text(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids int64[n] of n texts; an empty one is missing."""
        ids = np.empty(len(offsets) - 1, dtype=np.int64)
        self._table.find_text(text, offsets, ids)
        return ids


def _accept(refused_row: int) -> None:
    if refused_row >= 0:
        raise RefusedValueError(refused_row)
