"""The tier protocol: rows of one table in one memory, looked up and inserted in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from terarec.errors import ConfigError


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
        keys: Keys that it was asked for.
        hits: Those of them that it had.
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
        """Make what was inserted and erased durable, where there is a disk.

        Raises:
            StorageError: As `insert`.
        """

    def refresh(self) -> bool:
        """Move on to what another process wrote; return whether there was anything.

        Raises:
            StorageError: The tier cannot be reached, or is damaged.
        """

    def statistics(self) -> TierStatistics:
        """Return what the tier did so far."""

    def close(self) -> None:
        """Release memory, files and connections. Closing twice is allowed."""


def check_keys(keys: Tensor) -> Tensor:
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
    return last_rows(*check_rows(keys, rows, width))


def check_rows(keys: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys and rows in one piece; errors are those of `check_insert`."""
    keys = check_keys(keys)
    if rows.shape != (keys.numel(), width) or rows.dtype != torch.float32 or rows.device.type != "cpu":
        got = f"{rows.dtype}{list(rows.shape)} on {rows.device}"
        raise ConfigError("rows", f"got {got}, expected torch.float32[{keys.numel()}, {width}] on cpu")
    return keys, rows.contiguous()


def last_rows(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each key once, with its last row."""
    ordered, order = keys.sort(stable=True)
    if keys.numel() < 2 or not bool((ordered[1:] == ordered[:-1]).any()):
        return keys, rows
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    places = order[is_last]
    return keys[places], rows[places]
