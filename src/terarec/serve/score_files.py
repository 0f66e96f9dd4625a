# SPDX-License-Identifier: Apache-2.0
"""Scores of raw files: every row is processed as a served record, and labels may be absent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from terarec.errors import ConfigError
from terarec.etl.engine.phases import Progress
from terarec.etl.engine.score import EncodedBlock, EncodedFiles
from terarec.etl.source.source import Sources
from terarec.formats.table_file import check_suffix, table_file
from terarec.io.files import check_new_file
from terarec.serve.session import InferenceSession, PinnedWeights
from terarec.spec import PrepareOptions
from terarec.spec.checks import FieldError

ROW, ITEM = "row", "item"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreReport:
    """Results of `score_files`.

    Attributes:
        step: Training step of the checkpoint.
        rows: Scores.
        seconds: Wall-clock time, reading and writing included.
        samples_per_second: Rows / seconds.
        bad_input: Kind -> how often it was found in the files.
        first_bad_input: The first findings, each in one line with file and line.
    """

    step: int
    rows: int
    seconds: float
    samples_per_second: float
    bad_input: Mapping[str, int]
    first_bad_input: tuple[str, ...]


def score_files(
    session: InferenceSession,
    sources: Sources,
    out: Path,
    *,
    keep: Sequence[str] = (),
    options: PrepareOptions | None = None,
    replace: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ScoreReport:
    """Score the rows of raw files and write `out` atomically. A few blocks of rows are in memory at a time.

    `out` has a line for each row in order: ``row``, its position among all rows from 0; ``item``, its position in the
    list, where the workflow cuts lists into rows; the columns of `keep`; and the probability of each label as float32,
    named ``score`` if there is one label and else ``score_<label>``.

    All rows are scored with one state of the weights; updates of the session wait for the end.

    Args:
        session: Session of the run.
        sources: Files, directories, patterns or URLs, in any format of the workflow's source; or a table in memory, as
            `terarec.etl.prepare` takes them. The columns that labels
            alone are made of may be there, empty or absent.
        out: A file whose name ends in .parquet, .csv or .jsonl.
        keep: Raw columns to write next to the scores, as the workflow reads them.
        options: Threads, memory, and what to do with bad input, whose rows "skip" leaves out.
        replace: Whether a file at `out` is replaced.
        progress: Callback after every block.

    Raises:
        ConfigError: `out` is there or its name has another end; a file lacks a column; a name of `keep` is unknown.
        DataNotFoundError: A source does not exist.
        FormatError: A damaged source, or bad input under the policy "raise", with file and line.
        StorageError: The disk is full.
    """
    # Both checks come before the first row is scored, which may be hours before the file is written.
    check_new_file(out, replace=replace)
    check_suffix(out)
    begun = time.perf_counter()
    with session.pinned() as weights:  # also of a session that follows a run: the file is of one state
        files = EncodedFiles(weights.workflow, sources, keep=keep, options=options, progress=progress)
        names = (ROW, *((ITEM,) if files.explodes else ()), *keep, *session.score_names)
        for name in names:
            if names.count(name) > 1:
                raise FieldError(
                    "", "keep", f"got {name!r}, expected other columns than {', '.join(dict.fromkeys(names))}"
                )
        rows = 0
        tables = _tables(weights, session.run.training.batch_size, files, names)
        # Its types are those of the file, which is not begun where there is no row.
        first = next(tables, None)
        if first is None:
            raise ConfigError("files", "got no row that can be scored, expected at least one")
        with table_file(out, first.schema, replace=replace) as file:
            for table in _chain(first, tables):
                file.write_table(table)
                rows += table.num_rows
    seconds = time.perf_counter() - begun
    bad_input = files.bad_input
    return ScoreReport(
        step=weights.step,
        rows=rows,
        seconds=seconds,
        samples_per_second=rows / seconds,
        bad_input=dict(bad_input.counts),
        first_bad_input=tuple(map(str, bad_input.first)),
    )


def _tables(weights: PinnedWeights, batch: int, files: EncodedFiles, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield rows of the file to write, which has columns of these names."""
    # Blocks of the reader are larger than the batches that the model was sized for.
    for block in files.blocks():
        for begin in range(0, len(block.rows), batch):
            part = block.slice(begin, min(begin + batch, len(block.rows)))
            scores = weights.score(part.records)
            yield pa.table([*_kept(part), *(pa.array(column) for column in scores.T)], names)


def _kept(block: EncodedBlock) -> list[pa.Array]:
    items = [] if block.items is None else [pa.array(block.items)]
    return [pa.array(block.rows), *items, *block.kept.values()]


def _chain(first: pa.Table, others: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield from others
