"""Results and errors of both implementations of the encoding kernels."""

from __future__ import annotations

from terarec.errors import FormatError

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
