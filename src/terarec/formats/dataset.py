"""``dataset.json`` and the files next to it for HugeCTR. Described in docs/formats.md."""

from __future__ import annotations

from pathlib import Path

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.parquet_lists import FILE_LIST, METADATA_FILE, write_file_list, write_parquet_metadata
from terarec.io import read_versioned_json, write_versioned_json
from terarec.spec import DatasetSpec, from_data, to_data

DATASET_FILE = "dataset.json"
FORMAT = "terarec.dataset"
VERSION = 3
"""Version 2 had neither weight nor metadata."""
_OLDEST = 2


def read_dataset(directory: Path) -> DatasetSpec:
    """Read the description of the data set in `directory`, but no shards.

    Raises:
        DataNotFoundError: No such directory, or no ``dataset.json`` in it.
        FormatError: The file is not JSON, not a data set, of another version, or a field is wrong (JSON path).
    """
    if not directory.is_dir():
        raise DataNotFoundError(directory, "no such directory, expected a data set made by 'terarec prepare'")
    path = directory / DATASET_FILE
    if not path.is_file():
        raise DataNotFoundError(directory, f"holds no {DATASET_FILE}, expected a data set made by 'terarec prepare'")
    data = read_versioned_json(path, FORMAT, VERSION, oldest=_OLDEST)
    for field in data:
        if field != "dataset":
            raise FormatError(path, f"$.{field}", "unknown field, expected only 'dataset'")
    try:
        return from_data(DatasetSpec, data.get("dataset"), f"{path}: $.dataset")
    except ConfigError as error:
        raise FormatError(error.where, error.problem) from None


def write_dataset(spec: DatasetSpec, directory: Path, *, location: Path | None = None) -> None:
    """Write ``dataset.json``, last, after HugeCTR's ``_metadata.json`` and ``_file_list.txt`` of each Parquet split.

    Args:
        spec: The data set; its shards exist already. Without splits only ``dataset.json`` is written.
        directory: Directory of the data set.
        location: Final directory, which HugeCTR's file lists name; None for `directory`.

    Raises:
        FormatError: A shard lies outside the directory of its split.
        StorageError: The disk is full.
    """
    for split, shards in spec.splits.items():
        for shard in shards:
            if shard.file.split("/")[:-1] != [split]:
                raise FormatError(directory, f"shard {shard.file!r} of split {split!r}, expected {split}/<file>")
        if spec.storage == "parquet" and shards:
            files = [((location or directory) / shard.file).resolve() for shard in shards]
            write_file_list(directory / split / FILE_LIST, files)
            write_parquet_metadata(
                directory / split / METADATA_FILE,
                [(shard.file.split("/")[-1], shard.rows) for shard in shards],
                [column.name for column in spec.labels],
                [column.name for column in spec.dense],
                [column.name for column in spec.categorical],
            )
    write_versioned_json(directory / DATASET_FILE, FORMAT, VERSION, {"dataset": to_data(spec)})


def workflow_files(spec: DatasetSpec, directory: Path) -> tuple[str, ...]:
    """Return the files of the workflow that encodes raw values, relative to `directory`, sorted; () if none.

    Raises:
        DataNotFoundError: The workflow that the data set names is missing.
    """
    if spec.workflow is None:
        return ()
    workflow = directory / spec.workflow
    found = [path for path in workflow.rglob("*") if path.is_file()]
    if not found:
        raise DataNotFoundError(workflow, f"no such workflow, which {directory / DATASET_FILE} names")
    return tuple(sorted(path.relative_to(directory).as_posix() for path in found))
