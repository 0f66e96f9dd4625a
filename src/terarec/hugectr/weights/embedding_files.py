"""`EmbeddingFile`: how the tables of an embedding share one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from terarec.embedding import EmbeddingCollection
from terarec.formats.hugectr import CHUNK_ROWS, SparseRows
from terarec.hugectr.enums import Embedding_t
from terarec.hugectr.errors import BrokenFileError
from terarec.storage import DynamicTable, Rows, StaticTable

_HAS_SLOTS = (
    Embedding_t.LocalizedSlotSparseEmbeddingHash,
    Embedding_t.LocalizedSlotSparseEmbeddingOneHot,
)


def pieces(keys: Tensor) -> Iterator[Tensor]:
    """``keys int64[n]`` in runs of at most `CHUNK_ROWS`."""
    for start in range(0, keys.numel(), CHUNK_ROWS):
        yield keys[start : start + CHUNK_ROWS]


class Part(NamedTuple):
    """Rows of one table on their way to a file.

    Attributes:
        slot: number of the table.
        rows: with their keys in the table.
    """

    slot: int
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingFile:
    """An embedding as its file sees it: keys, each in a slot.

    A slot is a table of its own, or one table serves all slots. The keys of tables that count from 0 are moved by the
    sizes of the slots before, in the file.

    Attributes:
        name: of the embedding.
        tables: one for each slot, or one for all.
        has_slots: whether the file names the slot of each key.
        devices: number of devices whose buffers a file of optimizer states holds.
        rows_per_device: rows of such a buffer.
        key_bytes: 4 or 8 bytes a key in files that are not folders.
    """

    name: str
    tables: tuple[StaticTable | DynamicTable, ...]
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
        """What is added to the keys of each table in the file."""
        sizes = [len(table) if isinstance(table, StaticTable) else 0 for table in self.tables]
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states that files hold: those of one number for each weight."""
        held = self.tables[0].arena.state
        return tuple(name for name, tensor in held.items() if tensor.dim() == 2)

    def parts(self) -> Iterator[Part]:
        """All rows, slot by slot, with rising keys, `CHUNK_ROWS` at a time."""
        for slot, table in enumerate(self.tables):
            for keys in pieces(table.keys()):
                yield Part(slot, table.export(keys))

    def keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Key in the file, and slot, of all rows in the order of `parts`."""
        held = [table.keys().cpu().numpy() for table in self.tables]
        keys = np.concatenate([own + base for own, base in zip(held, self.bases, strict=True)])
        return keys, np.repeat(np.arange(len(held)), [len(own) for own in held])

    def to_file(self, part: Part) -> SparseRows:
        """`part` as it stands in the file."""
        keys = part.rows.keys.cpu().numpy() + self.bases[part.slot]
        vectors = part.rows.weights.float().cpu().numpy()
        slots = np.full(len(keys), part.slot, np.uint64) if self.has_slots else None
        return SparseRows(keys, vectors, slots)

    def slot_of(self, keys: NDArray[np.int64], slots: NDArray[Any] | None, path: Path) -> NDArray[np.int64]:
        """The table of each key of a file.

        Raises:
            BrokenFileError: slots are missing, or one is none of this embedding's.
        """
        count = len(self.tables)
        if count == 1:
            return np.zeros(len(keys), np.int64)
        if not self.has_slots:
            return np.maximum(np.searchsorted(self.bases, keys, side="right") - 1, 0)
        if slots is None:
            raise BrokenFileError(f"{path}: holds no slot_id, expected one for each key of embedding {self.name!r}")
        if len(slots) and int(slots.max()) >= count:
            place = int(np.argmax(slots >= count))
            raise BrokenFileError(
                f"{path}: slot_id {slots[place]} at byte {8 * place}, expected less than {count}, the slots of "
                f"{self.name!r}"
            )
        return slots.astype(np.int64)

    def device_of(self, keys: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The device of each key, as HugeCTR places it."""
        return (slots if self.has_slots else keys) % self.devices


def embedding_file(
    params: Any, collection: EmbeddingCollection, *, devices: int = 1, capacity: int = 0, key_bytes: Literal[4, 8] = 8
) -> EmbeddingFile:
    """The file of a `SparseEmbedding`.

    Args:
        params: the object of that name.
        collection: its tables, in the order of its slots.
        devices: number of devices in ``vvgpu``.
        capacity: most keys on all devices together; only files of optimizer states ask for it.
        key_bytes: 4 or 8, as ``i64_input_key`` says.
    """
    sizes = params.slot_size_array
    room = [sum(sizes[device::devices]) for device in range(devices)]  # of the slots that each device has
    is_told = params.workspace_size_per_gpu_in_mb or params.max_vocabulary_size_per_gpu or not sizes
    return EmbeddingFile(
        name=params.sparse_embedding_name,
        tables=tuple(collection.tables.values()),
        has_slots=params.embedding_type in _HAS_SLOTS,
        devices=devices,
        rows_per_device=capacity // devices if is_told else max(room),
        key_bytes=key_bytes,
    )
