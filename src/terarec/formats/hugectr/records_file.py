"""``records.json``: what HugeCTR's files of a directory hold. See docs/hugectr-formats.md."""

from __future__ import annotations

from pathlib import Path

from terarec.errors import ConfigError, FormatError
from terarec.io import read_versioned_json, write_versioned_json
from terarec.spec import RecordsSpec, from_data, to_data

RECORDS_FILE = "records.json"
FORMAT = "terarec.records"
VERSION = 1


def read_records(path: Path) -> RecordsSpec:
    """The content of a ``records.json``.

    Raises:
        DataNotFoundError: no such file.
        FormatError: the file is not JSON, of another format or a newer version, or a field is wrong (JSON path).
    """
    data = read_versioned_json(path, FORMAT, VERSION)
    for field in data:
        if field != "records":
            raise FormatError(f"{path}: $.{field}: unknown field, expected only 'records'")
    try:
        return from_data(RecordsSpec, data.get("records"), f"{path}: $.records")
    except ConfigError as error:
        raise FormatError(str(error)) from None


def write_records(spec: RecordsSpec, path: Path) -> None:
    """Write a ``records.json``, atomically.

    Raises:
        StorageError: the disk is full.
    """
    write_versioned_json(path, FORMAT, VERSION, {"records": to_data(spec)})
