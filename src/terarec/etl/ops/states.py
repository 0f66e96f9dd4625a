"""Files of the states of fitted operators.

Parameters are saved as JSON, what has a row for each value as Parquet. Described in docs/workflows.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.parquet import arrow_errors
from terarec.io import AtomicFile, read_versioned_json, write_versioned_json
from terarec.spec.quoting import quoted

STATE_FORMAT = "terarec.state"
STATE_VERSION = 1


def write_params(directory: Path, name: str, kind: str, state: Mapping[str, Any]) -> None:
    """Write ``<name>.json``: the parameters of the step `name` of this `kind`; numbers come back bit for bit.

    Raises:
        StorageError: The disk is full.
    """
    write_versioned_json(directory / f"{name}.json", STATE_FORMAT, STATE_VERSION, {"kind": kind, "state": state})


def read_params(directory: Path, name: str, kind: str) -> Mapping[str, Any]:
    """Read what `write_params` wrote.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a state, or one of another kind.
    """
    path = directory / f"{name}.json"
    content = read_versioned_json(path, STATE_FORMAT, STATE_VERSION)
    if content.get("kind") != kind:
        raise FormatError(f"{path}: $.kind", f"got {quoted(content.get('kind'))}, expected {kind!r}")
    state = content.get("state")
    if not isinstance(state, dict):
        raise FormatError(f"{path}: $.state", f"got {quoted(state)}, expected an object")
    return state


def table_path(directory: Path, name: str, part: str) -> Path:
    """Return ``<name>-<part>.parquet``; characters of `part`, a column, that no file name holds become ``%2F``."""
    return directory / f"{name}-{quote(part, safe=' ')}.parquet"


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically.

    Raises:
        StorageError: The disk is full.
    """
    file = AtomicFile(path)
    with file.guard():
        pq.write_table(table, file.partial, write_page_checksum=True)
    file.commit()


def read_table(path: Path, types: Mapping[str, Sequence[pa.DataType]], nullable: Sequence[str] = ()) -> pa.Table:
    """Read what `write_table` wrote.

    Args:
        path: Path of the file.
        types: Its columns, and the types that each may have.
        nullable: Columns that may hold nulls.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a Parquet file, other columns or types, or a null.
    """
    if not path.is_file():
        raise DataNotFoundError(path, "no such file")
    with arrow_errors(str(path)):
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
    fields = {field.name: field.type for field in table.schema}
    if fields.keys() != types.keys() or any(found not in types[name] for name, found in fields.items()):
        shown = ", ".join(f"{name}: {found}" for name, found in fields.items())
        expected = ", ".join(f"{name}: {' or '.join(map(str, accepted))}" for name, accepted in types.items())
        raise FormatError(path, f"got columns {shown}, expected {expected}")
    for name in types:
        if name not in nullable and table.column(name).null_count:
            raise FormatError(f"{path}, column {name!r}", "holds nulls, expected none")
    return table.combine_chunks()
