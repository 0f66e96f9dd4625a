# SPDX-License-Identifier: Apache-2.0
"""Files of embedding variables in SOK's format, which SOK reads, too: `dump`, `load`, `assign` and `export`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from terarec.errors import ConfigError, FormatError
from terarec.io.directories import atomic_entries
from terarec.io.exchange import end_entries
from terarec.io.files import flush
from terarec.tensorflow.communication import current, gathered, send_to_all
from terarec.tensorflow.dynamic_variables import DynamicVariable
from terarec.tensorflow.rules import rule_of
from terarec.tensorflow.sok_files import (
    KEY,
    STATE,
    WEIGHT,
    file_name,
    file_names,
    header_of,
    kind_of,
    named_table,
    read_numbers,
    read_rows,
)
from terarec.tensorflow.tables import Rule
from terarec.tensorflow.variables import RowsVariable, needed_rows, whole_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE_BYTES = 64 << 20
"""Bytes that a rank sends at once."""


def dump(path: str | Path, dump_vars: RowsVariable | Sequence[RowsVariable], optimizer: Any | None = None) -> None:
    """Write variables, and the states of an optimizer, into a directory.

    Args:
        path: Directory, which is made where it is missing. Files of the same variables are replaced, and those of other
            states of them removed, when all are written.
        dump_vars: Variables.
        optimizer: `OptimizerWrapper`, that of `terarec.tensorflow.keras`, `SGD`, `Adam`, or an optimizer that can be
            wrapped; or a list of one. None for no states.

    Raises:
        ConfigError: Another kind of variable or optimizer, states that a variable does not have yet, or variables whose
            files would have one name.
    """
    folder, (kinds, rule), variables = Path(path), _rule(optimizer), _variables("dump_vars", dump_vars)
    bases = file_names(one.name for one in variables)
    # States that this call does not write are those of other rows. Copies of files under other names stay.
    former = (
        file
        for base in bases
        for file in folder.glob(f"{base}-*")
        if (file.name == f"{base}-key" and kind_of(file) == KEY)
        or (re.fullmatch(r"-\w+-\w+", file.name[len(base) :]) and kind_of(file) == STATE)
    )
    with files_of_all(folder, former) as partial:
        for variable, base in zip(variables, bases, strict=True):
            table = variable.table
            ids, rows, states = table.read()
            if len(states) < len(rule.states):
                raise ConfigError("optimizer", f"has no states of {table.name!r} yet, expected a step before")
            order = np.argsort(ids, kind="stable")
            keys = table.placement.all_ids(ids[order]).astype(_key_type(variable).as_numpy_dtype)
            parts: list[tuple[str, int, str, NDArray[Any]]] = [
                ("key", KEY, "", keys),
                ("weight", WEIGHT, "", rows[order]),
            ]
            for slot, state in zip(rule.states, states, strict=False):
                parts.append((f"{kinds[0]}-{slot}", STATE, slot, state[order]))
            for file, kind, slot, numbers in parts:
                header = header_of(table.name, kind, slot, numbers.dtype)
                write_of_all(partial / f"{base}-{file}", header, numbers, table.width)


@contextmanager
def files_of_all(folder: Path, former: Iterable[Path]) -> Iterator[Path]:
    """Yield a directory for `write_of_all`, whose files rank 0 moves to `folder` when all are complete.

    Args:
        folder: Directory, which is made where it is missing.
        former: Files there that say which rows others have, keys above all. They are removed before the first file
            moves, so that a process that ends then leaves files without keys or states, and none of other rows.

    Raises:
        CollectiveError: A rank has ended or does not answer.
    """
    ranks = current()
    with atomic_entries(folder) if ranks.rank == 0 else nullcontext(folder) as partial:
        yield partial
        if ranks.rank == 0:
            for file in list(former):
                file.unlink(missing_ok=True)
    send_to_all(f"end of files in {folder.name}", [np.zeros(0, np.uint8)] * ranks.size)


def write_of_all(path: Path, header: bytes, numbers: NDArray[Any], width: int) -> None:
    """Write a header and the numbers of all ranks to a file, by rank 0.

    Args:
        path: The file, in the directory of `files_of_all`.
        header: Its first bytes.
        numbers: [n] or [n, D] of this rank, whose first axis is that of the variable's rows.
        width: Width D of the rows, which determines how many of them a rank sends at once.

    Raises:
        CollectiveError: A rank has ended or does not answer.
    """
    ranks, most = current(), max(1, _PIECE_BYTES // (4 * width))
    (counts,) = gathered(f"rows for {path.name}", [np.array([len(numbers)])])
    nothing = np.zeros(0, np.uint8)
    with path.open("wb") if ranks.rank == 0 else nullcontext() as out:
        if out is not None:
            out.write(header)
        for first in range(0, max(counts), most):
            piece = np.ascontiguousarray(numbers[first : first + most]).reshape(-1).view(np.uint8)
            for part in send_to_all(f"rows for {path.name}", [piece] + [nothing] * (ranks.size - 1)):
                if out is not None:
                    part.tofile(out)
    if out is not None:
        flush(path)  # before former files are removed, not after


def load(path: str | Path, load_vars: RowsVariable | Sequence[RowsVariable], optimizer: Any | None = None) -> None:
    """Read variables, and the states of an optimizer, that `dump` or SOK has written.

    Rows of a static table are sorted by their keys. A dynamic variable has the keys of the file alone then.

    Args:
        path: Directory.
        load_vars: Variables of the names that they had.
        optimizer: As for `dump`.

    Raises:
        DataNotFoundError: A file is missing.
        FormatError: A file that is damaged, of another variable, or of another dimension or number of rows.
        ConfigError: More rows than a variable has room for, or ids beyond its `key_type`. Nothing was changed then.
    """
    folder, contents, (kinds, rule) = Path(path), [], _rule(optimizer)
    end_entries(folder)  # of a dump that was killed
    for variable in _variables("load_vars", load_vars):
        table = variable.table
        base, older = file_name(variable.name), file_name(table.name)  # as older versions had it
        keys, older_keys = (folder / f"{one}-key" for one in (base, older))
        # Another variable's files may have that name: "x" and "x_0".
        if not keys.exists() and older_keys.exists() and named_table(older_keys) == table.name:
            base, keys = older, older_keys
        ids = read_numbers(keys, KEY, table.name).astype(np.int64)
        files = [(folder / f"{base}-weight", WEIGHT)]
        for slot in rule.states:
            every = [folder / f"{base}-{kind}-{slot}" for kind in kinds]
            files.append((next((file for file in every if file.exists()), every[0]), STATE))
        rows = [read_rows(file, kind, len(ids), table.width, table.name) for file, kind in files]
        ids, rows = own_part(variable, ids, rows, str(keys))
        contents.append((table, ids, rows))
    for table, ids, (weights, *states) in contents:
        table.have_states(rule)
        table.write(ids, weights, states)


def own_part(
    variable: RowsVariable, ids: NDArray[np.int64], rows: list[NDArray[np.float32]], where: str
) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
    """Return what this rank has of ids [n] and rows [n, D] of all ranks; those of fixed rows by rising ids.

    Raises:
        FormatError: Ids of fixed rows that are not all, each once.
        ConfigError: Those of other rows, of which a rank has no place for its own.
    """
    placement = variable.table.placement
    if variable.table.grows:
        variable.check_saved(ids, rows[0])
        owns = placement.owns(ids)
        return ids[owns], [part[owns] for part in rows]
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(ids[order], np.arange(placement.all_rows)):
        raise FormatError(where, f"has {len(ids)} keys, expected 0 to {placement.all_rows - 1}, each once")
    own = order[placement.rows]
    return np.arange(len(own)), [part[own] for part in rows]


def incremental_model_dump(
    sok_vars: Sequence[DynamicVariable], time_threshold: datetime | Sequence[datetime], sess: None = None
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]]:
    """Return the keys of variables that were looked up in training, or set, since a time, and their rows.

    Args:
        sok_vars: Variables of "hybrid".
        time_threshold: Time with a time zone, for all or for each variable.
        sess: None.

    Returns:
        For each variable the keys [n] of all ranks, and their rows float32[n, D].

    Raises:
        ConfigError: Another kind of variable, another number of times, or one without a time zone.
    """
    variables = _variables("sok_vars", sok_vars)
    times = list(time_threshold) if isinstance(time_threshold, list | tuple) else [time_threshold]
    times = times * len(variables) if len(times) == 1 else times
    if len(times) != len(variables):
        raise ConfigError("time_threshold", f"got {len(times)}, expected {len(variables)}, one for each variable")
    keys, values = [], []
    for variable, time in zip(variables, times, strict=True):
        if not isinstance(variable, DynamicVariable) or variable.backend_type != "hybrid":
            raise ConfigError("sok_vars", f"{variable.table.name!r} has no times, expected var_type 'hybrid'")
        if not isinstance(time, datetime) or time.tzinfo is None:
            raise ConfigError("time_threshold", f"got {time!r}, expected a datetime with a time zone")
        changes = variable.table.since(round(time.timestamp() * 1e6))
        ids, rows = gathered(f"changes of {variable.table.name}", list(changes))
        keys.append(ids.astype(variable.key_type.as_numpy_dtype))
        values.append(rows.reshape(-1, variable.table.width))
    return keys, values


def assign(var: DynamicVariable, indices: tf.Tensor, values: tf.Tensor) -> DynamicVariable:
    """Set rows [n, D] by their ids [n]; a dynamic variable gets those that it lacks. A rank leaves others' out.

    Raises:
        ConfigError: Another kind of variable, ids that are no integers, or rows of another width.
    """
    variable, rows = needed_rows("var", var), tf.convert_to_tensor(values)
    if not rows.shape.is_compatible_with([None, variable.table.width]):
        raise ConfigError("values", f"got shape {rows.shape}, expected [n, {variable.table.width}]")
    variable.scatter_update(variable.own_slices(whole_numbers("indices", indices), rows))
    return var


def export(var: DynamicVariable) -> tuple[tf.Tensor, tf.Tensor]:
    """Return all ids [n] of this rank and their rows float32[n, D], by rising ids.

    Raises:
        ConfigError: Another kind of variable.
    """
    variable = needed_rows("var", var)
    ids, rows, _ = variable.table.read()
    order = np.argsort(ids, kind="stable")
    return tf.constant(variable.table.placement.all_ids(ids[order]), _key_type(variable)), tf.constant(rows[order])


def _key_type(variable: RowsVariable) -> tf.DType:
    return variable.key_type if isinstance(variable, DynamicVariable) else tf.int64


def _variables(argument: str, variables: object) -> list[RowsVariable]:
    return [needed_rows(argument, one) for one in (variables if isinstance(variables, list | tuple) else [variables])]


def _rule(optimizer: Any | None) -> tuple[list[str], Rule]:
    """Return the names that an optimizer may have in files, that of SOK first, and its rule."""
    if isinstance(optimizer, list | tuple):
        if len(optimizer) != 1:
            raise ConfigError("optimizer", f"got {len(optimizer)}, expected one")
        optimizer = optimizer[0]
    if optimizer is None:
        return [], Rule(kind="sgd", numbers={})
    wrapped = getattr(optimizer, "optimizer", getattr(optimizer, "inner", optimizer))
    name, rule = type(wrapped).__name__, getattr(optimizer, "rule", None)
    # SOK takes everything with "Adam" in its name for Adam.
    return ["Adam", name] if "Adam" in name else [name], rule if isinstance(rule, Rule) else rule_of(wrapped, lazy=True)
