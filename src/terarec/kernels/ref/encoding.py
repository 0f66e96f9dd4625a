"""The encoding kernels in plain Python and NumPy: what the compiled ones must equal, value for value."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import (
    COLUMN_NAMES,
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

_INTEGER = re.compile(rb"-?[0-9]+")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_HEX_TEXT = re.compile(r"[0-9a-fA-F]{1,8}")
_INT32 = np.iinfo(np.int32)
_INT64 = np.iinfo(np.int64)
_MISSING_ID, _RARE_ID, _FIRST_ID = 0, 1, 2
_LAST_COUNT = 2**32 - 1


def count_lines(block: bytes) -> int:
    """Number of lines in `block`; a last one may lack its line end."""
    return block.count(b"\n") + (block != b"" and not block.endswith(b"\n"))


def parse_criteo(block: bytes) -> CriteoBlock:
    """Parse whole lines in Criteo's layout; see `terarec.kernels.cpu.encoding.parse_criteo`."""
    lines = block.removesuffix(b"\n").split(b"\n") if block else []
    parsed = CriteoBlock(
        label=np.zeros(len(lines), dtype=np.float32),
        integers=np.zeros((NUM_INTEGERS, len(lines)), dtype=np.int32),
        categories=np.zeros((NUM_CATEGORIES, len(lines)), dtype=np.uint32),
        missing=np.zeros(len(lines), dtype=np.uint64),
    )
    for row, line in enumerate(lines):
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(COLUMN_NAMES):
            raise column_count_fault(row, len(fields))
        for column, field in enumerate(fields):
            _parse_field(parsed, row, column, field)
    return parsed


def _parse_field(parsed: CriteoBlock, row: int, column: int, field: bytes) -> None:
    if column == 0:
        if field not in (b"0", b"1"):
            raise field_fault(row, column, field, EXPECTED_LABEL)
        parsed.label[row] = int(field)
    elif not field:
        parsed.missing[row] |= np.uint64(1 << (column - 1))
    elif column <= NUM_INTEGERS:
        if not _INTEGER.fullmatch(field):
            raise field_fault(row, column, field, EXPECTED_INTEGER)
        if not _INT32.min <= int(field) <= _INT32.max:
            raise field_fault(row, column, field, EXPECTED_INTEGER_RANGE)
        parsed.integers[column - 1, row] = int(field)
    else:
        if not _HEX.fullmatch(field):
            raise field_fault(row, column, field, EXPECTED_CATEGORY)
        parsed.categories[column - 1 - NUM_INTEGERS, row] = int(field, 16)


def log_shift(
    values: NDArray[np.int32] | NDArray[np.float64], shift: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """ln(max(x, 1 - shift) + shift), a NaN x being 0; the outer maximum undoes the rounding of the sum."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=np.inf)
    logs = np.log(np.maximum(np.maximum(numbers, 1.0 - shift) + shift, 1.0)).astype(np.float32)
    if out is None:
        return logs
    out[:] = logs
    return out


def numbers_of_list(values: list[Any]) -> NDArray[np.float64]:
    """float64[n] from a list of numbers; None and ``""`` are missing, which is NaN."""
    numbers = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(values):
        missing = value is None or (isinstance(value, str) and value == "")
        numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        try:
            numbers[row] = math.nan if missing else float(value) if numeric else math.inf
        except OverflowError:
            raise RefusedValueError(row) from None
        if math.isinf(numbers[row]):
            raise RefusedValueError(row)
    return numbers


class CountTable:
    """How often each 32-bit value of a column occurs."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, keys: NDArray[np.uint32], missing: NDArray[np.uint64], bit: int) -> None:
        """Count ``keys uint32[n]`` but those whose `bit` is set in ``missing uint64[n]``."""
        self._counts.update(keys[~_is_set(missing, bit)].tolist())

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        kept = [(value, min(count, _LAST_COUNT)) for value, count in self._counts.items() if count >= min_count]
        kept.sort(key=lambda item: (-item[1], item[0]))
        return np.array([item[0] for item in kept], np.uint32), np.array([item[1] for item in kept], np.int64)

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._counts)


class _Ids:
    """Ids of any hashable values in a dict."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._ids = {value: position + _FIRST_ID for position, value in enumerate(values.tolist())}
        if len(self._ids) != len(values):
            raise ValueError("a value occurs twice")

    def _read(self, value: Any) -> Any:
        """What the dict holds for `value`, None if it is missing; raises ValueError for another type."""
        raise NotImplementedError

    def find_list(self, values: list[Any]) -> NDArray[np.int64]:
        """Ids int64[n] of Python values; raises `RefusedValueError` for one that cannot be read."""
        ids = np.empty(len(values), dtype=np.int64)
        for row, value in enumerate(values):
            try:
                key = self._read(value)
            except ValueError:
                raise RefusedValueError(row) from None
            ids[row] = _MISSING_ID if key is None else self._ids.get(key, _RARE_ID)
        return ids


class _SpelledIds(_Ids):
    """Ids of values that raw data spells as text."""

    def find_text(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids int64[n] of n texts; an empty one is missing."""
        return self.find_list(_split(text, offsets))


class Hex32Ids(_SpelledIds):
    """Ids of 32-bit values: 0 missing, 1 not in the list, i + 2 for ``values[i]``."""

    def find_all(
        self, keys: NDArray[np.uint32], missing: NDArray[np.uint64], bit: int, out: NDArray[Id]
    ) -> NDArray[Id]:
        """Ids of ``keys uint32[n]`` into ``out``; missing where `bit` of ``missing uint64[n]`` is set."""
        found = np.array([self._ids.get(key, _RARE_ID) for key in keys.tolist()], dtype=out.dtype)
        out[:] = np.where(_is_set(missing, bit), _MISSING_ID, found)
        return out

    def _read(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == ""):
            return None
        if not isinstance(value, str) or not _HEX_TEXT.fullmatch(value):
            raise ValueError
        return int(value, 16)


class Int64Ids(_Ids):
    """Ids of 64-bit integers: 0 missing, 1 not in the list, i + 2 for ``values[i]``."""

    def find_all(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids int64[n] of ``keys int64[n]``, none of them missing."""
        return self.find_list(keys.tolist())

    def _read(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError
        if not _INT64.min <= int(value) <= _INT64.max:
            raise ValueError
        return int(value)


class TextIds(_SpelledIds):
    """Ids of texts: 0 missing, 1 not in the list, i + 2 for text i."""

    def __init__(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        super().__init__(np.array(_split(text, offsets), dtype=object))

    def _read(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value == ""):
            return None
        if not isinstance(value, str):
            raise ValueError
        value.encode()  # a lone surrogate has no UTF-8: UnicodeEncodeError is a ValueError
        return value


def _is_set(missing: NDArray[np.uint64], bit: int) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = (missing >> np.uint64(bit)) & np.uint64(1) != 0
    return flags


def _split(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    whole = text.tobytes()
    return [whole[begin:end].decode() for begin, end in itertools.pairwise(offsets.tolist())]
