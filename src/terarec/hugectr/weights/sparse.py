"""The rows of an embedding, and their optimizer's states, as HugeCTR's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.formats.hugectr import (
    CHUNK_ROWS,
    SparseFileLayout,
    SparseRows,
    SparseStates,
    StateLayout,
    open_sparse_folder,
    open_sparse_states,
    read_sparse_file,
    write_sparse_file,
    write_sparse_folder,
    write_sparse_states,
)
from terarec.hugectr.errors import BrokenFileError, OutOfBoundError
from terarec.hugectr.weights.embedding_files import EmbeddingFile
from terarec.kernels.contract import LAST_UPDATE
from terarec.storage import Rows, StaticTable


def save_sparse(embedding: EmbeddingFile, path: Path, *, single_file: bool = False) -> None:
    """Write all rows, slot by slot, with rising keys.

    Args:
        embedding: what to write.
        path: the folder, or the file.
        single_file: write one file, as releases up to 3.0 did.

    Raises:
        ConfigError: `path` is a folder with other files in it.
        StorageError: the disk is full; nothing is left behind.
    """
    chunks = (embedding.to_file(part) for part in embedding.parts())
    if single_file:
        write_sparse_file(path, _layout(embedding), chunks)
    else:
        write_sparse_folder(path, chunks)


def load_sparse(embedding: EmbeddingFile, path: Path) -> None:
    """Take rows from a folder, or from one file of the older form, in the place of those that the embedding holds.

    Rows of static tables that the file does not name stay.

    Raises:
        DataNotFoundError: nothing is there.
        FormatError: files that do not fit each other or the embedding, or a key twice; nothing is changed then.
        OutOfBoundError: a key outside its static table; nothing is changed then.
    """
    check_sparse(embedding, path)
    for table in embedding.tables:
        table.clear()
    import_rows(embedding, _chunks_of(embedding, path), path)


def check_sparse(embedding: EmbeddingFile, path: Path) -> None:
    """Raise what `load_sparse` would, and change nothing."""
    keys, slots = _keys_of(embedding, path)
    _check_keys(embedding, keys, embedding.slot_of(keys, slots, path), path)


def import_rows(embedding: EmbeddingFile, chunks: Iterable[SparseRows], path: Path) -> None:
    """Put rows of a file into their tables."""
    for chunk in chunks:
        slots = embedding.slot_of(chunk.keys, chunk.slots, path)
        for slot in np.unique(slots):
            mine = slots == slot
            table = embedding.tables[slot]
            keys = torch.from_numpy(chunk.keys[mine] - embedding.bases[slot]).to(table.arena.device)
            weights = torch.from_numpy(chunk.vectors[mine]).to(table.arena.device, table.arena.dtype)
            table.import_(Rows(keys=keys, weights=weights))


def save_sparse_optimizer_states(embedding: EmbeddingFile, path: Path) -> None:
    """Write the states of all rows, in the order in which `save_sparse` writes these.

    Raises:
        OutOfBoundError: a device with more rows than its buffer has.
        StorageError: the disk is full; nothing is left behind.
    """
    names = embedding.state_names
    layout = StateLayout(len(names), embedding.devices, embedding.rows_per_device, embedding.width)
    keys, slots = embedding.keys()
    used = np.bincount(embedding.device_of(keys, slots), minlength=layout.devices)
    if names and used.max() > layout.rows:
        raise OutOfBoundError(
            f"{path}: embedding {embedding.name!r} holds {used.max()} keys on a device, expected at most "
            f"{layout.rows}, for which its workspace has room"
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
        embedding: holds the rows that the file belongs to.
        path: the file.
        rows_from: the folder that the rows were loaded from, whose order counts; None takes that of `save_sparse`.

    Raises:
        DataNotFoundError: no such file.
        FormatError: a file of another optimizer or width, or of fewer rows; nothing is changed then.
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
    """A file of states, with key and slot of each row in its order."""
    num_states = len(embedding.state_names)
    states = open_sparse_states(path, num_states=num_states, devices=embedding.devices, width=embedding.width)
    if rows_from is None:
        keys, slots = embedding.keys()
    else:
        keys, found = _keys_of(embedding, rows_from)
        slots = embedding.slot_of(keys, found, rows_from)
    used = np.bincount(embedding.device_of(keys, slots), minlength=embedding.devices)
    if num_states and used.max() > states.layout.rows:
        raise BrokenFileError(
            f"{path}: holds {states.layout.rows} rows a device, expected at least {used.max()} for embedding "
            f"{embedding.name!r}"
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


def _layout(embedding: EmbeddingFile) -> SparseFileLayout:
    return SparseFileLayout(embedding.width, embedding.key_bytes, embedding.has_slots)


def _chunks_of(embedding: EmbeddingFile, path: Path) -> Iterator[SparseRows]:
    if path.is_file():
        return read_sparse_file(path, _layout(embedding))
    return open_sparse_folder(path, embedding.width).chunks()


def _keys_of(embedding: EmbeddingFile, path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint64] | None]:
    """Keys and slots of a whole file."""
    if not path.is_file():
        folder = open_sparse_folder(path, embedding.width)
        return folder.keys(), folder.slots()
    chunks = list(read_sparse_file(path, _layout(embedding)))
    keys = np.concatenate([np.empty(0, np.int64), *(chunk.keys for chunk in chunks)])
    slots = [chunk.slots for chunk in chunks if chunk.slots is not None]
    return keys, np.concatenate([np.empty(0, np.uint64), *slots]) if embedding.has_slots else None


def _check_keys(embedding: EmbeddingFile, keys: NDArray[np.int64], slots: NDArray[np.int64], path: Path) -> None:
    """Raise unless each table can take its keys."""
    for slot, (table, base) in enumerate(zip(embedding.tables, embedding.bases, strict=True)):
        mine = keys[slots == slot]
        distinct, counts = np.unique(mine, return_counts=True)
        if len(distinct) != len(mine):
            raise BrokenFileError(f"{path}: holds key {distinct[counts > 1][0]} twice, expected distinct keys")
        if isinstance(table, StaticTable) and len(mine):
            outside = distinct[(distinct < base) | (distinct >= base + len(table))]
            if len(outside):
                raise OutOfBoundError(
                    f"{path}: holds key {outside[0]} in slot {slot}, expected {base} <= key < {base + len(table)}"
                )
