"""Files next to Parquet files that NVTabular writes and HugeCTR reads: ``_file_list.txt`` and ``_metadata.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from terarec.errors import FormatError
from terarec.io import file_system, is_remote, read_json, read_text, write_bytes
from terarec.spec.quoting import quoted

FILE_LIST = "_file_list.txt"
METADATA_FILE = "_metadata.json"


def read_file_list(path: str | Path) -> tuple[str, ...]:
    """Read the paths of a file list, in order.

    Relative ones belong to the working directory; in a list behind a URL all of them belong to the list's file system
    unless they are URLs themselves.

    Raises:
        DataNotFoundError: No such list.
        FormatError: The first line is no number, or not the number of paths that follow.
    """
    lines = [line.strip() for line in read_text(path).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    first = lines[0] if lines else ""
    if not (first.isascii() and first.isdigit()):
        raise FormatError(f"{path}: line 1", f"got {first!r}, expected the number of files")
    names = lines[1:]
    if len(names) != int(first):
        raise FormatError(f"{path}: line 1", f"got {first} files, {len(names)} paths follow")
    if "" in names:
        raise FormatError(f"{path}: line {names.index('') + 2}", "empty, expected a path")
    return tuple(_on_the_file_system_of(str(path), name) for name in names)


def write_file_list(path: Path, files: Sequence[str | Path]) -> None:
    """Write a file list of `files`, atomically.

    Raises:
        StorageError: The disk is full.
    """
    write_bytes(path, "".join(f"{line}\n" for line in (len(files), *files)).encode())


def _on_the_file_system_of(file_list: str, name: str) -> str:
    if not is_remote(file_list) or is_remote(name):
        return name
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
    write_bytes(path, json.dumps(content).encode())


def base_name(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.rsplit("/", 1)[-1]


def _positions(data: Any, kind: str, where: str) -> tuple[int, ...]:
    entries = _field(data, kind, list, where)
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
