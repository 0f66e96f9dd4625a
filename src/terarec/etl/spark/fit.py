# SPDX-License-Identifier: Apache-2.0
"""A fit phase on the cluster: tasks observe their pieces, others merge the partial states, the driver finishes them.

States with a row for each value (vocabularies, sums of groups) are cut by value and go through files, so that no
process holds all values of a large column; small ones are merged in a tree; those of operators that offer neither, by
the driver.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import RDD, SparkContext, StorageLevel

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, TRAIN, Rows
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.split import (
    EmptySplits,
    TimeBounds,
    digit_counts,
    number_at,
    sort_keys,
    time_bounds,
    time_range,
    times_of,
)
from terarec.etl.ops import KeyedStatistic, MergeableStatistic, State
from terarec.etl.ops.states import SpillOptions, Statistic
from terarec.etl.spark.read import FilePart
from terarec.etl.spark.tasks import (
    REPORT,
    Job,
    OpenJob,
    PieceReport,
    Row,
    TableStreams,
    map_with_job,
    raise_first,
    read_table,
    reduce_parts,
    task_file,
)
from terarec.etl.values import PARTITIONS, partition_of
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import Pass, Plan
from terarec.spec import SplitByTime

_FAN_IN = 32
"""Partial states that one task merges; the driver merges what is left of all pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitPhase:
    """One pass over the training rows.

    Attributes:
        steps: Positions of the steps to fit.
        work: Steps to do before them.
        until_row: Row id behind which no row is for training, where it is known.
    """

    steps: tuple[int, ...]
    work: Pass
    until_row: int | None


def fit_steps(
    context: SparkContext, job: Job, pieces: Sequence[FilePart], phase: FitPhase, directory: Path
) -> Mapping[int, State]:
    """Return the states of the steps of a phase.

    Raises:
        FormatError: Bad input, or no row for training.
        StorageError: A state does not fit in memory.
    """
    plan = Workflow.of(job.spec).plan
    statistics = {step: _statistic(plan, step) for step in phase.steps}
    # Rows are cut by the hash of their value modulo PARTITIONS: more parts would be empty.
    parts = min(2 * context.defaultParallelism, PARTITIONS)
    directory.mkdir()
    observed = map_with_job(context, job, pieces, partial(_observe_piece, phase, parts, directory))
    if len(pieces) > _FAN_IN:
        observed = reduce_parts(observed, job, -(-len(pieces) // _FAN_IN), _merge_small)
    # `_merge_small` leaves rows in the order of hashes; states are merged in the order of the sources.
    rows = sorted(observed.collect(), key=itemgetter(1))
    observations: list[_Observed] = [part for key, _, part in rows if key == REPORT]
    # Here and not in the tasks, so that the first fault in the order of the sources is the one that is raised.
    raise_first(piece.report for piece in observations)
    if not any(piece.report.rows[TRAIN] for piece in observations):
        raise FormatError("sources", "got no row for training, expected at least one")
    for key, _, part in rows:
        if key != REPORT:
            statistics[int(key.split("/")[0])].merge(part)
    rests = {step: [rest for piece in observations for rest in piece.rests.get(step, ())] for step in phase.steps}
    for step, of_step in rests.items():
        for rest in of_step:
            _merge_rest(statistics[step], rest)
    tables = [(number, table) for number, piece in enumerate(observations) for table in piece.tables]
    of_parts = [
        [(number, table.step, table.name, begin) for number, table in tables if (begin := int(table.begins[part])) >= 0]
        for part in range(parts)
    ]
    if tables:
        # Every task gets all rests, since values of groups are taken relative to the first number of all rows.
        merge = partial(_merge_tables, rests, directory)
        for number, merged in sorted(map_with_job(context, job, of_parts, merge).collect()):
            for step, name, begin in merged:
                statistic = statistics[step]
                assert isinstance(statistic, KeyedStatistic)
                statistic.merge_rows({name: read_table(_merged_file(directory, number), begin)})
    return {step: statistic.finish() for step, statistic in statistics.items()}


class _Table(NamedTuple):
    """Rows of a partial state in the file of a piece, in parts by value.

    Attributes:
        step: Position of the step.
        name: Name of the table among those of the step.
        begins: int64[parts], the byte at which each part begins; -1 for one without rows.
    """

    step: int
    name: str
    begins: NDArray[np.int64]


class _Observed(NamedTuple):
    """Description of a piece for the driver.

    Attributes:
        report: Its report.
        rests: Step -> what the driver merges itself, in order.
        tables: Tables in its file, in order.
    """

    report: PieceReport
    rests: dict[int, list[Any]]
    tables: list[_Table]


def _observe_piece(
    phase: FitPhase, parts: int, directory: Path, opened: OpenJob, number: int, piece: FilePart
) -> Iterator[Row]:
    """Write the partial states of a piece that are tables; yield the small ones, and the reports for the driver."""
    statistics = {step: _statistic(opened.plan, step) for step in phase.steps}
    observed = _Observed(PieceReport(), {}, [])

    def split(step: int, statistic: KeyedStatistic, partial_state: Any, file: TableStreams) -> None:
        rows, rest = statistic.split(partial_state)
        observed.rests.setdefault(step, []).append(rest)
        for name, table in rows.items():
            begins = np.full(parts, -1, dtype=np.int64)
            for part, of_part in _by_value(table, parts):
                begins[part] = file.write(of_part)
            observed.tables.append(_Table(step, name, begins))

    def observe(read: ReadRows) -> tuple[dict[int, Any], NDArray[np.int64]]:
        def of(rows: Rows) -> dict[int, Any]:
            return opened.pipeline.run(phase.work, rows, read.joined, statistics)[1] if rows.num_rows else {}

        entered = opened.pipeline.preprocess(phase.work, read)
        assert entered.split is not None
        counts = np.bincount(entered.split, minlength=len(SPLIT_NAMES))
        return read.invalid.filter(of, entered.training())[0], counts

    # One file a piece, and not one for each table and part of it.
    with task_file(opened.job, _piece_file(directory, number)) as path, TableStreams(path) as file:
        for partials, counts in opened.map(piece, observed.report, observe, phase.until_row):
            observed.report.rows = observed.report.rows + counts
            for step, of_block in partials.items():
                statistic = statistics[step]
                if isinstance(statistic, MergeableStatistic):
                    statistic.merge(of_block)
                elif not isinstance(statistic, KeyedStatistic):
                    observed.rests.setdefault(step, []).append(of_block)
                # Sums of floats depend on the order: the rows of each block are kept apart, and added row by row later.
                elif statistic.in_order:
                    split(step, statistic, of_block, file)
        for step, statistic in statistics.items():
            if isinstance(statistic, KeyedStatistic) and not statistic.in_order:
                split(step, statistic, None, file)
    for step, statistic in statistics.items():
        if isinstance(statistic, MergeableStatistic):
            yield f"{step}/{number // _FAN_IN}", number, statistic.partial()
    yield REPORT, number, observed


def _merge_small(opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the merged small partial states that share `key`; pass on the states for the driver."""
    if key == REPORT:
        yield from rows
        return
    step, number = map(int, key.split("/"))
    statistic = _statistic(opened.plan, step)
    assert isinstance(statistic, MergeableStatistic)
    for *_, part in rows:
        statistic.merge(part)
    yield key, number, statistic.partial()


def _merge_tables(
    rests: Mapping[int, Sequence[Any]],
    directory: Path,
    opened: OpenJob,
    number: int,
    tables: Sequence[tuple[int, int, str, int]],
) -> Iterator[Row]:
    """Merge the tables of all pieces that hold the values of a part, in the order of the sources.

    The result lies in a file of the part; yields the steps, names and begins of its tables.

    `rests` has the rests of the partial states of each step, in order.
    """
    merged = []
    with task_file(opened.job, _merged_file(directory, number)) as path, TableStreams(path) as file:
        for step, name in dict.fromkeys((step, name) for _, step, name, _ in tables):
            statistic = _statistic(opened.plan, step)
            assert isinstance(statistic, KeyedStatistic)
            for rest in rests[step]:
                statistic.merge_rest(rest)
            for piece, of_step, of_name, begin in tables:
                if (of_step, of_name) == (step, name):
                    statistic.merge_rows({name: read_table(_piece_file(directory, piece), begin)})
            merged.append((step, name, file.write(statistic.reduced(name))))
    yield number, merged


def _piece_file(directory: Path, number: int) -> Path:
    return directory / f"piece-{number}.arrows"


def _merged_file(directory: Path, number: int) -> Path:
    return directory / f"merged-{number}.arrows"


def _by_value(table: pa.Table, parts: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a table in as many parts, by the hash of their values; rows keep their order."""
    part = partition_of(table.column("value").combine_chunks()) % parts
    order = np.argsort(part, kind="stable")
    ends = np.cumsum(np.bincount(part, minlength=parts))
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            yield number, table.take(pa.array(order[start:end]))


def _statistic(plan: Plan, step: int) -> Statistic:
    memory = SpillOptions(directory=Path(tempfile.gettempdir()))  # without a bound nothing is spilled
    return plan.operators[step].statistic(plan.types[step], memory)


def _merge_rest(statistic: Statistic, rest: Any) -> None:
    """Merge states on the driver: the rest of keyed partial states, or states that only the driver can merge."""
    if isinstance(statistic, KeyedStatistic):
        statistic.merge_rest(rest)
    else:
        statistic.merge(rest)


def time_bounds_on_cluster(
    context: SparkContext, job: Job, pieces: Sequence[FilePart], split: SplitByTime, empty_splits: EmptySplits
) -> TimeBounds:
    """Return the times where a split by shares of the rows is cut.

    Raises:
        ConfigError: A split would get no row.
        FormatError: Bad input.
    """
    rows = map_with_job(context, job, pieces, partial(_times, split.column))
    # The bounds are found digit by digit, a job each: without this every job would parse the sources again.
    rows.persist(StorageLevel.DISK_ONLY)
    try:
        raise_first(rows.filter(lambda row: row[0] == REPORT).map(itemgetter(2)).collect())
        times = rows.filter(lambda row: row[0] != REPORT).map(itemgetter(2))
        total = times.map(lambda counted: int(counted[1].sum())).sum()
        dtype = np.dtype(times.first()[2])  # that of all
        return time_bounds(split, total, lambda rank: _time_at(times, rank, dtype), empty_splits)
    finally:
        rows.unpersist()


def time_range_on_cluster(
    context: SparkContext, job: Job, pieces: Sequence[FilePart], column: str
) -> tuple[float, float]:
    """Return the least and the last time of a column; a missing one is before all others and does not count."""
    rows = map_with_job(context, job, pieces, partial(_time_ranges, column)).collect()
    return min(row[0] for row in rows), max(row[1] for row in rows)


def _time_ranges(name: str, opened: OpenJob, number: int, piece: FilePart) -> Iterator[Row]:
    work = opened.plan.row_pass()
    yield from opened.map(
        piece, PieceReport(), lambda read: time_range(opened.pipeline.preprocess(work, read).columns[name])
    )


def _times(name: str, opened: OpenJob, number: int, piece: FilePart) -> Iterator[Row]:
    """Yield the different times of each block with the numbers of their rows and their type, and a report."""
    report, work = PieceReport(), opened.plan.row_pass()
    for times in opened.map(piece, report, lambda read: times_of(opened.pipeline.preprocess(work, read), name)):
        yield "times", number, (*np.unique(sort_keys(times), return_counts=True), times.dtype.name)
    yield REPORT, number, report


_Counted: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int64], str]
"""Keys of times, the rows of each, and the type of the times."""


def _time_at(times: RDD[_Counted], rank: int, dtype: np.dtype[Any]) -> float | int:
    """Return the time with `rank` others before it."""

    def count(digits: int, shift: int) -> NDArray[np.int64]:
        return times.map(partial(_digit_counts, digits, shift)).treeReduce(np.add)

    return number_at(rank, count, dtype)


def _digit_counts(digits: int, shift: int, counted: _Counted) -> NDArray[np.int64]:
    return digit_counts(digits, shift, *counted[:2])
