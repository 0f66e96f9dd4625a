# SPDX-License-Identifier: Apache-2.0
"""``dataset.json``, and the files next to Parquet shards that NVTabular writes and HugeCTR reads.

These are ``_file_list.txt`` and ``_metadata.json``, in the directory of a split. Described in docs/formats.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.urls import check_url
from terarec.io.exchange import end_exchange, end_replacement
from terarec.io.files import read_json, read_versioned_json, write_bytes, write_versioned_json
from terarec.io.remote import file_system, is_remote, read_text
from terarec.spec import DatasetSpec, from_data, to_data
from terarec.spec.checks import is_count, quoted

DATASET_FILE = "dataset.json"
FORMAT = "terarec.dataset"
VERSION = 3


def read_dataset(directory: Path) -> DatasetSpec:
    """Read the description of the data set in `directory`, but no shards.

    Raises:
        DataNotFoundError: No such directory, or no ``dataset.json`` in it.
        FormatError: The file is not JSON, not a data set, of another version, or a field is wrong (JSON path).
    """
    end_replacement(directory)  # of a replica, which was killed
    if not directory.is_dir():
        raise DataNotFoundError(directory, "no such directory, expected a data set made by 'terarec prepare'")
    path = directory / DATASET_FILE
    if not path.is_file():
        raise DataNotFoundError(directory, f"holds no {DATASET_FILE}, expected a data set made by 'terarec prepare'")
    data = read_versioned_json(path, FORMAT, VERSION)
    # A field of a later version would be dropped silently by a program that writes the file again.
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
            # Absolute, as HugeCTR takes relative paths from the directory in which a script runs.
            files = [((location or directory) / shard.file).resolve() for shard in shards]
            write_file_list(directory / split / FILE_LIST, files)
            write_parquet_metadata(
                directory / split / METADATA_FILE,
                [(shard.file.split("/")[-1], shard.rows) for shard in shards],
                [column.name for column in spec.labels],
                [column.name for column in spec.dense],
                [column.name for column in spec.categorical],
            )
    # Last: a directory with this file is complete.
    write_versioned_json(directory / DATASET_FILE, FORMAT, VERSION, {"dataset": to_data(spec)})


WORKFLOW_FILE = "workflow.json"
"""File of a saved workflow, without which its directory is none."""
STATES = "states"
"""Directory in a saved workflow: states of the fitted steps."""
EARLIER_ROWS = "earlier_rows"
"""Directory in a saved workflow: rows of the prepared files, from which the preparation of later files continues."""
WORKFLOW_ENTRIES = (WORKFLOW_FILE, EARLIER_ROWS, STATES)
"""Entries of a saved workflow, which `terarec.io.exchange` replaces: states of one never meet the steps of another."""


def workflow_files(spec: DatasetSpec, directory: Path) -> tuple[str, ...]:
    """Return the files of the workflow that encodes raw values, relative to `directory`, sorted; () if none.

    Those of `EARLIER_ROWS`, which no record needs, are not among them: they may be large, and hold rows of the logs.
    Nor are hidden ones, such as a save that was killed leaves.
    """
    if spec.workflow is None:
        return ()
    workflow = directory / spec.workflow
    if not (workflow / WORKFLOW_FILE).exists():
        end_exchange(workflow, WORKFLOW_ENTRIES)
    paths = [
        path
        for path in workflow.rglob("*")
        if path.is_file()
        and path.parent.name != EARLIER_ROWS
        and not any(part.startswith(".") for part in path.relative_to(workflow).parts)
    ]
    if not paths:
        raise DataNotFoundError(workflow, f"no such workflow, which {directory / DATASET_FILE} names")
    return tuple(sorted(path.relative_to(directory).as_posix() for path in paths))


FILE_LIST = "_file_list.txt"
METADATA_FILE = "_metadata.json"


def read_file_list(path: str | Path) -> tuple[str, ...]:
    """Read the paths of a file list, in order.

    Relative ones belong to the working directory; in a list behind a URL all of them belong to the list's file system
    unless they are URLs themselves.

    Raises:
        DataNotFoundError: No such list.
        FormatError: The first line is not a number, or not the number of paths that follow.
        ConfigError: It names a URL that the caller does not allow, see `terarec.formats.urls.check_url`.
    """
    # Files of other systems may end lines with a carriage return.
    lines = [line.strip() for line in read_text(path).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    first = lines[0] if lines else ""
    # `int` takes signs, underscores and digits of every script.
    if not is_count(first):
        raise FormatError(f"{path}: line 1", f"got {first!r}, expected the number of files")
    names = lines[1:]
    if len(names) != int(first):
        raise FormatError(f"{path}: line 1", f"got {first} files, {len(names)} paths follow")
    if "" in names:
        raise FormatError(f"{path}: line {names.index('') + 2}", "empty, expected a path")
    return tuple(check_url(_on_the_file_system_of(str(path), name), path) for name in names)


def write_file_list(path: Path, files: Sequence[str | Path]) -> None:
    """Write a file list of `files`, atomically.

    Raises:
        StorageError: The disk is full.
    """
    write_bytes(path, "".join(f"{line}\n" for line in (len(files), *files)).encode())


def _on_the_file_system_of(file_list: str, name: str) -> str:
    if not is_remote(file_list) or is_remote(name):
        return name
    # As other systems write lists: paths on the file system where the list is.
    files, _ = file_system(file_list)
    return str(files.unstrip_protocol(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetMetadata:
    """Content of a ``_metadata.json``.

    Attributes:
        path: Path of the file, for errors.
        num_rows: Rows of each file, by base name.
        labels: Positions of the label columns, ascending.
        dense: Positions of the dense columns, ascending.
        keys: Positions of the key columns, ascending: slot k is the k-th.
    """

    path: str
    num_rows: Mapping[str, int]
    labels: tuple[int, ...]
    dense: tuple[int, ...]
    keys: tuple[int, ...]


def read_parquet_metadata(path: str | Path) -> ParquetMetadata:
    """Read a ``_metadata.json``; skip fields that HugeCTR does not read.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not JSON, or a field is missing or wrong (JSON path).
    """
    data = read_json(path, f"a {METADATA_FILE}")
    where = f"{path}: $"
    num_rows: dict[str, int] = {}
    for index, entry in enumerate(_field(data, "file_stats", list, where)):
        here = f"{where}.file_stats[{index}]"
        name = base_name(_field(entry, "file_name", str, here))
        num_rows[name] = _count(entry, "num_rows", here)
    positions = {kind: _positions(data, kind, where) for kind in ("labels", "conts", "cats")}
    # HugeCTR reads columns by position, not by name: one of two kinds would be read twice.
    repeated = [index for index in positions["labels"] if index in positions["conts"] + positions["cats"]]
    repeated += [index for index in positions["conts"] if index in positions["cats"]]
    if repeated:
        raise FormatError(where, f"column {repeated[0]} is of two kinds, expected one of labels, conts and cats")
    return ParquetMetadata(
        path=str(path),
        num_rows=num_rows,
        labels=positions["labels"],
        dense=positions["conts"],
        keys=positions["cats"],
    )


def write_parquet_metadata(
    path: Path, files: Sequence[tuple[str, int]], labels: Sequence[str], dense: Sequence[str], keys: Sequence[str]
) -> None:
    """Write a ``_metadata.json``, atomically.

    Args:
        path: Path of the file.
        files: Base name and rows of each Parquet file.
        labels: Names of the label columns, which the files hold first.
        dense: Names of the dense columns, which follow.
        keys: Names of the key columns, the last.

    Raises:
        StorageError: The disk is full.
    """
    columns = [{"col_name": name, "index": index} for index, name in enumerate([*labels, *dense, *keys])]
    first_dense, first_key = len(labels), len(labels) + len(dense)
    content = {
        "file_stats": [{"file_name": name, "num_rows": rows} for name, rows in files],
        "cats": columns[first_key:],
        "conts": columns[first_dense:first_key],
        "labels": columns[:first_dense],
    }
    # NVTabular's field names, which HugeCTR looks for.
    write_bytes(path, json.dumps(content).encode())


def base_name(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.rsplit("/", 1)[-1]


def _positions(data: Any, kind: str, where: str) -> tuple[int, ...]:
    entries = _field(data, kind, list, where)
    # By position, not in the order of the list: slot k is the k-th key column of the file.
    positions = sorted(_count(entry, "index", f"{where}.{kind}[{i}]") for i, entry in enumerate(entries))
    if len(set(positions)) != len(positions):
        raise FormatError(f"{where}.{kind}", f"an index occurs twice in {positions}")
    return tuple(positions)


def _count(entry: Any, name: str, where: str) -> int:
    value = _field(entry, name, int, where)
    if isinstance(value, bool) or value < 0:
        _reject(f"{where}.{name}", value, "an integer >= 0")
    return int(value)


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        _reject(where, entry, "an object")
    if name not in entry:
        raise FormatError(f"{where}.{name}", "missing")
    if not isinstance(entry[name], kind):
        _reject(f"{where}.{name}", entry[name], {list: "a list", str: "a string", int: "an integer"}[kind])
    return entry[name]


def _reject(where: str, value: Any, expected: str) -> NoReturn:
    raise FormatError(where, f"got {quoted(value)}, expected {expected}")
