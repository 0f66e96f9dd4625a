# SPDX-License-Identifier: Apache-2.0
"""Tables of a run as files of the Sparse Operation Kit, and such files as HugeCTR's sparse models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from terarec.checkpoint import load
from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.errors import DataNotFoundError, FormatError
from terarec.export.table_rows import TableChunk, table_chunks
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.models.artifact import find_checkpoint
from terarec.tensorflow.sok_files import KEY, STATE, WEIGHT, file_name, file_names, header_of, named_table, read_numbers

_KERAS_STATES = {
    ("exp_avg", "exp_avg_sq"): ("Adam", ("m", "v")),
    ("exp_avg_sq",): ("RMSprop", ("rms",)),
    ("linear", "sum"): ("Ftrl", ("linear", "accumulator")),
    ("sum",): ("Adagrad", ("accumulator",)),
}
"""Sorted names of a table's states -> the optimizer of Keras with the same ones, and its names of them."""


def write_dump(run: Path, out: Path, *, allow_import: Sequence[str] = ()) -> dict[str, int]:
    """Write the keys, vectors and optimizer states of all tables of a run as `sok.load` reads them.

    States are those of Adam, RMSprop, FTRL and AdaGrad; of others, and of rows that make up for missed steps later,
    the files have none.

    Args:
        run: Directory of the run.
        out: New directory for the files of each table.
        allow_import: Packages whose code a model of the kind "python" may name.

    Returns:
        Number of rows of each table.

    Raises:
        DataNotFoundError: `run` is not a run, or holds no complete checkpoint.
        ConfigError: `out` holds something, or the files of two tables would have one name.
        FormatError: A damaged file.
    """
    check_replaceable(out)
    spec = load_run(run / RUN_FILE)
    names = load(find_checkpoint(run, spec)).table_files().names
    optimizers = (spec.sparse_optimizer, *spec.row_optimizers.values())
    initial = {getattr(one, "initial_accumulator", 0.0) for one in optimizers}
    files = file_names(f"{name}:0" for name in names)  # as of a variable in TensorFlow
    with atomic_dir(out) as partial:
        return {
            name: _write_table(partial / file, name, table_chunks(run, name, allow_import=allow_import), initial)
            for name, file in zip(names, files, strict=True)
        }


def _write_table(path: Path, name: str, chunks: Iterator[TableChunk], initial: set[float]) -> int:
    """Write the files of a table, and return the number of its rows.

    Rows that training has not changed have the `initial` sums of AdaGrad and FTRL.
    """
    count = 0
    with ExitStack() as opened:

        def start(end: str, kind: int, state: str = "", dtype: type[np.generic] = np.float32) -> BinaryIO:
            file = opened.enter_context(Path(f"{path}-{end}").open("wb"))
            file.write(header_of(name, kind, state, np.dtype(dtype)))
            return file

        keys, weights = start("key", KEY, dtype=np.int64), start("weight", WEIGHT)
        states: dict[str, BinaryIO] | None = None
        for chunk in chunks:
            if states is None:  # they are known with the first rows
                optimizer, slots = _keras_states(chunk, initial)
                states = {
                    own: start(f"{optimizer}-{slot}", STATE, slot)
                    for own, slot in zip(sorted(chunk.states) if slots else (), slots, strict=True)
                }
            keys.write(chunk.keys.astype("<i8", copy=False).tobytes())
            weights.write(np.ascontiguousarray(chunk.vectors, "<f4").tobytes())
            for own, file in states.items():
                first = min(initial) if own == "sum" else 0.0
                values = chunk.states.get(own, np.full_like(chunk.vectors, first))
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
            count += len(chunk.keys)
    return count


def _keras_states(chunk: TableChunk, initial: set[float]) -> tuple[str, tuple[str, ...]]:
    """Return the optimizer of Keras that has a table's states, and its names of them; none if there is no such."""
    names = tuple(sorted(chunk.states))
    is_known = names in _KERAS_STATES and all(values.ndim == 2 for values in chunk.states.values())
    return _KERAS_STATES[names] if is_known and ("sum" not in names or len(initial) == 1) else ("", ())


def write_sparse_models(dump: Path, out: Path) -> dict[str, int]:
    """Write each table of a directory of SOK's files as a sparse model of HugeCTR, which its scripts load.

    Args:
        dump: Directory that `sok.dump` has written.
        out: New directory for one folder for each table, of the name of its files without "_0" for TensorFlow's ":0".

    Returns:
        Number of rows of each table.

    Raises:
        DataNotFoundError: There is no table in `dump`.
        ConfigError: `out` holds something.
        FormatError: A damaged file, vectors that do not fit the keys, or two tables of one name.
    """
    check_replaceable(out)
    file_of: dict[str, str] = {}
    for path in sorted(dump.glob("*-key")):
        name, of_table = path.name.removesuffix("-key"), named_table(path)
        # "x_0" is the name of "x:0", and in older versions of "x_0"; files of SOK itself may not name the table.
        is_of_tensorflow = not of_table or name == file_name(f"{of_table.removesuffix(':0')}:0")
        table = name.removesuffix("_0") if is_of_tensorflow else name
        if table in file_of:
            raise FormatError(path, f"has the keys of {table!r} like {file_of[table]}-key, expected one of them")
        file_of[table] = name
    if not file_of:
        raise DataNotFoundError(dump, "no file of keys, expected a directory that sok.dump has written")
    counts = {}
    with atomic_dir(out) as partial:
        for table, name in file_of.items():
            keys = read_numbers(dump / f"{name}-key", KEY).astype(np.int64)
            numbers = read_numbers(dump / f"{name}-weight", WEIGHT).astype(np.float32)
            if not len(keys) or len(numbers) % len(keys):
                raise FormatError(
                    dump / f"{name}-weight",
                    f"has {len(numbers)} numbers, expected as many for each of {len(keys)} keys",
                )
            counts[table] = write_sparse_folder(partial / table, [SparseRows(keys, numbers.reshape(len(keys), -1))])
    return counts
