# SPDX-License-Identifier: Apache-2.0
"""The rows of a `SparseEmbedding` and their optimizer's states as HugeCTR's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.embedding import EmbeddingCollection
from terarec.formats.hugectr.weights import (
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
from terarec.hugectr.network import LOCALIZED, is_sized_by_slots
from terarec.hugectr.objects import SparseEmbedding
from terarec.kernels.row_rules import LAST_UPDATE
from terarec.storage import RowValues
from terarec.storage.dynamic import DynamicTable
from terarec.storage.kinds import AnyTable


def pieces(keys: Tensor) -> Iterator[Tensor]:
    """Yield ``keys int64[n]`` in runs of at most `CHUNK_ROWS`."""
    for start in range(0, keys.numel(), CHUNK_ROWS):
        yield keys[start : start + CHUNK_ROWS]


class Part(NamedTuple):
    """Rows of one table, to be written to a file."""

    slot: int
    rows: RowValues


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingFile:
    """An embedding as in its file: keys, each in a slot.

    A slot is a table of its own, or one table serves all slots. The keys of tables that count from 0 are moved by the
    sizes of the slots before, in the file.

    Attributes:
        name: Name of the embedding.
        tables: One for each slot, or one for all.
        has_slots: Whether the file names the slot of each key.
        devices: Number of devices whose buffers a file of optimizer states holds.
        rows_per_device: Rows of such a buffer, as HugeCTR allocates them.
        key_bytes: Bytes of a key, 4 or 8, in files that are not folders.
    """

    name: str
    tables: tuple[AnyTable, ...]
    has_slots: bool
    devices: int
    rows_per_device: int
    key_bytes: Literal[4, 8] = 8

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.tables[0].width

    @property
    def bases(self) -> tuple[int, ...]:
        """Offset of each table's keys in the file."""
        sizes = [len(table) if not table.is_dynamic else 0 for table in self.tables]
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states that files hold: those of one number for each weight."""
        state = self.tables[0].arena.state
        return tuple(name for name, tensor in state.items() if tensor.dim() == 2)

    def parts(self) -> Iterator[Part]:
        """Yield all rows, slot by slot, with ascending keys, `CHUNK_ROWS` at a time."""
        for slot, table in enumerate(self.tables):
            for keys in pieces(table.keys()):
                yield Part(slot, table.export(keys))

    def keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return key in the file, and slot, of all rows in the order of `parts`."""
        keys_of_tables = [table.keys().cpu().numpy() for table in self.tables]
        keys = np.concatenate([own + base for own, base in zip(keys_of_tables, self.bases, strict=True)])
        return keys, np.repeat(np.arange(len(keys_of_tables)), [len(own) for own in keys_of_tables])

    def to_file(self, part: Part) -> SparseRows:
        """Return `part` in the form of the file."""
        keys = part.rows.keys.cpu().numpy() + self.bases[part.slot]
        vectors = part.rows.weights.float().cpu().numpy()
        slots = np.full(len(keys), part.slot, np.uint64) if self.has_slots else None
        return SparseRows(keys, vectors, slots)

    def slot_of(self, keys: NDArray[np.int64], slots: NDArray[Any] | None, path: Path) -> NDArray[np.int64]:
        """Return the table of each key of a file."""
        count = len(self.tables)
        # One table serves all slots, so slots in the file say nothing.
        if count == 1:
            return np.zeros(len(keys), np.int64)
        if not self.has_slots:
            # Files of embeddings without slots tell the tables by the ranges of their keys.
            return np.maximum(np.searchsorted(self.bases, keys, side="right") - 1, 0)
        if slots is None:
            raise BrokenFileError(path, f"holds no slot_id, expected one for each key of embedding {self.name!r}")
        if len(slots) and int(slots.max()) >= count:
            place = int(np.argmax(slots >= count))
            raise BrokenFileError(
                path,
                f"slot_id {slots[place]} at byte {8 * place}, expected less than {count}, the slots of {self.name!r}",
            )
        return slots.astype(np.int64)

    def device_of(self, keys: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the device of each key, as HugeCTR places it."""
        return (slots if self.has_slots else keys) % self.devices


def embedding_file(
    params: SparseEmbedding,
    collection: EmbeddingCollection,
    *,
    devices: int = 1,
    capacity: int = 0,
    key_bytes: Literal[4, 8] = 8,
) -> EmbeddingFile:
    """Return the file of a `SparseEmbedding`.

    Args:
        params: The object of that name.
        collection: Its tables, in the order of its slots.
        devices: Number of devices in ``vvgpu``.
        capacity: Maximum number of keys over all devices, for files of optimizer states.
        key_bytes: Bytes of a key, 4 or 8, by ``i64_input_key``.
    """
    sizes = params.slot_size_array
    rows = capacity // devices
    if is_sized_by_slots(params):
        rows = max(sum(sizes[device::devices]) for device in range(devices))  # of the slots that a device has
    return EmbeddingFile(
        name=params.sparse_embedding_name,
        tables=tuple(collection.tables.values()),
        has_slots=params.embedding_type in LOCALIZED,
        devices=devices,
        rows_per_device=rows,
        key_bytes=key_bytes,
    )


def held_rows(embedding: EmbeddingFile, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the distinct ``keys int64[n]`` that the embedding holds, and their vectors float32[m, D].

    A key that several slots hold is repeated.
    """
    found_keys, vectors = [np.empty(0, np.int64)], [np.empty((0, embedding.width), np.float32)]
    for table, base in zip(embedding.tables, embedding.bases, strict=True):
        own = keys - base
        # A dynamic table gives unknown keys one row that all of them share, `number`: those are not held.
        if isinstance(table, DynamicTable):
            requested = torch.from_numpy(own).to(table.arena.device)
            own = own[(table.rows(requested, train=False) != table.number).cpu().numpy()]
        else:
            own = own[(own >= 0) & (own < len(table))]
        rows = table.export(torch.from_numpy(own).to(table.arena.device))
        found_keys.append(own + base)
        vectors.append(rows.weights.float().cpu().numpy())
    return np.concatenate(found_keys), np.concatenate(vectors)


def save_sparse(embedding: EmbeddingFile, path: Path, *, single_file: bool = False) -> None:
    """Write all rows, slot by slot, with ascending keys.

    Args:
        embedding: Embedding to write.
        path: The folder, or the file.
        single_file: Write one file, as releases up to 3.0 did.

    Raises:
        ConfigError: `path` is a folder with other files in it.
        StorageError: The disk is full; nothing is left behind.
    """
    chunks = (embedding.to_file(part) for part in embedding.parts())
    if single_file:
        write_sparse_file(path, _layout(embedding), chunks)
    else:
        write_sparse_folder(path, chunks)


def load_sparse(embedding: EmbeddingFile, path: Path) -> bool:
    """Load rows from a folder, or a file of the older form, replacing those that the embedding holds.

    Rows of static tables that the file does not name stay.

    Returns:
        Whether the rows are in the order of `save_sparse`, so that those of a file of states are, too.

    Raises:
        DataNotFoundError: Nothing exists.
        FormatError: Files that do not fit each other or the embedding, or a key twice; nothing is changed then.
        OutOfBoundError: A key outside its static table; nothing is changed then.
    """
    is_in_order = check_sparse(embedding, path)
    for table in embedding.tables:
        if table.keyed is not None:
            table.keyed.clear()
    # Only the keys were read so far. Vectors come in chunks, as those of a table may fill the memory.
    import_rows(embedding, _chunks_of(embedding, path), path)
    return is_in_order


def check_sparse(embedding: EmbeddingFile, path: Path) -> bool:
    """Return the result of `load_sparse`, or raise its errors, without changing anything."""
    keys, slots = _keys_and_slots(embedding, path)
    _check_keys(embedding, keys, slots, path)
    # The row of a key of a static table is the key, in whatever order a folder has them.
    steps = np.diff(slots)
    return not embedding.tables[0].is_dynamic or bool(((steps > 0) | ((steps == 0) & (np.diff(keys) > 0))).all())


def import_rows(embedding: EmbeddingFile, chunks: Iterable[SparseRows], path: Path) -> None:
    """Import rows of a file into their tables."""
    for chunk in chunks:
        slots = embedding.slot_of(chunk.keys, chunk.slots, path)
        for slot in np.unique(slots):
            mine = slots == slot
            table = embedding.tables[slot]
            keys = torch.from_numpy(chunk.keys[mine] - embedding.bases[slot]).to(table.arena.device)
            weights = torch.from_numpy(chunk.vectors[mine]).to(table.arena.device, table.arena.dtype)
            table.import_(RowValues(keys=keys, weights=weights))


def _layout(embedding: EmbeddingFile) -> SparseFileLayout:
    return SparseFileLayout(embedding.width, embedding.key_bytes, embedding.has_slots)


def _chunks_of(embedding: EmbeddingFile, path: Path) -> Iterator[SparseRows]:
    if path.is_file():
        return read_sparse_file(path, _layout(embedding))
    return open_sparse_folder(path, embedding.width).chunks()


def keys_of(embedding: EmbeddingFile, path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint64] | None]:
    """Return all keys and slots of a file."""
    if not path.is_file():
        folder = open_sparse_folder(path, embedding.width)
        return folder.keys(), folder.slots()
    # A single file has keys and vectors in turns, so all of it is read for its keys.
    chunks = list(read_sparse_file(path, _layout(embedding)))
    keys = np.concatenate([np.empty(0, np.int64), *(chunk.keys for chunk in chunks)])
    slots = [chunk.slots for chunk in chunks if chunk.slots is not None]
    return keys, np.concatenate([np.empty(0, np.uint64), *slots]) if embedding.has_slots else None


def _keys_and_slots(embedding: EmbeddingFile, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all keys of a file, each with its table."""
    keys, slots = keys_of(embedding, path)
    return keys, embedding.slot_of(keys, slots, path)


def _check_keys(embedding: EmbeddingFile, keys: NDArray[np.int64], slots: NDArray[np.int64], path: Path) -> None:
    """Raise unless the keys fit their tables."""
    for slot, (table, base) in enumerate(zip(embedding.tables, embedding.bases, strict=True)):
        mine = keys[slots == slot]
        distinct, counts = np.unique(mine, return_counts=True)
        if len(distinct) != len(mine):
            raise BrokenFileError(path, f"holds key {distinct[counts > 1][0]} twice, expected distinct keys")
        if not table.is_dynamic and len(mine):
            outside = distinct[(distinct < base) | (distinct >= base + len(table))]
            if len(outside):
                raise OutOfBoundError(
                    path, f"holds key {outside[0]} in slot {slot}, expected {base} <= key < {base + len(table)}"
                )


def save_sparse_optimizer_states(embedding: EmbeddingFile, path: Path) -> None:
    """Write the states of all rows, in the order in which `save_sparse` writes these.

    Buffers have `rows_per_device` rows; more if a device has more keys, so that a training that passed its checks, or
    ran without them, can be saved.
    """
    names = embedding.state_names
    keys, slots = embedding.keys()
    used = np.bincount(embedding.device_of(keys, slots), minlength=embedding.devices)
    rows = max(embedding.rows_per_device, int(used.max()))
    layout = StateLayout(len(names), embedding.devices, rows, embedding.width)

    def chunks(state: int, device: int) -> Iterator[NDArray[np.float32]]:
        for part in embedding.parts():
            rows = embedding.to_file(part)
            # Each buffer takes its rows in the order of the embedding's file, from which HugeCTR assigns them.
            mine = embedding.device_of(rows.keys, np.full(len(rows.keys), part.slot)) == device
            yield part.rows.state[names[state]].cpu().numpy()[mine]

    write_sparse_states(path, layout, chunks)


def load_sparse_optimizer_states(embedding: EmbeddingFile, path: Path, *, rows_from: Path | None = None) -> None:
    """Load the states of all rows from a file.

    Args:
        embedding: Holds the rows that the file belongs to.
        path: The file.
        rows_from: The folder that the rows were loaded from, whose order counts; None takes that of `save_sparse`.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A file of another optimizer or width, or of fewer rows, or a folder of other rows by now; nothing
            is changed then.
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


def check_sparse_optimizer_states(embedding: EmbeddingFile, path: Path, *, rows_from: Path | None = None) -> None:
    """Raise the errors of `load_sparse_optimizer_states` without changing anything."""
    _opened_states(embedding, path, rows_from)


def _opened_states(
    embedding: EmbeddingFile, path: Path, rows_from: Path | None
) -> tuple[SparseStates, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Open a file of states; return it with key and slot of each row in its order."""
    num_states = len(embedding.state_names)
    states = open_sparse_states(path, num_states=num_states, devices=embedding.devices, width=embedding.width)
    if rows_from is None:
        keys, slots = embedding.keys()
    else:
        keys, slots = _keys_and_slots(embedding, rows_from)
        for slot, table in enumerate(embedding.tables):
            own = keys[slots == slot]
            unknown = own[~np.isin(own, table.keys().cpu().numpy())]
            if len(unknown):
                raise BrokenFileError(
                    rows_from,
                    f"holds key {unknown[0]}, which embedding {embedding.name!r} does not, expected the rows that were "
                    "loaded from it, in whose order their states are",
                )
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
        # `import_` sets weights and states of a row together, so the weights are taken out and put back as they are.
        rows = table.export(torch.from_numpy(keys[mine] - embedding.bases[slot]).to(table.arena.device))
        state = {name: torch.from_numpy(array[mine]) for name, array in values.items()}
        if LAST_UPDATE in rows.state:  # which no file holds: as if the rows had seen no step
            state[LAST_UPDATE] = torch.zeros_like(rows.state[LAST_UPDATE])
        table.import_(dataclasses.replace(rows, state=state))
