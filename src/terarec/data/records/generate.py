"""Writes generated samples as HugeCTR's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from terarec.data.records.generated_rows import DrawnRows, RecordGenerator, RowSource
from terarec.data.synthetic.best_auc import pack, packed_auc
from terarec.errors import ConfigError
from terarec.formats import Keys, ParquetShardWriter
from terarec.formats.hugectr import (
    METADATA_FILE,
    FixedRecordWriter,
    NormWriter,
    raw_async_types,
    raw_types,
    write_file_list,
    write_parquet_metadata,
)
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RecordLayout

_BLOCK_ROWS = 16_384
"""Samples drawn and written at once."""


class _Writer(Protocol):
    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Any) -> None: ...

    def close(self) -> object: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedRecords:
    """What was generated.

    Attributes:
        files: the data files, in order.
        rows: samples in all of them.
        best_auc: the AUC of the true probabilities against the labels drawn, the mean over labels; None unless they are
            planted.
    """

    files: tuple[str, ...]
    rows: int
    best_auc: float | None


def generate_records(
    generator: RecordGenerator, path: Path, *, split: str = "train", num_files: int = 1, rows_per_file: int
) -> GeneratedRecords:
    """Write the samples of `split`; other splits have other samples of the same kind and of the same planted model.

    Args:
        generator: which samples, in which format.
        path: Norm and Parquet: of the file list; the files go to ``<its directory>/<split>/gen_0.data`` (or
            ``.parquet``) and so on. Raw and RawAsync: of the only file.
        split: "train", "val" or any other name.
        num_files: data files.
        rows_per_file: samples of each.

    Raises:
        ConfigError: a number out of range, or more than one Raw file.
        FormatError: a layout that the format cannot have.
        StorageError: the disk is full.
    """
    for name, value in (("num_files", num_files), ("rows_per_file", rows_per_file)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"generate_records: {name} is {value!r}, expected an integer >= 1")
    is_listed = generator.kind in ("norm", "parquet")
    if not is_listed and num_files != 1:
        raise ConfigError(f"generate_records: num_files is {num_files}, expected 1 file of kind {generator.kind!r}")
    suffix = "parquet" if generator.kind == "parquet" else "data"
    directory = path.parent / split
    files = [directory / f"gen_{index}.{suffix}" for index in range(num_files)] if is_listed else [path]
    rows = RowSource(generator)
    packed: list[NDArray[np.uint32]] = []
    for index, file in enumerate(files):
        with _create(generator, file) as writer:
            for drawn in _blocks(rows, split, index * rows_per_file, rows_per_file):
                writer.write(drawn.label, drawn.dense, _stored_keys(generator, drawn.keys))
                if drawn.probabilities is not None:
                    packed.append(pack(drawn.probabilities, drawn.label.astype(np.uint8)))
            writer.close()
    if generator.kind == "parquet":
        label, dense, keys = column_names(generator.layout)
        write_parquet_metadata(
            directory / METADATA_FILE, [(str(file), rows_per_file) for file in files], label, dense, keys
        )
    if is_listed:
        write_file_list(path, files)
    return GeneratedRecords(
        files=tuple(map(str, files)), rows=num_files * rows_per_file, best_auc=_best_auc(packed) if packed else None
    )


def column_names(layout: RecordLayout) -> tuple[list[str], list[str], list[str]]:
    """Names of label, dense and key columns in generated Parquet files: ``label<i>``, ``C<i>``, i over all columns."""
    first_key = layout.label_dim + layout.dense_dim
    return (
        [f"label{index}" for index in range(layout.label_dim)],
        [f"C{index}" for index in range(layout.label_dim, first_key)],
        [f"C{index}" for index in range(first_key, first_key + layout.num_slots)],
    )


def _blocks(rows: RowSource, split: str, first: int, count: int) -> Iterator[DrawnRows]:
    for start in range(first, first + count, _BLOCK_ROWS):
        yield rows.draw(split, start, min(_BLOCK_ROWS, first + count - start))


def _create(generator: RecordGenerator, path: Path) -> AbstractContextManager[_Writer]:
    layout = generator.layout
    if generator.kind == "norm":
        return NormWriter(path, layout, checksum=generator.checksum)
    if generator.kind == "parquet":
        return ParquetShardWriter(path, _columns(layout))
    if generator.kind == "raw":
        return FixedRecordWriter(path, layout, raw_types(layout, float_label_dense=generator.float_label_dense))
    types = raw_async_types(layout, is_dense_float=generator.float_label_dense, multi_hot=True)
    return FixedRecordWriter(path, layout, types)


def _columns(layout: RecordLayout) -> DatasetSpec:
    """The columns of a Parquet file: any int64 keys for 8-byte keys, which makes them int64 in the file."""
    label, dense, keys = column_names(layout)
    return DatasetSpec(
        name="generated",
        storage="parquet",
        labels=tuple(LabelColumn(name=name) for name in label),
        dense=tuple(DenseColumn(name=name) for name in dense),
        categorical=tuple(
            CategoricalColumn(name=name, rows=size if layout.key_bytes == 4 else None, hotness=most)
            for name, size, most in zip(keys, layout.slot_sizes, layout.most_keys, strict=True)
        ),
    )


def _stored_keys(generator: RecordGenerator, keys: tuple[Keys, ...]) -> tuple[Keys, ...]:
    """Norm files hold final keys; the readers of the other formats that have offsets add them."""
    if generator.kind != "norm":
        return keys
    offsets = generator.layout.key_offsets
    return tuple(
        (column[0] + offset, column[1]) if isinstance(column, tuple) else column + offset
        for column, offset in zip(keys, offsets, strict=True)
    )


def _best_auc(packed: list[NDArray[np.uint32]]) -> float:
    """The mean of the labels' AUCs."""
    columns = np.concatenate(packed).T
    return float(np.mean([packed_auc(np.ascontiguousarray(column)) for column in columns]))
