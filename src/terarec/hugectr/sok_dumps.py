# SPDX-License-Identifier: Apache-2.0
"""Tables of a run as files of the Sparse Operation Kit, and such files as HugeCTR's sparse models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from terarec.checkpoint import load
from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.errors import DataNotFoundError, FormatError
from terarec.export.table_rows import table_vectors
from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.models.artifact import find_checkpoint
from terarec.tensorflow.sok_files import KEY, WEIGHT, file_name, header_of, read_numbers


def write_dump(run: Path, out: Path, *, allow_import: Sequence[str] = ()) -> dict[str, int]:
    """Write the keys and vectors of all tables of a run as `sok.load` reads them.

    Args:
        run: Directory of the run.
        out: New directory for two files for each table.
        allow_import: Packages whose code a model of the kind "python" may name.

    Returns:
        Number of rows of each table.

    Raises:
        DataNotFoundError: `run` is not a run, or holds no complete checkpoint.
        ConfigError: `out` holds something.
        FormatError: A damaged file.
    """
    check_replaceable(out)
    names = load(find_checkpoint(run, load_run(run / RUN_FILE))).table_files().names
    counts = dict.fromkeys(names, 0)
    with atomic_dir(out) as partial:
        for name in names:
            base = partial / file_name(name)
            with Path(f"{base}-key").open("wb") as keys, Path(f"{base}-weight").open("wb") as weights:
                keys.write(header_of(name, KEY, "", np.dtype(np.int64)))
                weights.write(header_of(name, WEIGHT, "", np.dtype(np.float32)))
                for ids, vectors in table_vectors(run, name, allow_import=allow_import):
                    keys.write(ids.astype("<i8", copy=False).tobytes())
                    weights.write(np.ascontiguousarray(vectors, "<f4").tobytes())
                    counts[name] += len(ids)
    return counts


def write_sparse_models(dump: Path, out: Path) -> dict[str, int]:
    """Write each table of a directory of SOK's files as a sparse model of HugeCTR, which its scripts load.

    Args:
        dump: Directory that `sok.dump` has written.
        out: New directory for one folder for each table, of the name of its files.

    Returns:
        Number of rows of each table.

    Raises:
        DataNotFoundError: There is no table in `dump`.
        ConfigError: `out` holds something.
        FormatError: A damaged file, or vectors that do not fit the keys.
    """
    check_replaceable(out)
    names = sorted(path.name.removesuffix("-key") for path in dump.glob("*-key"))
    if not names:
        raise DataNotFoundError(dump, "no file of keys, expected a directory that sok.dump has written")
    counts = {}
    with atomic_dir(out) as partial:
        for name in names:
            keys = read_numbers(dump / f"{name}-key", KEY).astype(np.int64)
            numbers = read_numbers(dump / f"{name}-weight", WEIGHT).astype(np.float32)
            if not len(keys) or len(numbers) % len(keys):
                raise FormatError(
                    dump / f"{name}-weight",
                    f"has {len(numbers)} numbers, expected as many for each of {len(keys)} keys",
                )
            counts[name] = write_sparse_folder(partial / name, [SparseRows(keys, numbers.reshape(len(keys), -1))])
    return counts
