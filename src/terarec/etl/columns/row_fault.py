"""The error of one row."""

from __future__ import annotations

from terarec.errors import FormatError


class RowFaultError(FormatError):
    """A value of a row is refused. Whoever knows where the row stands tells its place with `problem`.

    Attributes:
        column: of the value.
        row: id of the row.
        problem: what was received and what is accepted.
    """

    def __init__(self, column: str, row: int, problem: str) -> None:
        super().__init__(f"column {column!r}, row {row}: {problem}")
        self.column = column
        self.row = row
        self.problem = problem
