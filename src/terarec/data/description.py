# SPDX-License-Identifier: Apache-2.0
"""Descriptions of either type of data: a prepared data set, or HugeCTR's files that a ``records.json`` describes."""

from __future__ import annotations

from pathlib import Path

from terarec.formats import read_dataset
from terarec.formats.dataset import DATASET_FILE, base_name
from terarec.formats.hugectr.records import RECORDS_FILE, describe_dataset, read_records
from terarec.spec import DatasetSpec, ShardSpec


def read_spec(path: str | Path) -> DatasetSpec:
    """Read the columns and splits of the data at `path`, but no samples.

    A slot of HugeCTR's files is a categorical column, named as in a data set of `terarec convert`:
    ``<input>.<slot>``, or ``<input>`` if the input has one slot. A split has one shard, its file list or file.

    Args:
        path: Directory of a prepared data set, directory with a ``records.json``, or such a file.

    Raises:
        DataNotFoundError: No such path, or a directory without either description.
        FormatError: The description is damaged.
    """
    records = records_file(Path(path))
    if records is None:
        return read_dataset(Path(path))
    spec = read_records(records)
    splits = {
        split: (ShardSpec(file=f"{split}/{base_name(entry.path)}", rows=entry.rows),)
        for split, entry in spec.splits.items()
    }
    # HugeCTR's files have no name, so they get that of their directory, which the path "." does not tell.
    name = records.resolve().parent.name or "records"
    return describe_dataset(spec, name, "parquet" if spec.kind == "parquet" else "raw", splits)


def records_file(path: Path) -> Path | None:
    """Return the description of HugeCTR's files at `path`; None for a data set, or for what is neither."""
    if path.is_file():
        return path
    # A data set may lie next to the records that it was made of; then it is what is meant.
    file = path / RECORDS_FILE
    return file if file.is_file() and not (path / DATASET_FILE).is_file() else None
