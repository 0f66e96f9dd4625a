"""Writing a checkpoint."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from terarec.checkpoint.arrays import as_array
from terarec.checkpoint.directory import keep_newest, staged, step_path
from terarec.checkpoint.layout import (
    DENSE,
    KEYS,
    OPTIMIZER,
    STATE,
    STATE_PREFIX,
    USE_PREFIX,
    WEIGHTS,
    memory_file,
    table_file,
)
from terarec.checkpoint.manifest import FileEntry, write_manifest
from terarec.checkpoint.optimizer_state import flatten
from terarec.checkpoint.state import TrainState
from terarec.errors import ConfigError
from terarec.formats import write_tensors
from terarec.io import write_bytes
from terarec.storage import Store

SHARD_BYTES = 256 * 2**20
"""Most bytes of rows in one file: what loading holds beside the tables, and what a torn disk can damage at once."""
_MEMORY_KEY_BYTES = 16  # a key that waits for admission, with its count


def save(directory: Path, state: TrainState, *, keep: int | None = None) -> Path:
    """Write `state` as a new checkpoint below `directory`, whole or not at all.

    Tables are streamed from where they are; beside them no memory worth counting is taken.

    Args:
        directory: where checkpoints lie, for example ``RUN/checkpoints``.
        state: what to write.
        keep: how many of the newest checkpoints stay, this one included, besides the one marked as best; None for all.

    Returns:
        The checkpoint's path.

    Raises:
        StorageError: the disk refuses, or the step has a checkpoint already. Earlier checkpoints stay whole.
        ConfigError: a tensor of a type that a container lacks, such as float8, or progress that is not JSON data.
    """
    with staged(directory, state.step) as checkpoint:
        write_manifest(checkpoint, state.step, list(_write_files(checkpoint, state)))
    if keep is not None:
        keep_newest(directory, keep)
    return step_path(directory, state.step)


def _write_files(checkpoint: Path, state: TrainState) -> Iterator[FileEntry]:
    for table in state.tables.values():
        yield from _write_table(checkpoint, table)
    yield _write_tensors(checkpoint, DENSE, _arrays(state.dense), {})
    tensors, text = flatten(state.optimizer)
    yield _write_tensors(checkpoint, OPTIMIZER, _arrays(tensors), {"optimizer": text})
    yield _write_state(checkpoint, state)


def _write_table(checkpoint: Path, table: Store) -> Iterator[FileEntry]:
    bytes_per_row = max(1, table.memory_bytes // max(1, len(table)))
    first = 0
    for index, rows in enumerate(table.export_chunks(max(1, SHARD_BYTES // bytes_per_row))):
        tensors = {WEIGHTS: rows.weights, **_prefixed(STATE_PREFIX, rows.state), **_prefixed(USE_PREFIX, rows.uses)}
        metadata = {"table": table.name, "rows": str(len(table))}
        if table.is_dynamic:
            tensors[KEYS] = rows.keys
            metadata["first_row"] = str(first)
        else:
            metadata["first_key"] = str(first)
        yield _write_tensors(checkpoint, table_file(table.name, index), _arrays(tensors), metadata)
        first += len(rows.keys)
    for index, piece in enumerate(table.export_memory(SHARD_BYTES // _MEMORY_KEY_BYTES)):
        yield _write_tensors(checkpoint, memory_file(table.name, index), _arrays(piece), {"table": table.name})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _write_state(checkpoint: Path, state: TrainState) -> FileEntry:
    rng = base64.b64encode(state.rng.numpy().tobytes()).decode()
    try:
        content = json.dumps({"step": state.step, "progress": state.progress, "rng": rng}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"progress: {error}, expected JSON data; of a row optimizer that is step_state(): the tables hold the "
            "state of its rows"
        ) from None
    write_bytes(checkpoint / STATE, content)
    return FileEntry(file=STATE, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _write_tensors(
    checkpoint: Path, file: str, arrays: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]
) -> FileEntry:
    sha256 = write_tensors(checkpoint / file, arrays, metadata)
    return FileEntry(file=file, bytes=(checkpoint / file).stat().st_size, sha256=sha256)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.generic]]:
    return {name: as_array(name, tensor) for name, tensor in tensors.items()}
