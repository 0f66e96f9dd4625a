"""A fit phase on the cluster: tasks observe their pieces, shuffles merge the partial states, the driver finishes them.

States with a row for each value (vocabularies, sums of groups) are shuffled by value, so that no process holds all
values of a large column; small ones are merged in a tree; those of operators that offer neither, by the driver.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import RDD, SparkContext, StorageLevel

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, TRAIN, Block
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.split import TimeBounds, check_shares, share_counts, times_of
from terarec.etl.ops import KeyedStatistic, MergeableStatistic, SpillOptions, State, Statistic
from terarec.etl.spark.read import Piece
from terarec.etl.spark.tasks import (
    BLOCK_BITS,
    REPORT,
    Job,
    OpenJob,
    PieceReport,
    Row,
    map_pieces,
    raise_first,
    reduce_parts,
)
from terarec.etl.value_counts import PARTITIONS, partition_of
from terarec.etl.workflow import Pass, Plan, Workflow
from terarec.spec import SplitByTime

_FAN_IN = 32
"""Partial states that one task merges; the driver merges what is left of all pieces."""
_KEY_BITS, _DIGIT_BITS = 64, 16
_SIGN = np.uint64(1 << 63)


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


def fit_steps(context: SparkContext, job: Job, pieces: Sequence[Piece], phase: FitPhase) -> Mapping[int, State]:
    """Return the states of the steps of a phase.

    Raises:
        FormatError: Bad input, or no row for training.
        StorageError: A state does not fit in memory.
    """
    plan = Workflow.of(job.spec).plan
    statistics = {step: _statistic(plan, step) for step in phase.steps}
    parts = min(2 * context.defaultParallelism, PARTITIONS)
    observed = map_pieces(context, job, pieces, partial(_observe_piece, phase, parts))
    observed.persist(StorageLevel.DISK_ONLY)
    try:
        found = sorted(observed.filter(lambda row: row[0] == REPORT).collect(), key=itemgetter(1))
        raise_first(report for *_, (report, _) in found)
        if not any(report.rows[TRAIN] for *_, (report, _) in found):
            raise FormatError("the sources hold no row for training, expected at least one")
        rests: dict[int, list[Any]] = {step: [] for step in phase.steps}
        for *_, (_, of_piece) in found:
            for step, of_step in of_piece.items():
                rests[step] += of_step
        partials = observed.filter(lambda row: row[0] != REPORT)
        merged = reduce_parts(partials, job, 2 * parts, partial(_merge_parts, rests)).collect()
    finally:
        observed.unpersist()
    for step, of_step in rests.items():
        for rest in of_step:
            _merge_rest(statistics[step], rest)
    for key, _, part in sorted(merged, key=itemgetter(1)):
        step, _, name = key.split("/", 2)
        statistic = statistics[int(step)]
        if isinstance(statistic, KeyedStatistic):
            statistic.merge_rows({name: part})
        else:
            statistic.merge(part)
    return {step: statistic.finish() for step, statistic in statistics.items()}


def _observe_piece(phase: FitPhase, parts: int, opened: OpenJob, number: int, piece: Piece) -> Iterator[Row]:
    """Yield the partial states of a piece, and its report."""
    statistics = {step: _statistic(opened.plan, step) for step in phase.steps}
    rests: dict[int, list[Any]] = {}
    report, places = PieceReport(), iter(range(number << BLOCK_BITS, (number + 1) << BLOCK_BITS))

    def split(step: int, statistic: KeyedStatistic, found: Any) -> Iterator[Row]:
        rows, rest = statistic.split(found)
        rests.setdefault(step, []).append(rest)
        place = next(places)
        for name, table in rows.items():
            for part, of_part in _by_value(table, parts):
                yield f"{step}/{part}/{name}", place, of_part

    def observe(rows: ReadRows) -> tuple[dict[int, Any], NDArray[np.int64]]:
        def of(block: Block) -> dict[int, Any]:
            return opened.pipeline.run(phase.work, block, rows.joined, statistics)[1] if block.num_rows else {}

        entered = opened.pipeline.preprocess(phase.work, rows)
        assert entered.split is not None
        counts = np.bincount(entered.split, minlength=len(SPLIT_NAMES))
        return rows.invalid.filter(of, entered.training())[0], counts

    for partials, counts in opened.map(piece, report, observe, phase.until_row):
        report.rows = report.rows + counts
        for step, found in partials.items():
            statistic = statistics[step]
            if isinstance(statistic, MergeableStatistic):
                statistic.merge(found)
            elif not isinstance(statistic, KeyedStatistic):
                rests.setdefault(step, []).append(found)
            elif statistic.in_order:
                yield from split(step, statistic, found)
    for step, statistic in statistics.items():
        if isinstance(statistic, MergeableStatistic):
            yield f"{step}/{number // _FAN_IN}/", number, statistic.partial()
        elif isinstance(statistic, KeyedStatistic) and not statistic.in_order:
            yield from split(step, statistic, None)
    yield REPORT, number, (report, rests)


def _merge_parts(rests: Mapping[int, Sequence[Any]], opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield what the partial states that share `key` come to, in the order of the sources."""
    step, number, name = key.split("/", 2)
    statistic = _statistic(opened.plan, int(step))
    if isinstance(statistic, MergeableStatistic):
        for *_, part in rows:
            statistic.merge(part)
        yield key, int(number), statistic.partial()
        return
    assert isinstance(statistic, KeyedStatistic)
    for rest in rests[int(step)]:
        statistic.merge_rest(rest)
    for *_, part in rows:
        statistic.merge_rows({name: part})
    yield key, int(number), statistic.reduced(name)


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
    """Add what the driver merges itself: the rest of keyed partial states, or those that only it can merge."""
    if isinstance(statistic, KeyedStatistic):
        statistic.merge_rest(rest)
    else:
        statistic.merge(rest)


def time_bounds(context: SparkContext, job: Job, pieces: Sequence[Piece], split: SplitByTime) -> TimeBounds:
    """Return the times where a split by shares of the rows is cut.

    Raises:
        ConfigError: No row would be left for training.
        FormatError: Bad input.
    """
    rows = map_pieces(context, job, pieces, partial(_times, split.column))
    rows.persist(StorageLevel.DISK_ONLY)
    try:
        raise_first(rows.filter(lambda row: row[0] == REPORT).map(itemgetter(2)).collect())
        times = rows.filter(lambda row: row[0] != REPORT).map(itemgetter(2))
        total = times.map(lambda counted: int(counted[1].sum())).sum()
        valid, test = share_counts(total, split.valid, split.test)
        training = total - valid - test
        check_shares(training, total)
        return TimeBounds(
            valid_after=_time_at(times, training - 1),
            test_after=_time_at(times, training + valid - 1) if test else float("inf"),
        )
    finally:
        rows.unpersist()


def _times(name: str, opened: OpenJob, number: int, piece: Piece) -> Iterator[Row]:
    """Yield the different times of each block with the numbers of their rows, and a report."""
    report, work = PieceReport(), opened.plan.row_pass()
    for times in opened.map(piece, report, lambda rows: times_of(opened.pipeline.preprocess(work, rows).columns[name])):
        yield "times", number, np.unique(_ordered(times), return_counts=True)
    yield REPORT, number, report


def _ordered(times: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return unsigned integers in the order of the times: the sign bit is turned, of negative ones all others, too."""
    bits = (times + 0.0).view(np.uint64)  # one zero instead of two
    return np.where(bits & _SIGN != 0, ~bits, bits | _SIGN)


def _time_at(times: RDD[tuple[NDArray[np.uint64], NDArray[np.int64]]], rank: int) -> float:
    """Return the time with `rank` others before it, digit by digit from the highest."""
    found = 0
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = times.map(partial(_digit_counts, found, shift)).treeReduce(np.add)
        digit = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        rank -= int(counts[:digit].sum())
        found |= digit << shift
    key = np.array([found], dtype=np.uint64)
    return float(np.where(key & _SIGN != 0, key & ~_SIGN, ~key).view(np.float64)[0])


def _digit_counts(found: int, shift: int, counted: tuple[NDArray[np.uint64], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many rows with the digits `found` above have each next digit."""
    keys, rows = counted
    if shift + _DIGIT_BITS < _KEY_BITS:
        above = np.uint64(shift + _DIGIT_BITS)
        same = keys >> above == np.uint64(found) >> above
        keys, rows = keys[same], rows[same]
    digits = keys >> np.uint64(shift) & np.uint64((1 << _DIGIT_BITS) - 1)
    return np.bincount(digits.astype(np.int64), rows, 1 << _DIGIT_BITS).astype(np.int64)
