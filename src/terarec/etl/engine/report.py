# SPDX-License-Identifier: Apache-2.0
"""``report.json``: the summary of a preparation, and the bad input that its phases count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from terarec.etl.engine.phases import PhaseReport
from terarec.etl.source.blocks import FAULTS_SHOWN, BadInputReport
from terarec.io.files import write_versioned_json
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
        name: Name of the column.
        role: "label", "dense", "categorical", "key", "weight" or "metadata".
        rows: Ids, the reserved ones included: the rows that a table for it needs; None where there are no ids.
        hotness: Maximum number of ids a row.
    """

    name: str
    role: Literal["label", "dense", "categorical", "key", "weight", "metadata"]
    rows: int | None = None
    hotness: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingValues:
    """A column of the sources.

    Attributes:
        name: Name of the column.
        missing: Missing values, among lists missing items.
        missing_share: `missing` of all values.
    """

    name: str
    missing: int
    missing_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """Size of embedding tables for the data set (estimate): float32, without optimizer state.

    Attributes:
        width: Width of the vectors.
        rows: Rows of all tables together.
        bytes: `rows` x `width` x 4.
    """

    width: int
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """Input that could not be read, and how it was handled.

    Attributes:
        policy: "raise", "skip" or "missing".
        counts: Kind -> faults.
        first: The first ones, each in one line with file and line.
    """

    policy: str
    counts: Mapping[str, int]
    first: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Rows of a source file in the data set.

    Attributes:
        file: Path or URL.
        splits: Split -> rows of the file in it, for those with any.
    """

    file: str
    splits: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """Summary of a preparation.

    Attributes:
        rows: Samples in all.
        splits: Split -> its samples.
        files: Files in the order in which they were read, with their rows in each split.
        input_bytes: Size of the source files, compressed as they are.
        seconds: Time taken.
        rows_per_second: `rows` / `seconds`.
        peak_memory_bytes: Peak memory that the process held until now.
        best_auc: Best reachable AUC, if the data was generated and says so.
        columns: Columns of the data set.
        inputs: Columns of the sources.
        tables: Sizes of the tables that would follow, for some widths.
        bad_input: Input that could not be read.
        earlier_rows: Rows of earlier files from which steps on other rows continued.
        late_rows: Rows that were earlier than such rows of their group.
        spilled: Steps whose statistics did not fit in the memory and went through the disk.
        phases: Phases in the order in which they were done.
    """

    rows: int
    splits: Mapping[str, int]
    files: tuple[FileRows, ...]
    input_bytes: int
    seconds: float
    rows_per_second: float
    peak_memory_bytes: int
    best_auc: float | None
    columns: tuple[OutputColumn, ...]
    inputs: tuple[MissingValues, ...]
    tables: tuple[TableSize, ...]
    bad_input: BadInput
    earlier_rows: int
    late_rows: int
    spilled: tuple[str, ...]
    phases: tuple[PhaseReport, ...]

    def save(self, directory: Path) -> None:
        """Write ``report.json``."""
        write_versioned_json(directory / REPORT_FILE, FORMAT, VERSION, {"report": to_data(self)})


def output_columns(spec: DatasetSpec) -> tuple[OutputColumn, ...]:
    """Return the columns of a data set."""
    columns = [OutputColumn(name=column.name, role="label") for column in spec.labels]
    columns += [OutputColumn(name=column.name, role="dense") for column in spec.dense]
    for column in spec.categorical:
        # Without a number of rows the column has any keys, for a dynamic table, and no ids.
        role: Literal["categorical", "key"] = "key" if column.rows is None else "categorical"
        columns.append(OutputColumn(name=column.name, role=role, rows=column.rows, hotness=column.hotness))
    if spec.weight is not None:
        columns.append(OutputColumn(name=spec.weight, role="weight"))
    columns += [OutputColumn(name=column.name, role="metadata") for column in spec.metadata]
    return tuple(columns)


def table_sizes(columns: tuple[OutputColumn, ...]) -> tuple[TableSize, ...]:
    """Return the sizes of tables for the columns with ids, for a few usual widths."""
    rows = sum(column.rows or 0 for column in columns)
    return tuple(TableSize(width=width, rows=rows, bytes=rows * width * _FLOAT_BYTES) for width in _TABLE_WIDTHS)


def bad_input_to_json(report: BadInputReport) -> dict[str, Any]:
    """Return "counts" of each kind of fault, and the "first" faults, each in one line."""
    return {"counts": dict(report.counts), "first": [str(fault) for fault in report.first]}


def add_bad_input(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bad input of several parts of the data together, each as `bad_input_to_json` returns it."""
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    first = [line for part in parts for line in part["first"]]
    # Sorted, so that reports of the same input are equal.
    return {"counts": dict(sorted(counts.items())), "first": first[:FAULTS_SHOWN]}
