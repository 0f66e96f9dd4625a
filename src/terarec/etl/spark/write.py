# SPDX-License-Identifier: Apache-2.0
"""The data set from the cluster: tasks encode pieces to files, of which other tasks gather the rows of each shard."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyspark import SparkContext

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, TRAIN, Rows
from terarec.etl.engine.passes import ReadRows
from terarec.etl.engine.write import SHOWN, Part, file_key, missing_values, rows_of_files, shown_values, split_parts
from terarec.etl.shuffle import ROW, block_from_table, block_to_batch
from terarec.etl.sink import RECORD_STORAGES, PartOptions, ordered_sink
from terarec.etl.spark.read import FilePart
from terarec.etl.spark.tasks import (
    BLOCK_BITS,
    Job,
    OpenJob,
    PieceReport,
    Row,
    TableStreams,
    map_with_job,
    merged_bad_input,
    raise_first,
    read_table,
    task_file,
)
from terarec.etl.workflow.plan import Plan
from terarec.formats import write_dataset
from terarec.formats.block import ColumnBlock, merge, slice_rows
from terarec.formats.shard import create_shard, even_sizes, open_shard, shard_path
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.spec import DatasetSpec, PrepareOptions, ShardSpec

_UNITS_A_SHARD = 4
"""Units by hash that the rows of a shuffled shard lie in. More cost more parts, fewer make tasks read more twice."""
_SCATTERED_ROWS = 1 << 19
"""Rows gathered before they are scattered to units, as a part of a file costs about 4 KiB besides its rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Shard:
    """A file to write: the rows ``skip <= i < skip + rows`` of the units that are routed to it, in order."""

    split: str
    number: int
    skip: int
    rows: int


def write_shards(
    context: SparkContext,
    job: Job,
    spec: DatasetSpec,
    pieces: Sequence[FilePart],
    encoded_to: Path,
    directory: Path,
    options: PrepareOptions,
) -> tuple[DatasetSpec, Sequence[PieceReport]]:
    """Write the shards of a data set; returns it with them, and the reports of all pieces.

    Rows are in units whose order is known: the blocks of the sources or, shuffled, intervals of hashes of row ids.
    Counting the rows of units tells where shards begin, so nothing is sorted but the rows of a shuffled shard.
    """
    seed = options.seed if options.shuffle else None
    total = sum(piece.num_rows for piece in pieces)
    bits = (_UNITS_A_SHARD * -(-total // options.rows_per_shard) - 1).bit_length()
    encoded_to.mkdir()
    encoded = map_with_job(context, job, pieces, partial(_encode_piece, seed, bits, encoded_to)).collect()
    encoded.sort(key=itemgetter(0))
    reports = [report for _, report, _ in encoded]
    raise_first(reports)
    units: dict[int, Counter[int]] = {split: Counter() for split in range(len(SPLIT_NAMES))}
    for *_, parts in encoded:
        for split, unit, rows, _ in parts.tolist():
            units[split][unit] += rows
    part_options = PartOptions(count=options.parts)
    most = [part_options.rows_per_shard(options.rows_per_shard, sum(units[TRAIN].values()))]
    most += [options.rows_per_shard] * (len(SPLIT_NAMES) - 1)
    shards, routes = _cut(units, most)
    if not shards:
        raise FormatError("sources", "got no row that the workflow keeps, expected at least one")
    of_shards: list[list[tuple[int, int]]] = [[] for _ in shards]
    for number, _, parts in encoded:
        for split, unit, _, begin in parts.tolist():
            # A unit on the border of two shards is read for both.
            for place in routes[split, unit]:
                of_shards[place].append((number, begin))
    write = partial(_write_shard, spec, seed, encoded_to, directory)
    # `count` runs the tasks, whose results are the files.
    map_with_job(context, job, list(zip(shards, of_shards, strict=True)), write).count()
    splits: dict[str, list[ShardSpec]] = {}
    for shard in shards:
        path = shard_path(directory, spec, shard.split, shard.number)
        splits.setdefault(shard.split, []).append(ShardSpec(file=f"{shard.split}/{path.name}", rows=shard.rows))
    return dataclasses.replace(spec, splits={name: tuple(files) for name, files in splits.items()}), reports


def _encode_piece(
    seed: int | None, bits: int, directory: Path, opened: OpenJob, number: int, piece: FilePart
) -> Iterator[Row]:
    """Write the encoded rows of a piece to a file; yield its report and the parts of the file.

    A part is rows of one unit: int64[parts, 4] has the split, the unit, the rows, and the byte at which they begin.
    """
    work = opened.plan.transform_pass()
    report = PieceReport()
    missing: dict[str, np.ndarray[Any, Any]] = {}
    parts: list[tuple[int, int, int, int]] = []

    def encode(read: ReadRows) -> list[Part]:
        def parts(rows: Rows) -> list[Part]:
            if not rows.num_rows:
                return []
            done = opened.pipeline.run(work, rows, read.joined)[0]
            encoded = opened.workflow.encode_rows(done)
            _note_labels(opened.plan, done, encoded, report)
            return split_parts(done, encoded)

        for name, counts in missing_values(read.rows).items():
            missing[name] = missing.get(name, 0) + np.array(counts)
        return read.invalid.filter(parts, opened.pipeline.preprocess(work, read))[0]

    with task_file(opened.job, _encoded_file(directory, number)) as path, TableStreams(path) as file:

        def write(split: int, unit: int, rows: NDArray[np.int64], block: ColumnBlock) -> None:
            parts.append((split, unit, len(rows), file.write(block_to_batch(rows, block))))

        waiting: list[tuple[NDArray[np.int64], ColumnBlock]] = []
        # The number of the piece, then that of the block: places rise in the order of the sources.
        for place, result in enumerate(opened.map(piece, report, encode), number << BLOCK_BITS):
            for name, rows, block in result:
                split = SPLIT_NAMES.index(name)
                report.rows[split] += len(rows)
                # Only the train split is shuffled, as by `ShuffledSink`.
                if seed is None or split != TRAIN:
                    write(split, place, rows, block)
                    continue
                waiting.append((rows, block))
                if sum(len(rows) for rows, _ in waiting) >= _SCATTERED_ROWS:
                    _scatter(waiting, seed, bits, write)
        if seed is not None and waiting:
            _scatter(waiting, seed, bits, write)
    report.missing = {name: tuple(counts.tolist()) for name, counts in missing.items()}
    yield number, report, np.array(parts, dtype=np.int64).reshape(-1, 4)


def _scatter(
    waiting: list[tuple[NDArray[np.int64], ColumnBlock]],
    seed: int,
    bits: int,
    write: Callable[[int, int, NDArray[np.int64], ColumnBlock], None],
) -> None:
    """Write the rows that are waiting, unit by unit: the highest `bits` of the hash of a row name its unit."""
    rows = np.concatenate([ids for ids, _ in waiting])
    unit = (_hashes(rows, seed) >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros_like(rows)
    order = np.argsort(unit, kind="stable")
    block = merge([block for _, block in waiting], order)
    waiting.clear()
    ends = np.cumsum(np.bincount(unit)).tolist()
    for key, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            write(TRAIN, key, rows[order[start:end]], slice_rows(block, start, end))


def _hashes(rows: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """Return the places of rows in the shuffled order, uint64[n]."""
    return xxh64_int64(rows, seed).view(np.uint64)


def _note_labels(plan: Plan, rows: Rows, encoded: ColumnBlock, report: PieceReport) -> None:
    """Record for labels with `positives` whether a training row has one, or else the values of their columns."""
    assert rows.split is not None
    training = rows.split == TRAIN
    for place, label in enumerate(plan.spec.labels):
        if not label.positives or place in report.positives:
            continue
        if encoded.label[training, place].any():
            report.positives.add(place)
        else:
            values = shown_values(rows.training().columns[label.source])
            known = dict.fromkeys([*report.values.get(place, ()), *values])
            report.values[place] = list(known)[: SHOWN + 1]


def _cut(
    units: Mapping[int, Mapping[int, int]], rows_per_shard: Sequence[int]
) -> tuple[list[_Shard], dict[tuple[int, int], list[int]]]:
    """Return the shards, and (split, unit) -> positions of the shards that hold rows of it.

    Args:
        units: Split -> unit -> rows.
        rows_per_shard: Maximum number of rows of a shard of each split.
    """
    shards: list[_Shard] = []
    routes: dict[tuple[int, int], list[int]] = {}
    for split, counted in units.items():
        names = sorted(counted)
        ends = list(accumulate(counted[name] for name in names))
        total = ends[-1] if ends else 0
        start = 0
        for number, size in enumerate(
            islice(even_sizes(total, rows_per_shard[split]), -(-total // rows_per_shard[split]))
        ):
            first, last = bisect_right(ends, start), bisect_right(ends, start + size - 1)
            for name in names[first : last + 1]:
                routes.setdefault((split, name), []).append(len(shards))
            shards.append(_Shard(SPLIT_NAMES[split], number, start - (ends[first - 1] if first else 0), size))
            start += size
    return shards, routes


def _write_shard(
    spec: DatasetSpec,
    seed: int | None,
    encoded: Path,
    directory: Path,
    opened: OpenJob,
    number: int,
    item: tuple[_Shard, Sequence[tuple[int, int]]],
) -> Iterator[Row]:
    """Write a shard of the parts of files that hold its rows; a task that runs again writes the same."""
    shard, parts = item
    path = shard_path(directory, spec, shard.split, shard.number)
    tables = (read_table(_encoded_file(encoded, piece), begin) for piece, begin in parts)
    blocks: Iterator[tuple[NDArray[np.int64], ColumnBlock]]
    blocks = ((table.column(ROW).to_numpy(), block_from_table(table, len(spec.labels))) for table in tables)
    if seed is not None and shard.split == SPLIT_NAMES[TRAIN]:
        blocks_of_shard = list(blocks)
        rows = np.concatenate([ids for ids, _ in blocks_of_shard])
        # Ties by row id, as in `ShuffledSink`: the engines write the same shards.
        order = np.lexsort((rows, _hashes(rows, seed)))
        # The parts are freed before the shard is written.
        blocks = iter([(rows[order], merge([block for _, block in blocks_of_shard], order))])
        del blocks_of_shard
    skip, left = shard.skip, shard.rows
    with task_file(opened.job, path) as written, create_shard(spec, written) as writer:
        for _, block in blocks:
            chosen = slice_rows(block, min(skip, block.num_rows), min(skip + left, block.num_rows))
            skip, left = max(skip - block.num_rows, 0), left - chosen.num_rows
            if chosen.num_rows:
                writer.write_block(chosen)
        writer.close()
    assert not left, "the units of a shard hold fewer rows than counted"
    yield number, shard.rows


def _encoded_file(directory: Path, number: int) -> Path:
    return directory / f"piece-{number}.arrows"


def store(
    written: DatasetSpec, spec: DatasetSpec, shards: Path, directory: Path, location: Path, options: PrepareOptions
) -> None:
    """Make the files of a storage that no executor can write alone, as they depend on the rows before.

    The driver writes HugeCTR's files, with metadata and keysets, by the code of the local engine.

    Raises:
        ConfigError: Columns that the storage cannot hold.
        StorageError: The disk is full.
    """
    if options.storage not in RECORD_STORAGES:
        write_dataset(written, directory, location=location)
        PartOptions(count=options.parts, keysets=options.keysets).write(written, directory)
        return
    rows = {split: written.num_rows(split) for split in written.splits}
    with ordered_sink(spec, directory, location, options.storage, options.rows_per_shard, rows) as sink:
        for split in written.splits:
            for file in written.shards(split):
                shard = open_shard(written, shards / file.file)
                for group in range(len(shard.group_rows)):
                    block = shard.read_group(group)
                    # Shards are in their order already, so that row ids do not matter.
                    sink.write(split, np.arange(block.num_rows), block)
        sink.close()


def written_result(
    pieces: Sequence[FilePart], reports: Sequence[PieceReport], written: DatasetSpec, num_files: int
) -> dict[str, Any]:
    """Return the result of the write phase for the journal; `reports` are those of the `pieces`, in their order."""
    missing: dict[str, list[int]] = {}
    for report in reports:
        for name, (count, total) in report.missing.items():
            counts = missing.setdefault(name, [0, 0])
            counts[0] += count
            counts[1] += total
    rows = {split: written.num_rows(split) for split in written.splits}
    files: Counter[str] = Counter()
    for piece, report in zip(pieces, reports, strict=True):
        for split, count in zip(SPLIT_NAMES, report.rows.tolist(), strict=True):
            files[file_key(piece.file, split)] += count
    of_files = rows_of_files(files, num_files)
    return {"rows": rows, "files": of_files, "missing": missing, "bad_input": merged_bad_input(reports)}
