"""What both implementations of the encoding kernels return and raise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
LABEL_NAME = "label"
INTEGER_NAMES = tuple(f"I{number}" for number in range(1, NUM_INTEGERS + 1))
CATEGORY_NAMES = tuple(f"C{number}" for number in range(1, NUM_CATEGORIES + 1))
COLUMN_NAMES = (LABEL_NAME, *INTEGER_NAMES, *CATEGORY_NAMES)
"""The columns of Criteo's layout, in the order of a line's fields."""

HASH_SEED = 42
"""Of the XXH64 that gives hash buckets: Spark's ``xxhash64`` has it built in."""

_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CriteoBlock:
    """n parsed lines in Criteo's layout.

    Attributes:
        label: float32[n], 0 or 1.
        integers: int32[13, n]; 0 where missing.
        categories: uint32[26, n]; 0 where missing.
        missing: uint64[n]; bit c tells that integer c is missing, bit 13 + c that category c is.
    """

    label: NDArray[np.float32]
    integers: NDArray[np.int32]
    categories: NDArray[np.uint32]
    missing: NDArray[np.uint64]


class LineFaultError(FormatError):
    """A line that is not in Criteo's layout.

    Attributes:
        row: the line's position in the block, from 0.
        reason: what was found and what is accepted, without the place.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"line {row + 1} of the block: {reason}")
        self.row = row
        self.reason = reason


class RefusedValueError(FormatError):
    """A value of a column that cannot be read as what it should be.

    Attributes:
        row: position of the value in the column, from 0.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"the value at position {row} is of another type or out of range")
        self.row = row


def column_count_fault(row: int, found: int) -> LineFaultError:
    """The fault of a line of `found` columns."""
    return LineFaultError(
        row,
        f"found {found} column{'s' if found > 1 else ''}, expected {len(COLUMN_NAMES)} "
        f"(label, {NUM_INTEGERS} integers, {NUM_CATEGORIES} categories, tab-separated)",
    )


def field_fault(row: int, column: int, field: bytes, expected: str) -> LineFaultError:
    """The fault of one field; `column` counts from 0, and `field` is what the line holds there."""
    text = field.decode("utf-8", errors="backslashreplace")
    shown = repr(text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "...")
    return LineFaultError(row, f"column {column + 1} ({COLUMN_NAMES[column]}): got {shown}, expected {expected}")


EXPECTED_LABEL = "0 or 1"
EXPECTED_INTEGER = "an integer or nothing"
EXPECTED_INTEGER_RANGE = "an integer from -2147483648 to 2147483647"
EXPECTED_CATEGORY = "up to 8 hexadecimal digits or nothing"
