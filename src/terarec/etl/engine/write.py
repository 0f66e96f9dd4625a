# SPDX-License-Identifier: Apache-2.0
"""The write phase: one pass over all rows, which are transformed and written to a sink."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import SPLIT_NAMES, TRAIN, Rows, flat
from terarec.etl.engine.passes import JoinedRows, Passes, Pipeline, ReadRows
from terarec.etl.engine.report import add_bad_input, bad_input_to_json
from terarec.etl.shuffle import ShuffledSink
from terarec.etl.sink import PartOptions, Sink, SinkState, ordered_sink
from terarec.etl.source.blocks import RawBlock
from terarec.etl.source.source import Source
from terarec.formats.block import ColumnBlock, merge, slice_rows
from terarec.io.files import flush, read_versioned_json, write_versioned_json
from terarec.spec import DatasetSpec, LabelSpec

SHOWN = 5
"""Values of a label that a message shows."""
_FORMAT = "terarec.write-checkpoint"
Part: TypeAlias = tuple[str, NDArray[np.int64], ColumnBlock]
"""Split, row ids and rows."""


def write_rows(
    passes: Passes,
    pipeline: Pipeline,
    encode: Callable[[Rows], ColumnBlock],
    *,
    sink: Sink,
    joined: JoinedRows | None,
    positives: PositiveRows,
    checkpoints: WriteCheckpoints,
) -> WriteTotals:
    """Write every row, or after an interrupted run the remaining rows.

    `encode` makes the columns of the data set from those after the last step.
    """
    work = pipeline.plan.transform_pass()

    def transform(read: ReadRows) -> tuple[RawBlock, list[Part], dict[str, tuple[int, int]]]:
        def parts(rows: Rows) -> list[Part]:
            if not rows.num_rows:
                return []
            done = pipeline.run(work, rows, read.joined)[0]
            return split_parts(done, encode(done))

        # Results wait for their turn: without this each would keep the text of its block in memory.
        raw = dataclasses.replace(read.raw, part=dataclasses.replace(read.raw.part, content=None))
        return raw, read.invalid.filter(parts, pipeline.preprocess(work, read))[0], missing_values(read.rows)

    begin = checkpoints.begin
    # The totals of the checkpoint must not change with those of later blocks.
    totals = begin.copy()
    # Rows behind `begin` that are on the disk all the same: they are read again, and not written.
    skip = {split: rows - begin.rows[split] for split, rows in checkpoints.state.num_rows.items()}
    passes.meter.skip(begin.read_bytes)
    # Only rows that wait to be shuffled are left, which the sink writes when it finishes.
    if checkpoints.is_read:
        return totals
    # Whole blocks: a checkpoint lies between two.
    blocks = (raw for raw in passes.source.raw_blocks() if raw.first_row >= begin.next_row)
    with closing(passes.map(transform, joined=joined, blocks=blocks)) as results:
        for raw, parts, missing in results:
            for split, ids, block in parts:
                positives.observe(split, block)
                skipped = min(skip.get(split, 0), len(ids))
                if skipped < len(ids):
                    sink.write(split, ids[skipped:], slice_rows(block, skipped, len(ids)) if skipped else block)
                # Rows of a split reach the disk in order, so those that are there are its first ones.
                if skipped:
                    skip[split] -= skipped
            totals.add(raw, {split: len(ids) for split, ids, _ in parts}, missing)
            checkpoints.update(totals, sink, positives)
    return totals


def missing_values(rows: Rows) -> dict[str, tuple[int, int]]:
    """Return name -> missing values and all values of each column."""
    columns = {name: flat(array) for name, array in rows.columns.items()}
    return {name: (values.null_count, len(values)) for name, values in columns.items()}


@dataclass
class WriteTotals:
    """Totals of the blocks before a row of the sources.

    Attributes:
        next_row: Row id, in the sources, of the next block.
        read_bytes: Bytes that were read.
        rows: Split -> rows.
        files: Position of a file and split, as `file_key` joins them -> rows.
        missing: Column of the sources -> missing values.
        values: Column of the sources -> all values.
    """

    next_row: int = 0
    read_bytes: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)

    def add(self, raw: RawBlock, rows: Mapping[str, int], missing: Mapping[str, tuple[int, int]]) -> None:
        """Add a block."""
        self.next_row = raw.first_row + raw.num_rows
        self.read_bytes += raw.read_bytes
        self.rows.update(rows)
        self.files.update({file_key(raw.file, split): count for split, count in rows.items()})
        for name, (count, total) in missing.items():
            self.missing[name] += count
            self.values[name] += total

    def copy(self) -> WriteTotals:
        """Return totals that later blocks do not change."""
        counters = {name: getattr(self, name).copy() for name in _COUNTERS}
        return WriteTotals(self.next_row, self.read_bytes, **counters)


_COUNTERS = ("rows", "files", "missing", "values")


def file_key(file: int, split: str) -> str:
    """Return the key of the rows of a file in a split."""
    return f"{file} {split}"


def rows_of_files(counts: Mapping[str, int], num_files: int) -> list[dict[str, int]]:
    """Return split -> rows, for each file, of the counts by `file_key`."""
    files = range(num_files)
    return [{name: counts[key] for name in SPLIT_NAMES if counts.get(key := file_key(file, name))} for file in files]


class WriteCheckpoints:
    """Checkpoints of the write phase: an interrupted run is resumed at the first row that is not on the disk.

    A checkpoint is saved whenever a shard is closed, or rows to shuffle are committed. Later rows of other splits that
    are on the disk are read again, but not written.

    Attributes:
        begin: Totals of the blocks before the first one to read.
        state: Output on the disk.
        is_read: Whether all sources were read, so that only shuffled rows are to be written.
        bad_input: Bad input before the first block to read, as `bad_input_to_json` returns it.
        absent: Positions of the labels without a positive row, or None where nothing was read.
    """

    _MOST_MARKS = 1000

    def __init__(self, path: Path, source: Source) -> None:
        self._path = path
        self._source = source
        self.begin = WriteTotals()
        self.state = SinkState()
        self.is_read = False
        self.bad_input: dict[str, Any] = {"counts": {}, "first": []}
        self.absent: list[int] | None = None
        if path.exists():
            content = read_versioned_json(path, _FORMAT, 1)
            counters = {name: Counter(content["totals"].get(name, {})) for name in _COUNTERS}
            self.begin = WriteTotals(content["totals"]["next_row"], content["totals"]["read_bytes"], **counters)
            self.state = SinkState(closed=content["closed"], **content["shuffle"])
            self.is_read = content["is_read"]
            self.bad_input, self.absent = content["bad_input"], content["absent"]
        self._saved = self.state
        # A mark for each block since the last checkpoint: when its rows reach the disk is up to the sink.
        self._marks = [self.begin]

    def update(self, totals: WriteTotals, sink: Sink, positives: PositiveRows) -> None:
        """Take the totals after a block into account; save a checkpoint if the output on the disk has changed."""
        self._marks.append(totals.copy())
        if len(self._marks) > self._MOST_MARKS:
            # A mark left out costs no rows, only that a resumed run reads some blocks again.
            del self._marks[1::2]
        self.save(sink, positives)

    def save(self, sink: Sink, positives: PositiveRows, *, at_end: bool = False) -> None:
        """Save a checkpoint if the output on the disk has changed."""
        state = sink.state()
        # Without output on the disk there is nothing to resume at.
        if state == self._saved or not (state.spilled_rows or any(state.closed.values())):
            return
        rows_so_far = state.num_rows
        # The next run begins at the last mark whose rows are all on the disk.
        while len(self._marks) > 1 and all(
            rows <= rows_so_far.get(name, 0) for name, rows in self._marks[1].rows.items()
        ):
            del self._marks[0]
        self._saved, mark = state, self._marks[0]
        before = bad_input_to_json(self._source.bad_input_before(mark.next_row))
        shuffle = {spec.name: getattr(state, spec.name) for spec in dataclasses.fields(state) if spec.name != "closed"}
        content = {
            "totals": {spec.name: getattr(mark, spec.name) for spec in dataclasses.fields(mark)},
            "closed": state.closed,
            "shuffle": shuffle,
            "is_read": at_end and len(self._marks) == 1,
            "bad_input": add_bad_input([self.bad_input, before]),
            "absent": positives.absent_places,
        }
        # It names shards, which are on the disk; now the names of their directories are, too.
        flush(self._path.parents[1])
        write_versioned_json(self._path, _FORMAT, 1, content)


def split_parts(done: Rows, encoded: ColumnBlock) -> list[Part]:
    """Return the rows of each split, in their order."""
    assert done.split is not None
    # A block of one split, as nearly all are where the split goes by position, needs no copy.
    first = int(done.split[0])
    if (done.split == first).all():
        return [(SPLIT_NAMES[first], done.ids, encoded)]
    parts: list[Part] = []
    for number, name in enumerate(SPLIT_NAMES):
        positions = np.flatnonzero(done.split == number)
        if len(positions):
            parts.append((name, done.ids[positions], merge([encoded], positions)))
    return parts


class PositiveRows:
    """Checks that the training part holds a positive row for each label that names its positive values.

    Args:
        labels: Labels of the workflow; none where nothing is fitted.
        absent: Positions of the labels whose positive row an interrupted run did not find; None for all.
    """

    def __init__(self, labels: Sequence[LabelSpec], absent: Sequence[int] | None = None) -> None:
        places = range(len(labels)) if absent is None else absent
        self._absent = {place: labels[place] for place in places if labels[place].positives}

    def observe(self, split: str, block: ColumnBlock) -> None:
        """Take rows of a split into account."""
        # Most labels have a positive row in the first block, and nothing to look for after it.
        if self._absent and split == SPLIT_NAMES[TRAIN]:
            self._absent = {place: label for place, label in self._absent.items() if not block.label[:, place].any()}

    @property
    def absent_places(self) -> list[int]:
        """Positions of the labels without a positive row so far."""
        return list(self._absent)

    @property
    def absent(self) -> LabelSpec | None:
        """A label without a positive row; None if there is none."""
        return next(iter(self._absent.values()), None)


def training_values(passes: Passes, pipeline: Pipeline, column: str, joined: JoinedRows | None) -> list[str]:
    """Return the first different values of `column` in the training part, one more than `SHOWN` at most."""
    work = pipeline.plan.transform_pass()

    def values_of(read: ReadRows) -> list[str]:
        run = partial(pipeline.run, work, joined=read.joined)
        done = read.invalid.filter(run, pipeline.preprocess(work, read))[0][0]
        return shown_values(done.training().columns[column])

    seen: dict[str, None] = {}
    with closing(passes.map(values_of, joined=joined)) as results:
        for values in results:
            # A dict as a set that keeps the order of the rows.
            seen.update(dict.fromkeys(values))
            # The error shows no more, so the other rows need not be read.
            if len(seen) > SHOWN:
                break
    return list(seen)[: SHOWN + 1]


def shown_values(array: pa.Array) -> list[str]:
    """Return the first different values of an array as text, at most one more than `SHOWN`."""
    return list(map(str, array.unique().slice(0, SHOWN + 1).to_pylist()))


def no_positives(label: LabelSpec, values: Sequence[str]) -> ConfigError:
    """Return the error that no training row of `label` has one of its `positives`, but such `values`."""
    shown = ", ".join(map(repr, values[:SHOWN])) + (", ..." if len(values) > SHOWN else "")
    wanted = " or ".join(map(repr, label.positives))
    return ConfigError(f"label {label.source!r}", f"no row of the training part holds {wanted}; it holds {shown}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOptions:
    """Options of the files to write.

    Attributes:
        storage: "parquet", "raw", or one of `RECORD_STORAGES`.
        rows_per_shard: Maximum number of rows of a file.
        seed: Shuffle seed of the train split; None leaves the rows in order.
        memory_bytes: Memory for shuffling.
        estimated_bytes: Approximate bytes of all rows.
        expected: Rows of each split, where they are known.
        begin: Output of the interrupted run to resume.
        parts: Parts of the train split.
    """

    storage: str
    rows_per_shard: int
    seed: int | None
    memory_bytes: int
    estimated_bytes: int
    expected: Mapping[str, int]
    begin: SinkState = field(default_factory=SinkState)
    parts: PartOptions = field(default_factory=lambda: PartOptions())


def create_sink(spec: DatasetSpec, directory: Path, location: Path, work: Path, options: SinkOptions) -> Sink:
    """Return the sink for a data set of the columns of `spec`.

    The caller removes the directory `work` of temporary files when the data set is complete.

    Raises:
        ConfigError: Columns that the storage cannot hold.
        FormatError: Temporary files of the interrupted run are damaged.
    """
    sink = ordered_sink(
        spec,
        directory,
        location,
        options.storage,
        options.rows_per_shard,
        options.expected,
        options.begin.closed,
        options.parts,
    )
    if options.seed is None:
        return sink
    return ShuffledSink(
        sink,
        work / "shuffle",
        num_labels=len(spec.labels),
        seed=options.seed,
        estimated_bytes=options.estimated_bytes,
        memory_bytes=options.memory_bytes,
        # A killed run repeats as much then as one that closes shards as it goes.
        rows_per_commit=options.rows_per_shard,
        begin=options.begin,
    )
