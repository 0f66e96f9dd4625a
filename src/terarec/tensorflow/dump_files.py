# SPDX-License-Identifier: Apache-2.0
"""Files of embedding variables in SOK's format, which SOK reads, too: `dump`, `load`, `assign` and `export`.

Each file has a header of 296 bytes (name of the table, kind, name of the state, type of the numbers) and then the plain
numbers of all rows, in the order of the keys in the file of keys.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError, FormatError
from terarec.io.files import atomic_file
from terarec.io.opening import open_file
from terarec.tensorflow.rules import rule_of
from terarec.tensorflow.variables import DynamicVariable, RowsVariable

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER_BYTES = 296
_NAME_BYTES, _STATE_BYTES = 256, 32
_KEY, _WEIGHT, _STATE = range(3)
_TYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
"""Types of numbers; the header has their place here."""


def dump(path: str | Path, dump_vars: RowsVariable | Sequence[RowsVariable], optimizer: Any | None = None) -> None:
    """Write variables, and the states of an optimizer, into a directory.

    Args:
        path: Directory, which is made where it is missing. Files of the same variables are replaced.
        dump_vars: Variables.
        optimizer: `OptimizerWrapper`, or an optimizer that it wraps; or a list of one. None for no states.

    Raises:
        ConfigError: Another kind of variable or optimizer, or states that a variable does not have yet.
    """
    folder = Path(path)
    for variable in _variables("dump_vars", dump_vars):
        ids, rows, states = variable.table.read()
        parts: dict[str, tuple[int, str, NDArray[Any]]] = {"key": (_KEY, "", ids), "weight": (_WEIGHT, "", rows)}
        for (file, slot), state in zip(_state_files(optimizer), states, strict=False):
            parts[file] = (_STATE, slot, state)
        if len(parts) < 2 + len(_state_files(optimizer)):
            raise ConfigError("optimizer", f"has no states of {variable.table.name!r} yet, expected a step before")
        for file, (kind, slot, numbers) in parts.items():
            name = variable.table.name
            with atomic_file(folder / f"{_file_name(name)}-{file}") as partial, partial.open("wb") as out:
                out.write(_header(name, kind, slot, numbers.dtype))
                numbers.tofile(out)


def load(path: str | Path, load_vars: RowsVariable | Sequence[RowsVariable], optimizer: Any | None = None) -> None:
    """Read variables, and the states of an optimizer, that `dump` or SOK has written.

    Rows of a static table are sorted by their keys. A dynamic variable has the keys of the file alone then.

    Args:
        path: Directory.
        load_vars: Variables of the names that they had.
        optimizer: As for `dump`.

    Raises:
        DataNotFoundError: A file is missing.
        FormatError: A file that is damaged, or of another dimension or number of rows; nothing was changed then.
    """
    folder, variables, contents = Path(path), _variables("load_vars", load_vars), []
    for variable in variables:
        base = folder / _file_name(variable.table.name)
        ids = _read(Path(f"{base}-key"), _KEY).astype(np.int64)
        width = variable.table.width
        rows = [_read_rows(Path(f"{base}-weight"), _WEIGHT, len(ids), width)]
        rows += [_read_rows(Path(f"{base}-{file}"), _STATE, len(ids), width) for file, _ in _state_files(optimizer)]
        if not isinstance(variable, DynamicVariable):
            order = np.argsort(ids, kind="stable")
            ids, rows = ids[order], [part[order] for part in rows]
            if not np.array_equal(ids, np.arange(len(variable.table))):
                raise FormatError(
                    f"{base}-key", f"has {len(ids)} keys, expected 0 to {len(variable.table) - 1}, each once"
                )
        contents.append((variable, ids, rows))
    for variable, ids, (weights, *states) in contents:
        variable.restore(ids, weights, states)


def assign(var: DynamicVariable, indices: tf.Tensor, values: tf.Tensor) -> DynamicVariable:
    """Set rows [n, D] by their ids [n]; a dynamic variable gets those that it lacks.

    Raises:
        ConfigError: Another kind of variable, or rows of another width.
    """
    (variable,) = _variables("var", var)
    variable.scatter_update(tf.IndexedSlices(tf.convert_to_tensor(values), tf.convert_to_tensor(indices)))
    return var


def export(var: DynamicVariable) -> tuple[tf.Tensor, tf.Tensor]:
    """Return all ids [n] and their rows float32[n, D], by rising ids.

    Raises:
        ConfigError: Another kind of variable.
    """
    (variable,) = _variables("var", var)
    ids, rows, _ = variable.table.read()
    order = np.argsort(ids, kind="stable")
    key_type = variable.key_type if isinstance(variable, DynamicVariable) else tf.int64
    return tf.constant(ids[order], key_type), tf.constant(rows[order])


def _variables(argument: str, variables: object) -> list[RowsVariable]:
    every = variables if isinstance(variables, list | tuple) else [variables]
    for one in every:
        if not isinstance(one, RowsVariable):
            raise ConfigError(argument, f"got {type(one).__name__}, expected sok.Variable or sok.DynamicVariable")
    return list(every)


def _state_files(optimizer: Any | None) -> list[tuple[str, str]]:
    """Return (end of the file's name, name of the state) of each state of an optimizer."""
    if isinstance(optimizer, list | tuple):
        if len(optimizer) != 1:
            raise ConfigError("optimizer", f"got {len(optimizer)}, expected one")
        optimizer = optimizer[0]
    if optimizer is None:
        return []
    wrapped = getattr(optimizer, "optimizer", optimizer)
    return [(f"{type(wrapped).__name__}-{state}", state) for state in rule_of(wrapped, lazy=True).states]


def _file_name(name: str) -> str:
    return "".join("_" if letter in string.punctuation else letter for letter in name)


def _header(name: str, kind: int, state: str, dtype: np.dtype[Any]) -> bytes:
    words = [(name.encode(), _NAME_BYTES), (state.encode(), _STATE_BYTES)]
    for word, most in words:
        if len(word) > most:
            raise ConfigError("name", f"got {len(word)} bytes, expected at most {most} in a file of SOK")
    (of_table, of_state) = (word.rjust(size) for word, size in words)
    return of_table + kind.to_bytes(4, "big") + of_state + _TYPES.index(dtype.name).to_bytes(4, "big")


def _read(path: Path, kind: int) -> NDArray[Any]:
    with open_file(path) as file:
        header = file.read(HEADER_BYTES)
        kind_at, type_at = _NAME_BYTES, HEADER_BYTES - 4
        number = int.from_bytes(header[type_at:], "big")
        if len(header) < HEADER_BYTES or int.from_bytes(header[kind_at : kind_at + 4], "big") != kind:
            raise FormatError(path, f"has no header of SOK, expected {HEADER_BYTES} bytes with kind {kind}")
        if number >= len(_TYPES):
            raise FormatError(path, f"has type {number}, expected 0 to {len(_TYPES) - 1}")
        content = file.read()
    dtype = np.dtype(_TYPES[number])
    if len(content) % dtype.itemsize:
        raise FormatError(path, f"has {len(content)} bytes of numbers, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype)


def _read_rows(path: Path, kind: int, rows: int, width: int) -> NDArray[np.float32]:
    numbers = _read(path, kind)
    if len(numbers) != rows * width:
        raise FormatError(path, f"has {len(numbers)} numbers, expected {rows} rows of {width}")
    return numbers.astype(np.float32).reshape(rows, width)
