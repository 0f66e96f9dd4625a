# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the tasks on executors: the job, its opened form, and stages that pass opaque parts to each other.

Tasks leave tables (encoded rows, partial states by value) in files of the shared directory, from which later tasks map
them: a table that goes through Spark is copied between Python and Java four times. Spark itself moves rows of a key, a
place to sort by, and a small part. So they are RDDs: `mapInArrow` would do the same with columns, but wants pandas in
every Python for it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import RDD, SparkContext, TaskContext

from terarec.errors import TerarecError
from terarec.etl.columns import Rows
from terarec.etl.engine.grouped import rows_from_table
from terarec.etl.engine.passes import InvalidRowHandler, Pipeline, ReadRows
from terarec.etl.engine.run import WORK, StateStore
from terarec.etl.engine.split import Bounds, assign
from terarec.etl.ops.sequences import ITEM_BITS
from terarec.etl.source.blocks import FAULTS_SHOWN, InputFault, SourceFile
from terarec.etl.source.hive import files_spec, with_directories
from terarec.etl.source.source import Source, reader_of
from terarec.etl.spark.jobs import executor_errors, raise_error
from terarec.etl.spark.read import FilePart, read_piece
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import Plan
from terarec.io.opening import arrow_file
from terarec.io.removal import remove_tree
from terarec.spec import SourceSpec, WorkflowSpec
from terarec.spec.preparation import BadInputPolicy

Row: TypeAlias = tuple[Any, ...]
T = TypeVar("T")

REPORT = "report"
"""Key of the rows that report pieces."""
BLOCK_BITS = 24
"""Bits of a place that number the blocks of a piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Description of a run for executors; small, since every task gets it.

    Attributes:
        spec: The workflow.
        source: How the source files are read, which may be another format than that of the workflow.
        files: Source files.
        policy: Policy for bad input.
        directory: Directory of the saved workflow, with the states of the steps in `fitted`.
        fitted: Positions of the steps that are fitted by now.
        bounds: Bounds of the splits, if rows must be counted for them.
        grouped: Directory of the outputs of the grouped steps, if there are any.
        key: Name of the job, which no other has.
    """

    spec: WorkflowSpec
    source: SourceSpec
    files: tuple[SourceFile, ...]
    policy: BadInputPolicy
    directory: Path
    fitted: tuple[int, ...] = ()
    bounds: Bounds | None = None
    grouped: Path | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


class Fault(NamedTuple):
    """The error that ended a piece: row id where its block begins, class, place and problem."""

    row: int
    kind: str
    where: str
    problem: str


@dataclass(slots=True)
class PieceReport:
    """The results of a task for a piece.

    Attributes:
        fault: Error that ended it.
        bad_input: Kind of fault -> how often it occurred.
        first: The first faults.
        rows: Rows of each split.
        missing: Column of the source -> missing and all values.
        positives: Positions of the labels that have a positive row for training.
        values: Position of a label -> the first different values of its column for training, where none is positive.
    """

    fault: Fault | None = None
    bad_input: dict[str, int] = field(default_factory=dict)
    first: tuple[InputFault, ...] = ()
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, dtype=np.int64))
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    positives: set[int] = field(default_factory=set)
    values: dict[int, list[str]] = field(default_factory=dict)


class OpenJob:
    """A job on an executor: its plan, the states that are fitted, and the readers of its files."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan: Plan = Workflow.of(job.spec).plan
        store = StateStore(self.plan, job.directory)
        states = {step: store.state(step) for step in job.fitted}
        self.workflow = Workflow.of(job.spec, states)
        self.pipeline = Pipeline(self.plan, states, assign(job.spec.split, job.bounds))
        self.item_bits = item_bits(self.plan)
        self.reader = with_directories(job.source, job.files, reader_of)
        self.files_spec = files_spec(job.source, job.files)

    def map(
        self, piece: FilePart, report: PieceReport, function: Callable[[ReadRows], T], until_row: int | None = None
    ) -> Iterator[T]:
        """Yield `function` of the rows of a piece, block by block; an error ends the piece and is passed to `report`.

        No block begins from row id `until_row` on. `report` gets bad input and the error.
        """
        # One thread: Spark runs a task on each core.
        source = Source(self.job.files, self.job.source, self.reader, self.job.policy, 1)
        joined = self._joined(piece)
        row = piece.first_row
        try:
            for raw in read_piece(self.reader, self.files_spec, self.job.files, piece):
                row = raw.first_row
                if until_row is not None and row << self.item_bits >= until_row:
                    break
                invalid = InvalidRowHandler(source, raw, self.item_bits)
                end = (row + raw.num_rows) << self.item_bits
                grouped = None if joined is None else _between(joined, row << self.item_bits, end)
                result = function(ReadRows(raw, source.read_block(raw), grouped, invalid))
                invalid.flush()
                yield result
        except TerarecError as error:  # not raised here: of all tasks the first fault in the order of rows counts
            report.fault = Fault(row, type(error).__name__, error.where, error.problem)
        report_of_faults = source.bad_input
        report.bad_input, report.first = dict(report_of_faults.counts), report_of_faults.first

    def _joined(self, piece: FilePart) -> Rows | None:
        """Return the outputs of the grouped steps for the rows of a piece."""
        if self.job.grouped is None:
            return None
        columns: dict[str, pa.Array] = {}
        ids = np.zeros(0, dtype=np.int64)
        for step in self.plan.grouped_steps:
            path = grouped_file(self.job.grouped, step, piece)
            # No file where the step has no rows of the piece.
            if path.exists():
                with arrow_file(path, is_mapped=True) as file:
                    outputs = rows_from_table(pa.ipc.open_file(file).read_all())
                columns.update(outputs.columns)
                ids = outputs.ids
        return Rows(columns, ids)


def _between(rows: Rows, first: int, end: int) -> Rows:
    begin, stop = np.searchsorted(rows.ids, [first, end])
    return rows.slice(int(begin), int(stop))


def grouped_file(directory: Path, step: int, piece: FilePart) -> Path:
    """Return the file of the output of a grouped step for the rows of a piece."""
    return directory / f"{step}-{piece.first_row}.arrow"


def item_bits(plan: Plan) -> int:
    """Return the bits of a row id that number the item of an exploded row, 0 where no step explodes."""
    return ITEM_BITS if any(step.explodes for step in plan.operators) else 0


def raise_first(reports: Iterable[PieceReport]) -> None:
    """Raise the first error, in the order of the sources, that ended a piece."""
    # A fault begins with its row id, by which it sorts.
    faults = sorted(report.fault for report in reports if report.fault is not None)
    if faults:
        raise_error(*faults[0][1:])


def merged_bad_input(reports: Sequence[PieceReport]) -> dict[str, Any]:
    """Return the bad input of pieces in their order, in the form of the journal."""
    counts: dict[str, int] = {}
    for report in reports:
        for kind, number in report.bad_input.items():
            counts[kind] = counts.get(kind, 0) + number
    first = [str(fault) for report in reports for fault in report.first]
    return {"counts": dict(sorted(counts.items())), "first": first[:FAULTS_SHOWN]}


_OPENED: dict[str, OpenJob] = {}
"""The job that this process has opened last: tables of ids are large, and tasks of a job follow each other."""


def open_job(job: Job) -> OpenJob:
    """Return the opened `job`."""
    if job.key not in _OPENED:
        _OPENED.clear()
        _OPENED[job.key] = OpenJob(job)
    return _OPENED[job.key]


def map_with_job(
    context: SparkContext, job: Job, items: Sequence[T], function: Callable[[OpenJob, int, T], Iterable[Row]]
) -> RDD[Row]:
    """Return rows: `function` of the opened job, the number of each item, and the item, in a task of its own."""

    def on_item(number: int, item: T) -> Iterable[Row]:
        return function(open_job(job), number, item)

    return map_items(context, items, on_item)


def map_items(context: SparkContext, items: Sequence[T], function: Callable[[int, T], Iterable[Row]]) -> RDD[Row]:
    """Return rows: `function` of each item and its number, in a task of its own."""

    def on_items(numbered: Iterable[tuple[int, T]]) -> Iterator[Row]:
        with executor_errors():
            for number, item in numbered:
                yield from function(number, item)

    # One item a task: Spark balances and repeats them one by one.
    return context.parallelize(list(enumerate(items)), len(items)).mapPartitions(on_items)


def reduce_parts(
    rows: RDD[Row], job: Job, partitions: int, function: Callable[[OpenJob, Any, Iterator[Row]], Iterable[Row]]
) -> RDD[Row]:
    """Return rows: `function` of each key of `rows` and all rows that have it, in the order of their places."""

    def on_sorted(sorted_pairs: Iterable[tuple[Row, Any]]) -> Iterator[Row]:
        with executor_errors():
            ordered = ((*place, part) for place, part in sorted_pairs)
            for key, of_key in groupby(ordered, key=itemgetter(0)):
                yield from function(open_job(job), key, of_key)

    # Spark sorts the rows of a task by key and place, of which `_partition` takes the key alone.
    pairs = rows.map(lambda row: (row[:2], row[2]))
    return pairs.repartitionAndSortWithinPartitions(partitions, _partition).mapPartitions(on_sorted)


class TableStreams:
    """Writes Arrow tables, one stream after another, for tasks that read some of them by `read_table`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = pa.OSFile(str(path), "wb")

    def write(self, table: pa.Table | pa.RecordBatch) -> int:
        """Append a table; return the byte at which it begins."""
        begin: int = self._file.tell()
        with pa.ipc.new_stream(self._file, table.schema) as stream:
            stream.write(table)
        return begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_table(path: Path, begin: int) -> pa.Table:
    """Return the table at byte `begin` of a file of `TableStreams`; its memory is that of the mapped file."""
    with arrow_file(path, is_mapped=True) as file:
        file.seek(begin)
        with pa.ipc.open_stream(file) as stream:
            return stream.read_all()


@contextmanager
def task_file(job: Job, path: Path) -> Iterator[Path]:
    """Yield where the block writes a file that appears at `path` then, whole.

    Each attempt of a task writes a file of its own: one that was given up may still be writing when its successor is
    done.
    """
    context = TaskContext.get()
    number = 0 if context is None else context.taskAttemptId()
    attempt = job.directory.parent / WORK / f"attempt-{job.key}-{number}"
    attempt.mkdir(parents=True, exist_ok=True)
    yield attempt / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whichever attempt ends last: all of them write the same bytes, and readers see one whole file.
    os.replace(attempt / path.name, path)
    remove_tree(attempt, ignore_errors=True)


def _partition(place: Row) -> int:
    """Return a hash that is the same in every process."""
    # Python's own hash of a text differs between processes.
    key = place[0]
    return key if isinstance(key, int) else crc32(str(key).encode())
