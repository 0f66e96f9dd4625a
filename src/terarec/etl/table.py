"""Any CSV -> a data set: learn the encoders on the training part, then encode and write every row."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.errors import FormatError
from terarec.etl.csv_columns import CsvColumns, CsvLearner, encode_rows
from terarec.etl.csv_options import CsvOptions
from terarec.etl.csv_source import CsvBlock, read_csv
from terarec.etl.encoders import Encoders
from terarec.etl.prepare_report import PrepareReport
from terarec.etl.text_blocks import check_sources
from terarec.formats import create_shard, new_directory, shard_path, write_dataset
from terarec.kernels import memory
from terarec.spec import ShardSpec, VocabularyEncoder

Progress = Callable[[int, int], None]


def prepare_csv(
    sources: Sequence[Path], out: Path, options: CsvOptions, progress: Progress | None = None
) -> PrepareReport:
    """Make a data set of CSV files. The files are read three times: to count, to learn and to write.

    Memory is bounded by the distinct values of the categorical columns, whatever the number of rows.

    Args:
        sources: files of the training part, in order; plain or compressed.
        out: directory of the data set to make; must not exist, or be empty.
        options: columns, encodings and splits.
        progress: called with (rows done, rows to do); the training part's rows count twice.

    Raises:
        ConfigError: a column that a file has not, a label without positives, or `out` holds something.
        DataNotFoundError: a source does not exist.
        FormatError: a field of the wrong kind or a row of another number of fields, with file, row and column.
        StorageError: the disk is full.
    """
    started = time.perf_counter()
    input_bytes = check_sources([*sources, *options.valid, *options.test])
    splits = _plan(sources, options)
    rows = sum(split.rows for split in splits)
    ticker = _Ticker(rows + splits[0].rows, progress)
    with new_directory(out) as directory:
        columns = _learn(splits[0], options, options.name or out.resolve().name, ticker)
        _write_vocabularies(columns, directory)
        encoders = Encoders(columns.spec, columns.vocabularies)
        shards = {split.name: (_write(split, options, encoders, directory, ticker),) for split in splits}
        write_dataset(dataclasses.replace(columns.spec, splits=shards), directory, location=out)
    seconds = time.perf_counter() - started
    by_name = {split.name: split.rows for split in splits}
    return PrepareReport(
        rows=rows,
        train_rows=by_name["train"],
        valid_rows=by_name.get("valid", 0),
        test_rows=by_name.get("test", 0),
        input_bytes=input_bytes,
        seconds=seconds,
        rows_per_second=rows / seconds,
        peak_memory_bytes=memory.peak_bytes(),
        best_auc=None,
        columns=columns.reports,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """The rows ``first <= i < first + rows`` of `files` taken together."""

    name: str
    files: tuple[Path, ...]
    first: int
    rows: int

    def blocks(self, options: CsvOptions) -> Iterator[CsvBlock]:
        start = 0
        for path in self.files:
            for block in read_csv(path, options.layout, options.raw_names):
                stop = start + block.num_rows
                low, high = max(start, self.first), min(stop, self.first + self.rows)
                if low < high:
                    yield block.rows(low - start, high - start)
                start = stop
                if start >= self.first + self.rows:
                    return


class _Ticker:
    """Adds the rows of finished blocks up for a progress bar."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, rows: int) -> None:
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, self._total)


def _plan(sources: Sequence[Path], options: CsvOptions) -> list[_Split]:
    """The splits that are asked for, the training part first."""
    files = tuple(sources)
    rows = _count_rows(files, options)
    valid_rows = round(rows * options.valid_fraction)
    splits = [_Split("train", files, 0, rows - valid_rows)]
    if valid_rows:
        splits.append(_Split("valid", files, rows - valid_rows, valid_rows))
    for name, others in (("valid", options.valid), ("test", options.test)):
        if others:
            splits.append(_Split(name, others, 0, _count_rows(others, options)))
    for split in splits:
        if not split.rows:
            raise FormatError(f"{split.files[0]}: no row for the split {split.name!r}, expected at least one")
    return splits


def _count_rows(files: Sequence[Path], options: CsvOptions) -> int:
    return sum(block.num_rows for path in files for block in read_csv(path, options.layout, [options.label]))


def _learn(split: _Split, options: CsvOptions, name: str, ticker: _Ticker) -> CsvColumns:
    learner = CsvLearner(options)
    for block in split.blocks(options):
        learner.add(block)
        ticker.add(block.num_rows)
    return learner.columns(name)


def _write_vocabularies(columns: CsvColumns, directory: Path) -> None:
    for column in columns.spec.categorical:
        if isinstance(column.encoder, VocabularyEncoder):
            columns.vocabularies[column.name].save(directory / column.encoder.file)


def _write(split: _Split, options: CsvOptions, encoders: Encoders, directory: Path, ticker: _Ticker) -> ShardSpec:
    with create_shard(encoders.spec, shard_path(directory, encoders.spec, split.name, 0)) as writer:
        for block in split.blocks(options):
            encoded = encode_rows(block, encoders, options)
            writer.write(encoded.label, encoded.dense, encoded.keys)
            ticker.add(block.num_rows)
        return writer.close()
