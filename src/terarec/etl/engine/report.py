"""What a preparation did: the content of ``report.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from terarec.etl.engine.progress import PhaseReport
from terarec.formats import write_envelope
from terarec.spec import DatasetSpec, to_data

REPORT_FILE = "report.json"
FORMAT = "terarec.prepare-report"
VERSION = 1

_TABLE_WIDTHS = (16, 64, 128)
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputColumn:
    """A column of the data set.

    Attributes:
        name: of the column.
        role: "label", "dense", "categorical", "key", "weight" or "metadata".
        rows: ids, the reserved ones included: the rows that a table for it needs; None where there are no ids.
        hotness: most ids a row.
    """

    name: str
    role: Literal["label", "dense", "categorical", "key", "weight", "metadata"]
    rows: int | None = None
    hotness: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumn:
    """A column of the sources.

    Attributes:
        name: of the column.
        missing: missing values, among lists missing items.
        missing_share: `missing` of all values.
    """

    name: str
    missing: int
    missing_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """The embedding tables that would follow, float32, without optimizer state.

    Attributes:
        width: of the vectors.
        rows: of all tables together.
        bytes: `rows` x `width` x 4.
    """

    width: int
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """Input that could not be read, and what was done with it.

    Attributes:
        policy: "raise", "skip" or "missing".
        counts: kind -> faults.
        first: the first ones, each in one line with file and line.
    """

    policy: str
    counts: Mapping[str, int]
    first: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What a preparation did.

    Attributes:
        rows: samples in all.
        splits: split -> its samples.
        input_bytes: size of the source files, compressed as they are.
        seconds: time taken.
        rows_per_second: `rows` / `seconds`.
        peak_memory_bytes: most memory that the process held until now.
        best_auc: best reachable AUC, if the data was generated and says so.
        columns: of the data set.
        inputs: columns of the sources.
        tables: sizes of the tables that would follow, for some widths.
        bad_input: what could not be read.
        spilled: steps whose statistics did not fit in the memory and went through the disk.
        phases: in the order in which they were done.
    """

    rows: int
    splits: Mapping[str, int]
    input_bytes: int
    seconds: float
    rows_per_second: float
    peak_memory_bytes: int
    best_auc: float | None
    columns: tuple[OutputColumn, ...]
    inputs: tuple[InputColumn, ...]
    tables: tuple[TableSize, ...]
    bad_input: BadInput
    spilled: tuple[str, ...]
    phases: tuple[PhaseReport, ...]

    def save(self, directory: Path) -> None:
        """Write ``report.json``.

        Raises:
            StorageError: the disk is full.
        """
        write_envelope(directory / REPORT_FILE, FORMAT, VERSION, {"report": to_data(self)})


def output_columns(spec: DatasetSpec) -> tuple[OutputColumn, ...]:
    """The columns of a data set."""
    columns = [OutputColumn(name=column.name, role="label") for column in spec.labels]
    columns += [OutputColumn(name=column.name, role="dense") for column in spec.dense]
    for column in spec.categorical:
        role: Literal["categorical", "key"] = "key" if column.rows is None else "categorical"
        columns.append(OutputColumn(name=column.name, role=role, rows=column.rows, hotness=column.hotness))
    if spec.weight is not None:
        columns.append(OutputColumn(name=spec.weight, role="weight"))
    columns += [OutputColumn(name=column.name, role="metadata") for column in spec.metadata]
    return tuple(columns)


def table_sizes(columns: tuple[OutputColumn, ...]) -> tuple[TableSize, ...]:
    """The tables for columns with ids, for a few usual widths."""
    rows = sum(column.rows or 0 for column in columns)
    return tuple(TableSize(width=width, rows=rows, bytes=rows * width * _FLOAT_BYTES) for width in _TABLE_WIDTHS)
