"""HugeCTR's files -> a terarec data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from terarec.data.decode import cut
from terarec.data.prefetch import ordered_map
from terarec.data.records.described import open_split
from terarec.data.records.sources import RecordSource
from terarec.formats import (
    ColumnBlock,
    Keys,
    create_shard,
    new_directory,
    shard_path,
    write_dataset,
)
from terarec.formats.hugectr import final_keys, read_records
from terarec.formats.hugectr.arguments import bags_of
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RecordsSpec, ShardSpec

_ROWS_PER_SHARD = 1 << 20
_THREADS = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedRecords:
    """What a data set was made of.

    Attributes:
        dataset: its description.
        num_skipped: records that were left out because their checksum failed.
    """

    dataset: DatasetSpec
    num_skipped: int


def write_as_dataset(
    records: Path, out: Path, *, storage: Literal["parquet", "raw"] = "parquet", progress: Progress | None = None
) -> ImportedRecords:
    """Write HugeCTR's files as a data set.

    A slot becomes a categorical column: of as many rows as the slot has keys, its keys from 0 on, where the layout
    gives the slots' sizes, and else of any int64 keys, for dynamic tables. Dense numbers are stored as a reader gives
    them.

    Args:
        records: a ``records.json``.
        out: directory to make.
        storage: format of the shards.
        progress: called with (rows done, rows in all).

    Raises:
        ConfigError: `out` holds something.
        DataNotFoundError: a file is missing.
        FormatError: a file is damaged, or holds a key outside its slot or none where one is promised.
        StorageError: the disk is full.
    """
    spec = read_records(records)
    dataset = _describe(spec, out.name, storage)
    total = sum(entry.rows for entry in spec.splits.values())
    done = num_skipped = 0
    with new_directory(out) as partial:
        splits: dict[str, tuple[ShardSpec, ...]] = {}
        for split in spec.splits:
            imported = _Import(open_split(spec, split, records.parent), spec, dataset)
            shards: list[ShardSpec] = []
            for pieces in cut(imported.blocks(), _ROWS_PER_SHARD, skip=0, drop_last=False):
                shards.append(_write_shard(shard_path(partial, dataset, split, len(shards)), pieces, dataset))
                done += shards[-1].rows
                if progress is not None:
                    progress(done, total)
            splits[split] = tuple(shards)
            num_skipped += imported.num_skipped
        dataset = dataclasses.replace(dataset, splits=splits)
        write_dataset(dataset, partial, location=out)
    return ImportedRecords(dataset=dataset, num_skipped=num_skipped)


def _describe(spec: RecordsSpec, name: str, storage: Literal["parquet", "raw"]) -> DatasetSpec:
    layout = spec.layout
    sizes = layout.slot_sizes[: layout.num_slots] or (None,) * layout.num_slots
    hotness = (1,) * layout.num_slots if spec.kind == "raw" else layout.most_keys
    return DatasetSpec(
        name=name,
        storage=storage,
        labels=tuple(LabelColumn(name=column) for column in spec.label_names),
        dense=tuple(DenseColumn(name=column) for column in spec.dense_names),
        categorical=tuple(
            CategoricalColumn(name=column, rows=size, hotness=most)
            for column, size, most in zip(spec.key_names, sizes, hotness, strict=True)
        ),
    )


class _Import:
    """The samples of a source as a data set holds them.

    Attributes:
        num_skipped: records left out so far.
    """

    def __init__(self, source: RecordSource, spec: RecordsSpec, dataset: DatasetSpec) -> None:
        self.num_skipped = 0
        self._source = source
        self._spec = spec
        self._dataset = dataset

    def blocks(self) -> Iterator[ColumnBlock]:
        """Groups of samples, their keys from 0 on in each column of known rows."""
        for block, left_out in ordered_map(self._source.read, range(len(self._source.group_rows)), _THREADS):
            self.num_skipped += left_out
            has_offsets = self._spec.kind != "raw_async"
            keys = final_keys(block.keys, self._spec.layout, sign=-1) if has_offsets else block.keys
            columns: list[Keys] = [
                bags_of(column_keys) if column.hotness > 1 else column_keys
                for column, column_keys in zip(self._dataset.categorical, keys, strict=True)
            ]
            yield dataclasses.replace(block, keys=tuple(columns))


def _write_shard(path: Path, pieces: Sequence[ColumnBlock], dataset: DatasetSpec) -> ShardSpec:
    with create_shard(dataset, path) as writer:
        for piece in pieces:
            writer.write(piece.label, piece.dense, piece.keys)
        return writer.close()
