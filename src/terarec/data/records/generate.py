"""Writes generated samples as HugeCTR's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.data.records.generated_rows import DrawnRows, RecordGenerator, RowSource
from terarec.data.synthetic.raw_log import pack, packed_auc
from terarec.errors import ConfigError
from terarec.formats.hugectr import METADATA_FILE, create_writer, final_keys, write_file_list, write_parquet_metadata
from terarec.spec import RecordsSpec, SparseInput

_BLOCK_ROWS = 16_384
"""Samples drawn and written at once."""


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
    rows, description = RowSource(generator), _describe(generator)
    packed: list[NDArray[np.uint32]] = []
    for index, file in enumerate(files):
        with create_writer(file, description) as writer:
            for drawn in _blocks(rows, split, index * rows_per_file, rows_per_file):
                keys = final_keys(drawn.keys, generator.layout) if generator.kind == "norm" else drawn.keys
                writer.write(drawn.label, drawn.dense, keys)
                if drawn.probabilities is not None:
                    packed.append(pack(drawn.probabilities, drawn.label.astype(np.uint8)))
            writer.close()
    if generator.kind == "parquet":
        stats = [(str(file), rows_per_file) for file in files]
        names = description.label_names, description.dense_names, description.key_names
        write_parquet_metadata(directory / METADATA_FILE, stats, *names)
    if is_listed:
        write_file_list(path, files)
    return GeneratedRecords(
        files=tuple(map(str, files)), rows=num_files * rows_per_file, best_auc=_best_auc(packed) if packed else None
    )


def _describe(generator: RecordGenerator) -> RecordsSpec:
    """The files' columns: ``label<i>``, and ``C<i>`` for dense numbers and slots, i counting over all columns."""
    layout = generator.layout
    first_key = layout.label_dim + layout.dense_dim
    inputs = tuple(
        SparseInput(name=f"C{first_key + slot}", nnz_per_slot=(most,), is_fixed_length=True)
        for slot, most in enumerate(layout.most_keys)
    )
    return RecordsSpec(
        kind=generator.kind,
        layout=dataclasses.replace(layout, inputs=inputs),
        splits={},
        label_names=tuple(f"label{index}" for index in range(layout.label_dim)),
        dense_names=tuple(f"C{index}" for index in range(layout.label_dim, first_key)),
        checksum=generator.checksum,
        float_label_dense=generator.float_label_dense,
    )


def _blocks(rows: RowSource, split: str, first: int, count: int) -> Iterator[DrawnRows]:
    for start in range(first, first + count, _BLOCK_ROWS):
        yield rows.draw(split, start, min(_BLOCK_ROWS, first + count - start))


def _best_auc(packed: list[NDArray[np.uint32]]) -> float:
    """The mean of the labels' AUCs."""
    columns = np.concatenate(packed).T
    return float(np.mean([packed_auc(np.ascontiguousarray(column)) for column in columns]))
