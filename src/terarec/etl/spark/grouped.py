# SPDX-License-Identifier: Apache-2.0
"""Grouped steps on the cluster: rows are shuffled by their groups, and the outputs back to the pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import SparkContext

from terarec.etl.columns import Rows, concatenate_rows
from terarec.etl.engine.grouped import (
    EarlierOptions,
    LateRows,
    outputs_of,
    rows_from_table,
    rows_to_batch,
)
from terarec.etl.engine.left_out import listed_rows, map_list, write_listed
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.split import hashes
from terarec.etl.ops.states import Statistic
from terarec.etl.source.blocks import SourceFile
from terarec.etl.spark.read import FilePart
from terarec.etl.spark.tasks import (
    BLOCK_BITS,
    REPORT,
    Job,
    OpenJob,
    PieceReport,
    Row,
    grouped_file,
    item_bits,
    map_with_job,
    raise_first,
    reduce_parts,
    task_file,
)
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.earlier_rows import GROUP_ROWS, EarlierRows, earlier_file, write_earlier_rows
from terarec.io.opening import arrow_file
from terarec.spec import LeaveOneOut

_SEED = 0x6772_6F75


_OUTPUT, _KEPT, _LATE = "output", "kept", "late"
"""What a task passes on: outputs of a step, rows that it keeps for later files, and the number of late rows."""


def group_on_cluster(
    context: SparkContext, job: Job, pieces: Sequence[FilePart], parts: int, directory: Path, earlier: EarlierOptions
) -> int:
    """Write the outputs of all grouped steps for the rows of each piece to `directory`.

    The groups of a step are hashed to `parts`, of which a task holds one. Every executor sees `directory` and
    `earlier`.

    Returns:
        The number of late rows, which are allowed.
    """
    directory.mkdir()
    plan = Workflow.of(job.spec).plan
    inputs = map_with_job(context, job, pieces, partial(_scatter, parts))
    if earlier.rows is not None:
        earlier_rows = earlier.rows
        blocks = [(step, number) for step in plan.grouped_steps for number in range(earlier_rows.num_blocks(step))]
        earlier_parts = map_with_job(context, job, blocks, partial(_scatter_earlier, parts, earlier_rows.directory))
        inputs = inputs.union(earlier_parts) if blocks else inputs
    first_rows = tuple(piece.first_row << item_bits(plan) for piece in pieces)
    outputs = reduce_parts(inputs, job, parts, partial(_transform, first_rows))
    written = reduce_parts(outputs, job, parts, partial(_write, directory, tuple(pieces))).collect()
    found_late = {step: late for (kind, step, _), _, late in written if kind == _LATE}
    for step, late in sorted(found_late.items()):
        if earlier.late_rows == "raise":
            late.check(plan, step, partial(_place_of, job.files, pieces), item_bits(plan))
    for step in plan.grouped_steps:
        if earlier.out is not None and plan.operators[step].carries_rows:
            sources = [number for (kind, at, number), _, _ in written if (kind, at) == (_KEPT, step)]
            kept = (_read(_kept_file(directory, step, source)) for source in sorted(sources))
            write_earlier_rows(earlier_file(earlier.out, step), plan, step, kept)
    return max((late.count for late in found_late.values()), default=0)


def _place_of(files: Sequence[SourceFile], pieces: Sequence[FilePart], row: int) -> str:
    """Return the file of a row, and its number there: only a task that reads the file knows its line."""
    file = next(piece.file for piece in reversed(pieces) if piece.first_row <= row)
    first = min(piece.first_row for piece in pieces if piece.file == file)
    return f"{files[file].path}: row {row - first + 1:,}"


def list_on_cluster(
    context: SparkContext,
    job: Job,
    pieces: Sequence[FilePart],
    split: LeaveOneOut,
    parts: int,
    directory: Path,
    path: Path,
) -> None:
    """Write the list of `terarec.etl.engine.left_out` for the split of all users.

    Users are hashed to `parts`, of which a task holds one. Every executor sees `directory`.
    """
    directory.mkdir()
    users = map_with_job(context, job, pieces, partial(_scatter_users, split, parts))
    reduce_parts(users, job, parts, partial(_list_users, split, directory)).count()
    write_listed(path, map(map_list, sorted(directory.iterdir())))


def _scatter_users(split: LeaveOneOut, parts: int, opened: OpenJob, number: int, piece: FilePart) -> Iterator[Row]:
    """Yield what the split reads in parts by user."""
    report, work = PieceReport(), opened.plan.row_pass()
    inputs = _Inputs((split.column, split.order), split.column)

    def observe(read: ReadRows) -> tuple[Rows, NDArray[np.int64]]:
        return inputs.observe(opened.pipeline.preprocess(work, read))

    for place, (rows, user) in enumerate(opened.map(piece, report, observe), number << BLOCK_BITS):
        for part, of_part in _by_part(rows, user % parts):
            yield str(part), place, of_part
    yield REPORT, number, report


def _list_users(split: LeaveOneOut, directory: Path, opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Write the list of some users; a task that runs again writes the same."""
    parts = [part for *_, part in rows]
    if key == REPORT:
        raise_first(parts)
        return
    listed = listed_rows(split, concatenate_rows(parts))
    if len(listed):
        with task_file(opened.job, directory / key) as path:
            path.write_bytes(listed.tobytes())
    yield key, 0, None


class _Inputs:
    """Takes the rows right before a grouped step, where a statistic would observe them."""

    def __init__(self, names: Sequence[str], group: str) -> None:
        self._names = names
        self._group = group

    def observe(self, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """Return the columns that the step reads, and the hash of the group of each row."""
        # Without splits, which no grouped step reads.
        return dataclasses.replace(rows.select(self._names), split=None), hashes(rows.columns[self._group], _SEED)


def _scatter(parts: int, opened: OpenJob, number: int, piece: FilePart) -> Iterator[Row]:
    """Yield the inputs of the grouped steps in parts by group."""
    plan, work = opened.plan, opened.plan.grouped_pass()
    observing = dataclasses.replace(work, observes=plan.grouped_steps)
    inputs = {
        step: _Inputs(plan.operators[step].reads, cast(Any, plan.operators[step]).group) for step in plan.grouped_steps
    }

    def observe(read: ReadRows) -> Mapping[int, tuple[Rows, NDArray[np.int64]]]:
        rows = opened.pipeline.preprocess(work, read)
        observers = cast(Mapping[int, Statistic], inputs)
        return opened.pipeline.run(observing, rows, None, observers)[1]

    report = PieceReport()
    for place, result in enumerate(opened.map(piece, report, observe), number << BLOCK_BITS):
        for step, (rows, group) in result.items():
            for part, of_part in _by_part(rows, group % parts):
                yield f"{step}/{part}", place, of_part
    yield REPORT, number, report


def _by_part(rows: Rows, parts: NDArray[np.int64]) -> Iterator[tuple[int, Rows]]:
    """Yield the rows of each of `parts`, int64[n]."""
    for part in np.unique(parts).tolist():
        yield part, rows.take(np.flatnonzero(parts == part))


def _scatter_earlier(
    parts: int, directory: Path, opened: OpenJob, number: int, block: tuple[int, int]
) -> Iterator[Row]:
    """Yield earlier rows of a step in parts by group, at places before those of all pieces."""
    step, position = block
    earlier = EarlierRows(directory, opened.plan)
    operator: Any = opened.plan.operators[step]
    rows, group = _Inputs(operator.reads, operator.group).observe(earlier.block(step, position))
    for part, of_part in _by_part(rows, group % parts):
        yield f"{step}/{part}", position - earlier.num_blocks(step), of_part


def _transform(first_rows: tuple[int, ...], opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the outputs of a grouped step for all rows of some groups, and the rows to keep, piece by piece."""
    if key == REPORT:
        raise_first(rows_of_part for *_, rows_of_part in rows)
        return
    step, part = map(int, key.split("/"))
    operator = opened.plan.operators[step]
    # Shuffled rows come by piece and block, so concatenated they are by rising row id, as grouped steps take them.
    every = concatenate_rows([rows_of_part for *_, rows_of_part in rows])
    late = LateRows.of(operator, every)
    if late.count:
        yield (_LATE, step, 0), part, late
    for piece, outputs in _by_piece(first_rows, outputs_of(opened.plan, step, every)):
        yield (_OUTPUT, step, piece), part, outputs
    if operator.carries_rows:
        for piece, outputs in _by_piece(first_rows, every.take(operator.carried_rows(every))):
            yield (_KEPT, step, piece), part, outputs


def _by_piece(first_rows: tuple[int, ...], rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the rows of each piece, and before them the earlier rows of each block, with rising numbers."""
    before = int(np.searchsorted(rows.ids, 0))
    blocks, firsts = np.unique(rows.ids[:before] // GROUP_ROWS, return_index=True)
    starts = [*firsts.tolist(), *(before + np.searchsorted(rows.ids[before:], [0, *first_rows[1:]])).tolist()]
    numbers = [*blocks.tolist(), *range(len(first_rows))]
    for number, start, stop in zip(numbers, starts, [*starts[1:], rows.num_rows], strict=True):
        if stop > start:
            yield number, rows.take(np.arange(start, stop))


def _write(
    directory: Path, pieces: tuple[FilePart, ...], opened: OpenJob, key: tuple[str, int, int], rows: Iterator[Row]
) -> Iterator[Row]:
    """Write the outputs of a step for a piece; a task that runs again writes the same."""
    kind, step, number = key
    if kind == _LATE:
        yield key, 0, sum((late for *_, late in rows), LateRows())
        return
    path = grouped_file(directory, step, pieces[number]) if kind == _OUTPUT else _kept_file(directory, step, number)
    of_piece = concatenate_rows([part for *_, part in rows])
    batch = rows_to_batch(of_piece.take(np.argsort(of_piece.ids)))
    with (
        task_file(opened.job, path) as partial_path,
        pa.OSFile(str(partial_path), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    yield key, number, batch.num_rows


def _kept_file(directory: Path, step: int, number: int) -> Path:
    """Return the file of the rows of a piece, or of a block of earlier rows, that a step keeps."""
    return directory / f"kept-{step}-{number}.arrow"


def _read(path: Path) -> Rows:
    with arrow_file(path, is_mapped=True) as file:
        return rows_from_table(pa.ipc.open_file(file).read_all())
