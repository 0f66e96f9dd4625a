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
from terarec.etl.engine.grouped import outputs_of, rows_to_batch
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.split import hashes
from terarec.etl.ops import Statistic
from terarec.etl.spark.read import Piece
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

_SEED = 0x6772_6F75


def group_on_cluster(context: SparkContext, job: Job, pieces: Sequence[Piece], parts: int, directory: Path) -> None:
    """Write the outputs of all grouped steps for the rows of each piece to `directory`.

    Args:
        context: The application.
        job: Description of the run.
        pieces: All rows.
        parts: Number of parts that the groups of a step are hashed to; a task holds one of them.
        directory: New directory that every executor sees.

    Raises:
        FormatError: Bad input.
        StorageError: The disk is full.
    """
    directory.mkdir()
    inputs = map_with_job(context, job, pieces, partial(_scatter, parts))
    first_rows = tuple(piece.first_row << item_bits(Workflow.of(job.spec).plan) for piece in pieces)
    outputs = reduce_parts(inputs, job, parts, partial(_transform, first_rows))
    reduce_parts(outputs, job, parts, partial(_write, directory, tuple(pieces))).count()


class _Inputs:
    """Takes the rows right before a grouped step, where a statistic would observe them."""

    def __init__(self, names: Sequence[str], group: str) -> None:
        self._names = names
        self._group = group

    def observe(self, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """Return the columns that the step reads, and the hash of the group of each row."""
        # Without splits, which no grouped step reads.
        return Rows(rows.select(self._names).columns, rows.ids), hashes(rows.columns[self._group], _SEED)


def _scatter(parts: int, opened: OpenJob, number: int, piece: Piece) -> Iterator[Row]:
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
    for place, found in enumerate(opened.map(piece, report, observe), number << BLOCK_BITS):
        for step, (rows, group) in found.items():
            part = group % parts
            for name in np.unique(part).tolist():
                yield f"{step}/{name}", place, rows.take(np.flatnonzero(part == name))
    yield REPORT, number, report


def _transform(first_rows: tuple[int, ...], opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the outputs of a grouped step for all rows of some groups, piece by piece."""
    if key == REPORT:
        raise_first(found for *_, found in rows)
        return
    step, part = map(int, key.split("/"))
    # Shuffled rows come by piece and block, so concatenated they are by rising row id, as grouped steps take them.
    outputs = outputs_of(opened.plan.operators[step], step, concatenate_rows([found for *_, found in rows]))
    ends = np.searchsorted(outputs.ids, [*first_rows[1:], np.iinfo(np.int64).max])
    for piece, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if stop > start:
            yield f"{step}/{piece}", part, outputs.take(np.arange(start, stop))


def _write(directory: Path, pieces: tuple[Piece, ...], opened: OpenJob, key: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Write the outputs of a step for a piece; a task that runs again writes the same."""
    step, number = map(int, key.split("/"))
    of_piece = concatenate_rows([found for *_, found in rows])
    batch = rows_to_batch(of_piece.take(np.argsort(of_piece.ids)))
    with (
        task_file(opened.job, grouped_file(directory, step, pieces[number])) as path,
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    yield key, number, batch.num_rows
