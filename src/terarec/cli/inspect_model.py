# SPDX-License-Identifier: Apache-2.0
"""Output of ``terarec inspect`` for a checkpoint or a RUN: tables and dense parameters, or the rows of one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.checkpoint import find
from terarec.checkpoint.directory import DENSE, KEYS, MANIFEST, STATE_PREFIX, WEIGHTS, read_chain
from terarec.checkpoint.table_chain import TableChain
from terarec.checkpoint.table_files import Arrays
from terarec.config import load_run
from terarec.config.files import CHECKPOINT_DIRECTORY, DATASET_DIRECTORY, RUN_FILE
from terarec.errors import ConfigError, DataNotFoundError
from terarec.etl.workflow import workflow_of
from terarec.etl.workflow.datasets import IdValues
from terarec.export.table_rows import write_table_file
from terarec.formats import read_dataset
from terarec.formats.container import BFLOAT16, read_tensors, widen_bfloat16
from terarec.kernels.hash_index import new_hash_index
from terarec.models.artifact import find_checkpoint
from terarec.serve.executor_file import EXECUTORS_FILE, graph_executors_file, kept_choices
from terarec.spec import BinarySpec
from terarec.spec.serving import EXECUTOR_NAMES


def choose_checkpoint(path: Path, which: str | None) -> Path:
    """Return `path` itself if it is a checkpoint, or the one of the RUN `path` that `which` names.

    Raises:
        DataNotFoundError: A RUN without a whole checkpoint.
        ConfigError: A RUN without such a checkpoint, or `path` is a checkpoint and `which` is given.
    """
    if (path / MANIFEST).is_file():
        if which is not None:
            raise ConfigError("--checkpoint", f"{path} is a checkpoint, expected a RUN")
        return path
    # Its checkpoints are there, but no description that could say which is the best.
    if not (path / RUN_FILE).is_file():
        return find(path / CHECKPOINT_DIRECTORY, which or "last")
    return find_checkpoint(path, load_run(path / RUN_FILE), which)


def describe_checkpoint(path: Path, which: str | None = None) -> dict[str, Any]:
    """Return tables and dense parameters of a checkpoint, or of one of a RUN; every checksum is compared.

    Raises:
        DataNotFoundError: No complete checkpoint.
        ConfigError: No such checkpoint.
        FormatError: A damaged file.
    """
    checkpoint = choose_checkpoint(path, which)
    chain = read_chain(checkpoint)
    # Of a delta, tables are in the base and in all deltas up to it; dense weights are complete in each.
    manifest, files = chain[-1][1], TableChain(chain)
    tables = [_table(files, table) for table in files.names]
    dense, _ = read_tensors(checkpoint / DENSE, sha256=manifest.entry(DENSE).sha256)
    run_file = path / RUN_FILE
    run = load_run(run_file) if run_file.is_file() else None
    return {
        "what": "checkpoint" if run is None else "run",
        "path": str(path),
        "checkpoint": str(checkpoint),
        "model": None if run is None else run.model.kind,
        "objective": None if run is None else (run.objective or BinarySpec()).kind,
        "metrics": None if run is None else ", ".join(run.training.metrics) or None,
        "step": manifest.step,
        "bytes": sum(entry.bytes for entry in manifest.files) + sum(entry.bytes for entry in manifest.row_files),
        "embedding_rows": sum(table["rows"] for table in tables),
        "embedding_parameters": sum(table["rows"] * table["width"] for table in tables),
        "dense_parameters": sum(array.size for array in dense.values()),
        "tables": tables,
        "parts": _parts(dense),
        "dense": [{"parameter": name, "shape": _shape(array), **_size(array)} for name, array in dense.items()],
        "executors": _executors(path / EXECUTORS_FILE),
    }


def describe_graph_file(path: Path) -> dict[str, Any]:
    """Return the executors that are kept for the model of a graph file of HugeCTR.

    Raises:
        DataNotFoundError: No choice is stored next to the file.
        FormatError: A damaged file.
    """
    file = graph_executors_file(path)
    if not path.is_file() or not file.is_file():
        expected = "a data set, a RUN, a checkpoint, or a graph file with the choice of executors next to it"
        raise DataNotFoundError(path, f"is not a directory, expected {expected}")
    return {"what": "graph file", "path": str(path), "executors": _executors(file)}


def _executors(file: Path) -> list[dict[str, Any]]:
    """Return the choice of each machine for each batch size, with the measured milliseconds."""
    return [
        {
            "processor": choice.processor,
            "torch": choice.torch,
            "threads": choice.threads,
            "batch": size.batch,
            "executor": size.executor,
            **{
                f"{name}_ms": None if (spent := size.seconds.get(name)) is None else 1e3 * spent
                for name in EXECUTOR_NAMES
            },
        }
        for choice in kept_choices(file)
        for size in choice.sizes
    ]


def row_norms(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return the Euclidean length float64[n] of each row of ``weights [n, D]``."""
    numbers = widen_bfloat16(weights)
    norms: NDArray[np.float64] = np.sqrt(np.einsum("nd,nd->n", numbers, numbers, dtype=np.float64))
    return norms


def _table(files: TableChain, table: str) -> dict[str, Any]:
    rows, width, dtype, num_bytes, total, low, high = 0, 0, "", 0, 0.0, math.inf, -math.inf
    state: dict[str, None] = {}
    index = new_hash_index()
    is_dynamic = files.is_dynamic(table)
    # In pieces: a table may be larger than the memory of the machine that looks at it.
    for tensors in files.pieces(table):
        norms = row_norms(tensors[WEIGHTS])
        rows, width = rows + norms.size, tensors[WEIGHTS].shape[1]
        dtype = "bfloat16" if tensors[WEIGHTS].dtype == BFLOAT16 else str(tensors[WEIGHTS].dtype)
        num_bytes += sum(array.nbytes for array in tensors.values())
        total += float(norms.sum())
        low, high = min(low, float(norms.min(initial=math.inf))), max(high, float(norms.max(initial=-math.inf)))
        state |= {name.removeprefix(STATE_PREFIX): None for name in tensors if name.startswith(STATE_PREFIX)}
        if is_dynamic:
            keys = torch.from_numpy(tensors[KEYS])
            # Files have keys and no index: this one shows what a table takes that loads them.
            index.assign(keys, torch.arange(len(keys)))
    return {
        "table": table,
        "kind": "dynamic" if is_dynamic else "static in tiers" if files.is_in_tiers(table) else "static",
        "rows": rows,
        "width": width,
        "dtype": dtype,
        "bytes": num_bytes,
        "index_bytes_per_key": index.memory_bytes / rows if is_dynamic and rows else 0.0,
        "evicted": sum(int(piece["num_evicted"][0]) for piece in files.memories(table) if "num_evicted" in piece),
        "norm_min": low if rows else math.nan,
        "norm_mean": total / rows if rows else math.nan,
        "norm_max": high if rows else math.nan,
        "state": " ".join(state),
    }


def _parts(dense: Arrays) -> list[dict[str, Any]]:
    """Return number of dense parameters of each module of the model."""
    sizes: dict[str, int] = {}
    for name, array in dense.items():
        part = name.partition(".")[0]
        sizes[part] = sizes.get(part, 0) + array.size
    return [{"part": part, "parameters": size} for part, size in sizes.items()]


def _shape(array: NDArray[Any]) -> str:
    return " x ".join(map(str, array.shape)) or "1"


def _size(array: NDArray[Any]) -> dict[str, Any]:
    mean_square = float(np.mean(np.square(widen_bfloat16(array), dtype=np.float64))) if array.size else math.nan
    return {"parameters": array.size, "root_mean_square": math.sqrt(mean_square)}


_PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def describe_table(
    path: Path, table: str, top: int, *, which: str | None = None, allow_import: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the row norms of one table and its `top` largest rows, with the raw values of their keys.

    Args:
        path: A RUN, or a checkpoint in one.
        table: The table.
        top: Number of rows to show.
        which: The checkpoint of a RUN: "last", "best" or a step.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        ConfigError: No such table or checkpoint.
        DataNotFoundError: No complete checkpoint.
        FormatError: A damaged file.
    """
    checkpoint = choose_checkpoint(path, which)
    width, norms, keys = 0, [], []
    for piece in TableChain(read_chain(checkpoint)).pieces(table):
        width = piece[WEIGHTS].shape[1]
        norms.append(row_norms(piece[WEIGHTS]))
        keys += [piece[KEYS]] if KEYS in piece else []
    # 8 bytes a row, where the rows themselves are not kept.
    all_norms: NDArray[np.float64] = np.concatenate(norms)
    order = np.argsort(-all_norms, kind="stable")[:top]
    # Rows of a static table are in key order; a dynamic one says which key each row is of.
    rows: NDArray[np.int64] = np.concatenate(keys)[order] if keys else order
    return {
        "what": "table",
        "path": str(path),
        "checkpoint": str(checkpoint),
        "table": table,
        "rows": all_norms.size,
        "width": width,
        "zero_rows": int(np.count_nonzero(all_norms == 0)),
        "norms": _percentiles(all_norms) if all_norms.size else [],
        "largest": [
            {"row": int(row), "value": value, "norm": float(all_norms[place])}
            for row, place, value in zip(rows, order, _values(path, checkpoint, table, rows, allow_import), strict=True)
        ],
    }


def export_table(
    path: Path, table: str, out: Path, *, which: str | None = None, allow_import: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the rows of one table, with the states of the row optimizer, to a Parquet file.

    Args:
        path: A RUN, or a checkpoint in one, of any number of processes.
        table: The table.
        out: File to write.
        which: The checkpoint of a RUN: "last", "best" or a step.
        allow_import: Packages whose code a model of the kind "python" may name.

    Raises:
        ConfigError: No such table or checkpoint.
        DataNotFoundError: No complete checkpoint.
        FormatError: A damaged file.
        StorageError: The disk is full; nothing is left behind.
    """
    checkpoint = choose_checkpoint(path, which)
    # The checkpoint may be named itself; a table in tiers needs the description of the run around it.
    runs = (place for place in (path, checkpoint.parent.parent) if (place / RUN_FILE).is_file())
    rows = write_table_file(checkpoint, table, out, run=next(runs, None), allow_import=allow_import)
    return {
        "what": "table",
        "path": str(path),
        "checkpoint": str(checkpoint),
        "table": table,
        "rows": rows,
        "out": str(out),
        "bytes": out.stat().st_size,
    }


def _percentiles(norms: NDArray[np.float64]) -> list[dict[str, Any]]:
    values = np.percentile(norms, _PERCENTILES)
    return [{"percentile": percent, "norm": float(value)} for percent, value in zip(_PERCENTILES, values, strict=True)]


def _values(
    path: Path, checkpoint: Path, table: str, rows: NDArray[np.int64], allow_import: Sequence[str]
) -> Sequence[str]:
    """Return the raw values of `rows`, or question marks where no RUN is around the checkpoint."""
    for directory in (path / DATASET_DIRECTORY, checkpoint.parent.parent / DATASET_DIRECTORY):
        if not directory.is_dir():
            continue
        columns = {column.name for column in read_dataset(directory).categorical}
        for name in (table, table.rpartition(".")[0]):  # a second table has a suffix
            if name in columns:
                return IdValues(workflow_of(directory, allow_import=allow_import), name).values(rows)
    return ["?"] * len(rows)
