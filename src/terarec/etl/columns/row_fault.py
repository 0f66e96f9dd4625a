"""The error of rows that hold a value which a step, or the data set, refuses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError

REFUSED_SHOWN = 10
"""Refused values that an error tells at most."""


class RowFaultError(FormatError):
    """A value of some rows is refused. Whoever knows where the rows stand tells their places.

    Attributes:
        column: of the values.
        rows: int64[k], the ids of these rows, rising.
        got: what was received in the first `REFUSED_SHOWN` of them.
        expected: what is accepted.
        kind: one word for the kind of fault.
    """

    def __init__(
        self, column: str, rows: NDArray[np.int64], got: Sequence[str], expected: str, *, kind: str = "refused"
    ) -> None:
        super().__init__(f"column {column!r}, row {rows[0]}: {got[0]}, expected {expected}")
        self.column = column
        self.rows = rows
        self.got = tuple(got[:REFUSED_SHOWN])
        self.expected = expected
        self.kind = kind
