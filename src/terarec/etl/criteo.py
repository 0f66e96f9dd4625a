"""Criteo's click logs -> a data set: learn the ids on the training part, then encode and write every row.

The text is parsed twice, which is cheaper than a cache of what the first pass parsed. Threads work on blocks of lines;
counts do not depend on the order of the blocks, and encoded blocks are written in the order of the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.criteo_columns import CriteoCounts, LearntColumns
from terarec.etl.generated import read_best_auc
from terarec.etl.in_order import available_threads, map_in_order
from terarec.etl.prepare_report import PrepareReport
from terarec.etl.split_writer import SplitWriter
from terarec.etl.text_blocks import TextBlock, check_sources, read_blocks
from terarec.formats import new_directory, write_dataset
from terarec.kernels import memory
from terarec.kernels.encoding_types import CATEGORY_NAMES, NUM_INTEGERS, LineFaultError
from terarec.spec import DatasetSpec, FieldError, checks

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with (bytes of the sources read, bytes to read in all passes)."""

DEFAULT_VALID_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class CriteoOptions:
    """How Criteo's logs are prepared.

    Attributes:
        min_count: categories that occur less often in the training part share the id of rare values.
        storage: "parquet" or "raw" shards.
        valid_fraction: share of the rows, the last ones, that becomes the valid split; 0 for none. None takes 0.1, or
            the last file where there are several.
        valid_last_day: the last file becomes the valid split.
        rows_per_shard: most rows of a shard; a row of a Parquet shard takes about 50 bytes.
        threads: that parse and encode; None takes as many as there are cores. One more reads, one more writes.
    """

    min_count: int = 15
    storage: Literal["parquet", "raw"] = "parquet"
    valid_fraction: float | None = None
    valid_last_day: bool = False
    rows_per_shard: int = 1 << 21
    threads: int | None = None

    def __post_init__(self) -> None:
        checks.positive_int(self, "min_count")
        checks.one_of(self, "storage", ("parquet", "raw"))
        checks.positive_int(self, "rows_per_shard")
        if self.valid_fraction is not None:
            checks.finite_float(self, "valid_fraction", low=0.0, high=1.0)
            if self.valid_fraction == 1:
                checks.fail(self, "valid_fraction", "less than 1: the training part must not be empty")
            if self.valid_last_day:
                checks.fail(self, "valid_fraction", "nothing together with valid_last_day (--valid-last-day)")
        if self.threads is not None:
            checks.positive_int(self, "threads")


def prepare(
    sources: Sequence[Path], out: Path, options: CriteoOptions, progress: Progress | None = None
) -> PrepareReport:
    r"""Prepare logs of lines ``label \t 13 integers \t 26 hexadecimal categories``; empty fields are missing values.

    Args:
        sources: files, plain or gzip, in the order of time.
        out: directory to make, with ``dataset.json``, ``train/``, ``valid/`` and ``vocabularies/``; it must not
            exist, or be empty. It appears when all is written.
        options: see there.
        progress: see `Progress`.

    Raises:
        ConfigError: options that do not fit the sources, or `out` holds something.
        DataNotFoundError: a source does not exist.
        FormatError: a source is empty or damaged, or a line is not in the layout (file, line, column, value).
        StorageError: the disk is full.
    """
    started = time.perf_counter()
    sources = [Path(path) for path in sources]
    input_bytes = check_sources(sources)
    best_auc = read_best_auc(sources)
    log = _Log(sources, _by_day(options, len(sources)), options.threads or available_threads(), input_bytes, progress)
    with new_directory(out) as partial:
        total_rows = None if log.by_day else sum(log.stream(lambda block: block.num_rows, sources))
        learnt, train_rows = _learn(log, _train_rows(options, total_rows), options.min_count)
        for name, vocabulary in zip(CATEGORY_NAMES, learnt.vocabularies, strict=True):
            vocabulary.save(partial / "vocabularies" / f"{name}.parquet")
        spec = _write(log, learnt, train_rows, learnt.describe(options.storage, best_auc), partial, options)
        write_dataset(spec, partial, location=out)
        if check_sources(sources) != input_bytes:
            raise FormatError(f"{sources[0].parent}: the sources changed while they were read")
    rows = sum(spec.num_rows(split) for split in spec.splits)
    seconds = time.perf_counter() - started
    return PrepareReport(
        rows=rows,
        train_rows=train_rows,
        valid_rows=rows - train_rows,
        input_bytes=input_bytes,
        seconds=seconds,
        rows_per_second=rows / seconds,
        peak_memory_bytes=memory.peak_bytes(),
        best_auc=best_auc,
        columns=learnt.report(),
    )


class _Log:
    """The sources, read in several passes that report their progress together."""

    def __init__(
        self, sources: Sequence[Path], by_day: bool, threads: int, input_bytes: int, progress: Progress | None
    ) -> None:
        self.sources = sources
        self.by_day = by_day
        self._threads = threads
        self._input_bytes = input_bytes
        self._progress = progress
        self._passes_begun = 0

    def stream(self, function: Callable[[TextBlock], Result], sources: Sequence[Path]) -> Generator[Result]:
        """`function` of every block, in order; a fault in a line is told with its file and line."""

        def work(block: TextBlock) -> tuple[Result, int]:
            try:
                return function(block), block.read_bytes
            except LineFaultError as fault:
                line = block.first_line + fault.row + 1
                raise FormatError(f"{block.path}: line {line}: {fault.reason}") from None

        done = self._passes_begun * self._input_bytes
        self._passes_begun += 1
        total = (2 if self.by_day else 3) * self._input_bytes
        with closing(map_in_order(work, read_blocks(sources), self._threads)) as results:
            for result, read_bytes in results:
                done += read_bytes
                if self._progress is not None:
                    self._progress(done, total)
                yield result


def _by_day(options: CriteoOptions, num_sources: int) -> bool:
    if options.valid_last_day and num_sources < 2:
        raise FieldError("", "valid_last_day", "got one source, expected at least two, the last being the valid split")
    return options.valid_last_day or (options.valid_fraction is None and num_sources > 1)


def _train_rows(options: CriteoOptions, total_rows: int | None) -> int | None:
    """Rows of the train split; None for all rows of all files but the last."""
    if total_rows is None:
        return None
    fraction = DEFAULT_VALID_FRACTION if options.valid_fraction is None else options.valid_fraction
    if fraction == 0:
        return total_rows
    if total_rows == 1:
        raise FieldError("", "valid_fraction", f"got {fraction} for one row, expected 0 or at least two rows")
    return total_rows - min(max(round(total_rows * fraction), 1), total_rows - 1)


def _learn(log: _Log, train_rows: int | None, min_count: int) -> tuple[LearntColumns, int]:
    """What the training part teaches, and its rows."""
    counts = CriteoCounts()
    minima = np.full(NUM_INTEGERS, np.iinfo(np.int32).max, dtype=np.int32)
    learnt_rows = 0

    def learn(block: TextBlock) -> tuple[NDArray[np.int32] | None, int]:
        rows = block.num_rows if train_rows is None else min(block.num_rows, train_rows - block.first_row)
        return (counts.learn(block.text, rows), rows) if rows > 0 else (None, 0)

    with closing(log.stream(learn, log.sources[:-1] if log.by_day else log.sources)) as learnt:
        for block_minima, rows in learnt:
            if block_minima is None:
                break
            np.minimum(minima, block_minima, out=minima)
            learnt_rows += rows
    return LearntColumns.finish(counts, minima.tolist(), min_count), learnt_rows


def _write(
    log: _Log, learnt: LearntColumns, train_rows: int, spec: DatasetSpec, partial: Path, options: CriteoOptions
) -> DatasetSpec:
    """Encode and write all rows; returns `spec` with its shards."""
    with (
        SplitWriter(partial, spec, train_rows=train_rows, rows_per_shard=options.rows_per_shard) as writer,
        closing(log.stream(lambda block: learnt.encode(block.text), log.sources)) as blocks,
    ):
        for block in blocks:
            writer.write(block)
        return writer.close()
