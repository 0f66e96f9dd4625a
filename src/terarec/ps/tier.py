"""The tier protocol: rows of one table in one memory, looked up and inserted in batches; rows as bytes, and partitions.

The partition of a key is that of HugeCTR's parameter server, so that both find each other's rows in Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import ConfigError

UPDATE_ROWS = 1_024
"""Rows in memory that are changed under one hold of a lock, for which a lookup waits: some 0.1 ms (Zen 4)."""


class Found(NamedTuple):
    """The result of a lookup in a tier.

    Attributes:
        rows: float32[n, D]; any numbers for keys that were not found.
        mask: bool[n], the keys that were found.
    """

    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStatistics:
    """Counters of a tier.

    Attributes:
        keys: Keys that were looked up.
        hits: Keys found.
        inserted: Rows that were inserted.
        evicted: Rows that were evicted.
        damaged: Rows of another size than the table's, which count as missing.
    """

    keys: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    damaged: int = 0


@runtime_checkable
class Tier(Protocol):
    """Rows float32[D] of one table by int64 key. Any int64 is a key. Any thread may call any method."""

    @property
    def name(self) -> str:
        """Kind of the memory: "host", "redis", "row_file" or "rocksdb"."""

    @property
    def width(self) -> int:
        """Length D of a vector."""

    @property
    def is_writable(self) -> bool:
        """Whether rows can be inserted and erased."""

    def count(self) -> int:
        """Return the number of rows.

        Raises:
            StorageError: The tier cannot be reached.
        """

    def lookup(self, keys: Tensor) -> Found:
        """Look up ``keys int64[n]``, which may repeat.

        Raises:
            StorageError: The tier cannot be reached, or is damaged.
        """

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows of ``keys int64[n]`` to ``rows float32[n, D]``; the last one counts of a repeated key.

        Raises:
            ConfigError: Another shape or type.
            StorageError: The tier is read-only, full, cannot be reached or cannot be written.
        """

    def erase(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]``; keys without a row are passed over.

        Raises:
            StorageError: As `insert`.
        """

    def clear(self) -> None:
        """Remove all rows.

        Raises:
            StorageError: As `insert`.
        """

    def flush(self) -> None:
        """Make inserted and erased rows durable, where there is a disk.

        Raises:
            StorageError: As `insert`.
        """

    def refresh(self) -> bool:
        """Read the last commit of another process; return whether there was a new one.

        Raises:
            StorageError: The tier cannot be reached, or is damaged.
        """

    def statistics(self) -> TierStatistics:
        """Return the counters of the tier."""

    def close(self) -> None:
        """Release memory, files and connections. Closing twice is allowed."""


def check_key_tensor(keys: Tensor) -> Tensor:
    """Return ``keys int64[n]`` in one piece, or raise `ConfigError` for another tensor."""
    if keys.dtype != torch.int64 or keys.ndim != 1 or keys.device.type != "cpu":
        raise ConfigError(
            "keys", f"got {keys.dtype}{list(keys.shape)} on {keys.device}, expected torch.int64[n] on cpu"
        )
    return keys.contiguous()


def check_insert(keys: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys and rows in one piece, each key once with its last row.

    Raises:
        ConfigError: Tensors of other shapes or types.
    """
    return last_rows(*check_row_tensors(keys, rows, width))


def check_row_tensors(keys: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys and rows in one piece; errors are those of `check_insert`."""
    keys = check_key_tensor(keys)
    if rows.shape != (keys.numel(), width) or rows.dtype != torch.float32 or rows.device.type != "cpu":
        got = f"{rows.dtype}{list(rows.shape)} on {rows.device}"
        raise ConfigError("rows", f"got {got}, expected torch.float32[{keys.numel()}, {width}] on cpu")
    return keys, rows.contiguous()


def last_rows(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each key once, with its last row."""
    # Stable, so that of equal keys the last one given is the last one here.
    ordered, order = keys.sort(stable=True)
    if keys.numel() < 2 or not bool((ordered[1:] == ordered[:-1]).any()):
        return keys, rows
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    places = order[is_last]
    return keys[places], rows[places]


def as_bytes(rows: Tensor, row_bytes: int) -> NDArray[np.uint8]:
    """Return ``rows float32[n, D]`` as uint8[n, row_bytes], with zeros behind a row that is shorter."""
    held: NDArray[np.uint8] = rows.contiguous().numpy().view(np.uint8).reshape(rows.shape[0], 4 * rows.shape[1])
    if held.shape[1] == row_bytes:
        return held
    padded = np.zeros((held.shape[0], row_bytes), np.uint8)
    padded[:, : held.shape[1]] = held
    return padded


def as_rows(held: NDArray[np.uint8], width: int, offset: int = 0, dtype: str = "float32") -> Tensor:
    """Return rows float32[n, D] of ``held uint8[n, row_bytes]``.

    Args:
        held: Bytes of rows.
        width: Length D of a vector.
        offset: First byte of the vector in a row.
        dtype: Element type of the vector: "float32", "bfloat16" or "float16".
    """
    kind: torch.dtype = getattr(torch, dtype)
    # Columns of wider rows have gaps, over which a view of another type is not possible.
    part = np.ascontiguousarray(held[:, offset : offset + width * kind.itemsize])
    return torch.from_numpy(part.reshape(-1)).view(kind).view(held.shape[0], width).float()


# Factors and rotations of the mixer: other ones would look for HugeCTR's rows in the wrong hashes.
_FIRST, _SECOND = np.uint64(0xA24BAED4963EE407), np.uint64(0x9FB21C651E98DF25)


def mixed(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes uint64[n] of ``keys int64[n]``: Pelle Evensen's mixer rrxmrrxmsx_0."""
    hashes = keys.view(np.uint64).copy()
    hashes ^= _rotated(hashes, 25) ^ _rotated(hashes, 50)
    hashes *= _FIRST
    hashes ^= _rotated(hashes, 24) ^ _rotated(hashes, 49)
    hashes *= _SECOND
    hashes ^= hashes >> np.uint64(28)
    return hashes


def _rotated(values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (values >> np.uint64(bits)) | (values << np.uint64(64 - bits))


def by_partition(keys: Tensor, num_partitions: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Yield the partitions that ``keys int64[n]`` are in, each with the places of its keys."""
    if num_partitions == 1:
        if keys.numel():
            yield 0, slice(0, keys.numel())
        return
    numbers = (mixed(keys.numpy()) % np.uint64(num_partitions)).astype(
        np.uint16 if num_partitions < 2**16 else np.int64
    )
    order = torch.from_numpy(numbers.argsort(kind="stable"))  # a radix sort for 16 bits
    counts = np.bincount(numbers, minlength=num_partitions).tolist()
    for number, places in enumerate(torch.split(order, counts)):
        if places.numel():
            yield number, places
