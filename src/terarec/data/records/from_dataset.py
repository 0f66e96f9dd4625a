"""A terarec data set -> HugeCTR's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.data.decode import cut
from terarec.data.prefetch import ordered_map
from terarec.data.records.generated_rows import RecordKind
from terarec.data.records.keysets import DistinctKeys, distinct
from terarec.data.records.writers import create_writer, final_keys
from terarec.data.source import DatasetSource
from terarec.errors import ConfigError
from terarec.formats import ColumnBlock, new_directory, read_dataset
from terarec.formats.hugectr import (
    METADATA_FILE,
    RECORDS_FILE,
    write_file_list,
    write_keyset,
    write_parquet_metadata,
    write_records,
)
from terarec.spec import DatasetSpec, RecordLayout, RecordSplit, RecordsSpec, SparseInput

FILE_LIST = "_file_list.txt"
KEYSET = "_hugectr.keyset"

_ROWS_PER_FILE = {"norm": 40_960, "parquet": 1 << 20}
"""As HugeCTR's own writers make them."""
_FOUR_BYTES = 2**31
"""Keys with offsets below this fit 4 bytes in every format."""
_THREADS = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """What files to write.

    Attributes:
        kind: "norm", "parquet", "raw" or "raw_async".
        key_bytes: 4 or 8; None for 4 where all keys fit with their offsets.
        checksum: whether Norm files have checksums.
        keysets: whether each split gets a keyset.
    """

    kind: RecordKind
    key_bytes: int | None = None
    checksum: bool = True
    keysets: bool = False


def write_as_records(dataset: Path, out: Path, options: RecordOptions, progress: Progress | None = None) -> RecordsSpec:
    """Write every split of a data set as HugeCTR's files, and ``records.json``, which says what they hold.

    Each categorical column becomes a slot, an input of its own, in the data set's order; its rows are the slot's size.
    Labels and dense numbers are float32, but labels of RawAsync files int32.

    Args:
        dataset: directory with ``dataset.json``.
        out: directory to make.
        options: what files to write.
        progress: called with (rows done, rows in all).

    Returns:
        The content of ``records.json``.

    Raises:
        ConfigError: `out` holds something; a column of any int64 keys, whose slot would have no size; more than one key
            a sample for Raw files.
        FormatError: the data set is damaged, or has labels or lists that the files cannot hold.
        StorageError: the disk is full.
    """
    spec = read_dataset(dataset)
    records = _describe(spec, options)
    total = sum(split.rows for split in records.splits.values())
    done = 0
    with new_directory(out) as partial:
        for split in records.splits:
            collected = DistinctKeys() if options.keysets else None
            blocks = _blocks(DatasetSource(dataset, split), records, collected)
            for rows in _write_split(blocks, records, partial / split, out.resolve() / split):
                done += rows
                if progress is not None:
                    progress(done, total)
            if collected is not None:
                write_keyset(partial / split / KEYSET, collected.sorted(), records.layout.key_bytes)
        write_records(records, partial / RECORDS_FILE)
    return records


def _describe(spec: DatasetSpec, options: RecordOptions) -> RecordsSpec:
    inputs = []
    for column in spec.categorical:
        if column.rows is None:
            raise ConfigError(f"column {column.name!r} holds any int64 keys, expected rows, which size HugeCTR's slot")
        if options.kind == "raw" and column.hotness > 1:
            raise ConfigError(f"column {column.name!r} holds up to {column.hotness} keys, Raw files one a slot")
        is_fixed = column.hotness == 1 or options.kind == "raw_async"
        inputs.append(SparseInput(name=column.name, nnz_per_slot=(column.hotness,), is_fixed_length=is_fixed))
    sizes = tuple(column.rows for column in spec.categorical if column.rows is not None)
    layout = RecordLayout(
        label_dim=len(spec.labels),
        dense_dim=len(spec.dense),
        inputs=tuple(inputs),
        key_bytes=options.key_bytes or (4 if sum(sizes) <= _FOUR_BYTES else 8),
        slot_sizes=sizes,
    )
    path = FILE_LIST if options.kind in ("norm", "parquet") else "data.bin"
    return RecordsSpec(
        kind=options.kind,
        layout=layout,
        splits={
            split: RecordSplit(path=f"{split}/{path}", rows=spec.num_rows(split))
            for split in spec.splits
            if spec.num_rows(split)
        },
        label_names=tuple(column.name for column in spec.labels),
        dense_names=tuple(column.name for column in spec.dense),
        checksum=options.checksum,
    )


def _blocks(source: DatasetSource, records: RecordsSpec, collected: DistinctKeys | None) -> Iterator[ColumnBlock]:
    """The samples; their keys are `collected` as HugeCTR's tables see them."""
    for block in ordered_map(source.read, range(len(source.group_rows)), _THREADS):
        if collected is not None:
            has_offsets = records.kind != "raw_async"
            collected.add(distinct(final_keys(block.keys, records.layout) if has_offsets else block.keys))
        yield block


def _write_split(blocks: Iterator[ColumnBlock], records: RecordsSpec, directory: Path, location: Path) -> Iterator[int]:
    """Write the files of one split into `directory`, which will be at `location`; gives the rows of each file."""
    if records.kind in ("raw", "raw_async"):
        with create_writer(directory / "data.bin", records) as writer:
            for block in blocks:
                writer.write(block.label, block.dense, block.keys)
                yield block.num_rows
            writer.close()
        return
    suffix = "data" if records.kind == "norm" else "parquet"
    files: list[tuple[str, int]] = []
    for pieces in cut(blocks, _ROWS_PER_FILE[records.kind], skip=0, drop_last=False):
        name = f"part-{len(files):05d}.{suffix}"
        files.append((name, _write_file(directory / name, pieces, records)))
        yield files[-1][1]
    if records.kind == "parquet":
        names = records.label_names, records.dense_names, records.key_names
        write_parquet_metadata(directory / METADATA_FILE, files, *names)
    write_file_list(directory / FILE_LIST, [location / name for name, _ in files])


def _write_file(path: Path, pieces: Sequence[ColumnBlock], records: RecordsSpec) -> int:
    with create_writer(path, records) as writer:
        for piece in pieces:
            keys = final_keys(piece.keys, records.layout) if records.kind == "norm" else piece.keys
            writer.write(piece.label, piece.dense, keys)
        writer.close()
    return sum(piece.num_rows for piece in pieces)
