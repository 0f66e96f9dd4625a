"""The optimizer states of embeddings as HugeCTR's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.formats.hugectr import (
    CHUNK_ROWS,
    SparseStates,
    StateLayout,
    open_sparse_states,
    write_sparse_states,
)
from terarec.hugectr.errors import BrokenFileError, OutOfBoundError
from terarec.hugectr.weights.sparse import EmbeddingFile, keys_of
from terarec.kernels.row_rules import LAST_UPDATE


def save_sparse_optimizer_states(embedding: EmbeddingFile, path: Path) -> None:
    """Write the states of all rows, in the order in which `save_sparse` writes these.

    Raises:
        OutOfBoundError: A device with more rows than its buffer has.
        StorageError: The disk is full; nothing is left behind.
    """
    names = embedding.state_names
    layout = StateLayout(len(names), embedding.devices, embedding.rows_per_device, embedding.width)
    keys, slots = embedding.keys()
    used = np.bincount(embedding.device_of(keys, slots), minlength=layout.devices)
    if names and used.max() > layout.rows:
        raise OutOfBoundError(
            path,
            f"embedding {embedding.name!r} holds {used.max()} keys on a device, expected at most "
            f"{layout.rows}, for which its workspace has room",
        )

    def chunks(state: int, device: int) -> Iterator[NDArray[np.float32]]:
        for part in embedding.parts():
            rows = embedding.to_file(part)
            mine = embedding.device_of(rows.keys, np.full(len(rows.keys), part.slot)) == device
            yield part.rows.state[names[state]].cpu().numpy()[mine]

    write_sparse_states(path, layout, chunks)


def load_sparse_optimizer_states(embedding: EmbeddingFile, path: Path, *, rows_from: Path | None = None) -> None:
    """Take the states of all rows from a file.

    Args:
        embedding: Holds the rows that the file belongs to.
        path: The file.
        rows_from: The folder that the rows were loaded from, whose order counts; None takes that of `save_sparse`.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A file of another optimizer or width, or of fewer rows; nothing is changed then.
    """
    names = embedding.state_names
    states, (keys, slots) = _opened_states(embedding, path, rows_from)
    devices = embedding.device_of(keys, slots)
    for device in range(embedding.devices if names else 0):
        mine = devices == device
        own_keys, own_slots = keys[mine], slots[mine]
        for start in range(0, len(own_keys), CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, len(own_keys)))
            values = {name: states.read(number, device, part.start, part.stop) for number, name in enumerate(names)}
            _import_states(embedding, own_keys[part], own_slots[part], values)


def check_sparse_optimizer_states(embedding: EmbeddingFile, path: Path) -> None:
    """Raise what `load_sparse_optimizer_states` would, and change nothing."""
    _opened_states(embedding, path, None)


def _opened_states(
    embedding: EmbeddingFile, path: Path, rows_from: Path | None
) -> tuple[SparseStates, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Open a file of states; return it with key and slot of each row in its order."""
    num_states = len(embedding.state_names)
    states = open_sparse_states(path, num_states=num_states, devices=embedding.devices, width=embedding.width)
    if rows_from is None:
        keys, slots = embedding.keys()
    else:
        keys, found = keys_of(embedding, rows_from)
        slots = embedding.slot_of(keys, found, rows_from)
    used = np.bincount(embedding.device_of(keys, slots), minlength=embedding.devices)
    if num_states and used.max() > states.layout.rows:
        raise BrokenFileError(
            path,
            f"holds {states.layout.rows} rows a device, expected at least {used.max()} for embedding "
            f"{embedding.name!r}",
        )
    return states, (keys, slots)


def _import_states(
    embedding: EmbeddingFile,
    keys: NDArray[np.int64],
    slots: NDArray[np.int64],
    values: dict[str, NDArray[np.float32]],
) -> None:
    for slot in np.unique(slots):
        mine = slots == slot
        table = embedding.tables[slot]
        held = table.export(torch.from_numpy(keys[mine] - embedding.bases[slot]).to(table.arena.device))
        state = {name: torch.from_numpy(array[mine]) for name, array in values.items()}
        if LAST_UPDATE in held.state:  # which no file holds: as if the rows had seen no step
            state[LAST_UPDATE] = torch.zeros_like(held.state[LAST_UPDATE])
        table.import_(dataclasses.replace(held, state=state))
