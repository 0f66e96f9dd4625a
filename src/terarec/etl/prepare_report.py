"""What a preparation did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnReport:
    """A categorical column.

    Attributes:
        name: of the column.
        rows: ids, the two reserved ones included: the rows that a table for it needs.
        distinct: distinct values in the training part, missing not counted.
    """

    name: str
    rows: int
    distinct: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What a preparation did.

    Attributes:
        rows: samples in all.
        train_rows: samples of the train split.
        valid_rows: samples of the valid split.
        test_rows: samples of the test split.
        input_bytes: size of the source files, compressed as they are.
        seconds: time taken.
        rows_per_second: `rows` / `seconds`.
        peak_memory_bytes: most memory that the process held until now.
        best_auc: best reachable AUC, if the data was generated and says so.
        columns: the categorical columns.
    """

    rows: int
    train_rows: int
    valid_rows: int
    test_rows: int = 0
    input_bytes: int
    seconds: float
    rows_per_second: float
    peak_memory_bytes: int
    best_auc: float | None
    columns: tuple[ColumnReport, ...]
