# SPDX-License-Identifier: Apache-2.0
"""Description of a directory of HugeCTR's files (``records.json``), and its mapping to a data set's columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from terarec.errors import ConfigError, FormatError
from terarec.formats.dataset import FILE_LIST
from terarec.io.files import read_versioned_json, write_versioned_json
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    RecordLayout,
    RecordOptions,
    RecordsSpec,
    ShardSpec,
    SparseInput,
    from_data,
    to_data,
)
from terarec.spec.dataset import MISSING_ID, DatasetStorage, RecordSplit

ROWS_PER_FILE = {"norm": 40_960, "parquet": 1 << 20}
"""As HugeCTR's own writers make them."""
_FOUR_BYTES = 2**31
"""Keys with offsets below this fit 4 bytes in every format."""


def describe_records(spec: DatasetSpec, options: RecordOptions, rows: Mapping[str, int]) -> RecordsSpec:
    """Describe the files of a data set's samples: each categorical column is a slot with an input of its own.

    Args:
        spec: Columns of the data set.
        options: Options of the files.
        rows: Samples of each split; empty ones are left out.

    Raises:
        ConfigError: A column of any int64 keys, whose slot would have no size; lists of keys for Raw files.
    """
    inputs = []
    for column in spec.categorical:
        if column.rows is None:
            raise ConfigError(
                f"column {column.name!r}", "holds any int64 keys, expected rows, which size HugeCTR's slot"
            )
        if options.kind == "raw" and column.hotness > 1:
            raise ConfigError(f"column {column.name!r}", f"holds up to {column.hotness} keys, Raw files one a slot")
        # Norm and Parquet files store the length of each list, RawAsync files cannot.
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
    given = tuple(spec.missing_key(column.name) != MISSING_ID for column in spec.categorical)
    return RecordsSpec(
        kind=options.kind,
        layout=layout,
        splits=_splits(options.kind, rows),
        label_names=tuple(column.name for column in spec.labels),
        dense_names=tuple(column.name for column in spec.dense),
        checksum=options.checksum,
        given=() if all(given) else given,
    )


def describe_dataset(
    records: RecordsSpec, name: str, storage: DatasetStorage, splits: Mapping[str, tuple[ShardSpec, ...]]
) -> DatasetSpec:
    """Describe the samples of HugeCTR's files as a data set: each slot is a categorical column.

    A column has as many rows as its slot has keys where the layout gives the slots' sizes. Otherwise, and with offsets,
    it holds any int64 keys, for dynamic tables.
    """
    layout = records.layout
    has_sizes = bool(layout.slot_sizes) and records.keys != "with_offsets"
    sizes: tuple[int | None, ...] = layout.slot_sizes if has_sizes else (None,) * layout.num_slots
    if records.keys == "as_read":
        sizes = tuple(size or None for size in sizes)
    # Other keys are not those of the columns: their 0 is that of the first slot alone, or of any.
    has_missing = [
        records.keys == "columns" and not is_given for is_given in records.given or (True,) * layout.num_slots
    ]
    is_one_hot = records.kind == "raw" or not records.multi_hot
    # Their records have one key a slot, even if the layout allows more.
    hotness = (1,) * layout.num_slots if is_one_hot else layout.most_keys
    return DatasetSpec(
        name=name,
        storage=storage,
        labels=tuple(LabelColumn(name=column) for column in records.label_names),
        dense=tuple(DenseColumn(name=column) for column in records.dense_names),
        categorical=tuple(
            CategoricalColumn(name=column, rows=size, hotness=most, given=False if is_missing else None)
            for column, size, most, is_missing in zip(
                records.key_names, sizes[: layout.num_slots], hotness, has_missing, strict=True
            )
        ),
        splits=splits,
    )


def has_offsets(kind: str) -> bool:
    """Return whether slot offsets are added to the keys of such files before HugeCTR's tables."""
    return kind != "raw_async"


def is_listed(kind: str) -> bool:
    """Return whether samples are in several files with a file list, instead of one file."""
    return kind in ("norm", "parquet")


def _splits(kind: str, rows: Mapping[str, int]) -> dict[str, RecordSplit]:
    path = FILE_LIST if is_listed(kind) else "data.bin"
    return {split: RecordSplit(path=f"{split}/{path}", rows=count) for split, count in rows.items() if count}


RECORDS_FILE = "records.json"
FORMAT = "terarec.records"
VERSION = 1


def read_records(path: Path) -> RecordsSpec:
    """Read a ``records.json``.

    Raises:
        DataNotFoundError: No such file.
        FormatError: The file is not JSON, of another format or another version, or a field is wrong (JSON path).
    """
    data = read_versioned_json(path, FORMAT, VERSION)
    # A field of a later version would be lost when the file is written again.
    for field in data:
        if field != "records":
            raise FormatError(f"{path}: $.{field}", "unknown field, expected only 'records'")
    try:
        return from_data(RecordsSpec, data.get("records"), f"{path}: $.records")
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None


def write_records(spec: RecordsSpec, path: Path) -> None:
    """Write a ``records.json``, atomically."""
    write_versioned_json(path, FORMAT, VERSION, {"records": to_data(spec)})
