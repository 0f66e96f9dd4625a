# SPDX-License-Identifier: Apache-2.0
"""The format of SOK's files of tables, without TensorFlow.

Each file has a header of 296 bytes (name of the table, kind, name of the state, type of the numbers) and then the plain
numbers of all rows, in the order of the keys in the file of keys.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from terarec.errors import ConfigError, FormatError
from terarec.io.opening import open_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER_BYTES = 296
_NAME_BYTES, _STATE_BYTES = 256, 32
KEY, WEIGHT, STATE = range(3)
"""Kinds of files."""
_TYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
"""Types of numbers; the header has their place here."""


def file_name(name: str) -> str:
    """Return the beginning of the names of a table's files; TensorFlow's name of a variable ends with ":0"."""
    return "".join("_" if letter in string.punctuation else letter for letter in name)


def file_names(names: Iterable[str]) -> list[str]:
    """Return `file_name` of each name.

    Raises:
        ConfigError: Two names have one.
    """
    name_of: dict[str, str] = {}
    for name in names:
        if (file := file_name(name)) in name_of:
            raise ConfigError("name", f"{name_of[file]!r} and {name!r} have one name of files, {file!r}")
        name_of[file] = name
    return list(name_of)


def header_of(name: str, kind: int, state: str, dtype: np.dtype[Any]) -> bytes:
    """Return the header of a file.

    Args:
        name: Name of the table.
        kind: `KEY`, `WEIGHT` or `STATE`.
        state: Name of the state; "" for keys and weights.
        dtype: Type of the numbers.

    Raises:
        ConfigError: A name that is too long.
    """
    words = [(name.encode(), _NAME_BYTES), (state.encode(), _STATE_BYTES)]
    for word, most in words:
        if len(word) > most:
            raise ConfigError("name", f"got {len(word)} bytes, expected at most {most} in a file of SOK")
    (of_table, of_state) = (word.rjust(size) for word, size in words)
    return of_table + kind.to_bytes(4, "big") + of_state + _TYPES.index(dtype.name).to_bytes(4, "big")


def kind_of(path: Path) -> int | None:
    """Return the kind of a file, one of `KEY`, `WEIGHT` and `STATE`; None for another file or a directory."""
    if not path.is_file():
        return None
    with open_file(path) as file:
        header = file.read(HEADER_BYTES)
    kind = int.from_bytes(header[_NAME_BYTES : _NAME_BYTES + 4], "big")
    return kind if len(header) == HEADER_BYTES and kind in (KEY, WEIGHT, STATE) else None


def named_table(path: Path) -> str:
    """Return the name of the table that the header of a file has; "" where it is blank.

    Raises:
        DataNotFoundError: There is no such file.
    """
    with open_file(path) as file:
        return _named_table(file.read(_NAME_BYTES))


def _named_table(header: bytes) -> str:
    return header[:_NAME_BYTES].decode(errors="replace").strip()


def read_numbers(path: Path, kind: int, name: str = "") -> NDArray[Any]:
    """Return the numbers of a file.

    Args:
        path: The file.
        kind: `KEY`, `WEIGHT` or `STATE`.
        name: Name of the table; another one whose files have the same names may have written the file. "" for any.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: It is damaged, of another kind or another table.
    """
    with open_file(path) as file:
        header = file.read(HEADER_BYTES)
        kind_at, type_at = _NAME_BYTES, HEADER_BYTES - 4
        number = int.from_bytes(header[type_at:], "big")
        if len(header) < HEADER_BYTES or int.from_bytes(header[kind_at : kind_at + 4], "big") != kind:
            raise FormatError(path, f"has no header of SOK, expected {HEADER_BYTES} bytes with kind {kind}")
        of_table = _named_table(header)  # "" in files of SOK
        # Older versions left TensorFlow's ":0" out. A renamed file is that of the table that it is renamed for.
        own_names = [file_name(of_table), file_name(f"{of_table}:0")] if of_table else []
        if name and of_table != name and path.name.partition("-")[0] in own_names:
            raise FormatError(path, f"has the rows of {of_table!r}, expected those of {name!r}")
        if number >= len(_TYPES):
            raise FormatError(path, f"has type {number}, expected 0 to {len(_TYPES) - 1}")
        content = file.read()
    dtype = np.dtype(_TYPES[number])
    if len(content) % dtype.itemsize:
        raise FormatError(path, f"has {len(content)} bytes of numbers, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype)


def read_rows(path: Path, kind: int, rows: int, width: int, name: str) -> NDArray[np.float32]:
    """Return the rows float32[rows, width] of a file; see `read_numbers`.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: It is damaged, of another kind or table, or has another number of numbers.
    """
    numbers = read_numbers(path, kind, name)
    if len(numbers) != rows * width:
        raise FormatError(path, f"has {len(numbers)} numbers, expected {rows} rows of {width}")
    return numbers.astype(np.float32).reshape(rows, width)
