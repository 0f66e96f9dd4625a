"""What every `HashIndex` refuses, before it changes anything."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError

MOST_ROWS = 1 << 36
"""Rows are below it: an index keeps 36 bits of a row."""


def check_vector(name: str, vector: Tensor, device: torch.device, length: int | None = None) -> Tensor:
    """`vector`, contiguous.

    Raises:
        ConfigError: anything but int64[N] on the index's device, or another length than `length`.
    """
    is_here = vector.device.type == device.type and device.index in (None, vector.device.index)
    if vector.dtype != torch.int64 or vector.ndim != 1 or not is_here or length not in (None, vector.shape[0]):
        raise ConfigError(
            f"{name}: got {vector.dtype}{list(vector.shape)} on {vector.device}, "
            f"expected torch.int64[{'N' if length is None else length}] on {device}"
        )
    return vector.contiguous()


def check_rows(name: str, rows: Tensor) -> None:
    """Raise `ConfigError` if a row is outside 0 <= row < 2^36."""
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < MOST_ROWS):
        raise ConfigError(f"{name}: got {int(rows.min())} to {int(rows.max())}, expected 0 <= row < 2^36")


def check_next_row(next_row: int) -> None:
    """Raise `ConfigError` if the first row to give out is outside 0 <= row <= 2^36."""
    if not 0 <= next_row <= MOST_ROWS:
        raise ConfigError(f"next_row: got {next_row}, expected 0 <= row <= 2^36")


def check_span(start: int, most: int | None) -> None:
    """Raise `ConfigError` if ``items(start, most)`` makes no sense."""
    if start < 0 or (most is not None and most < 1):
        raise ConfigError(f"items: got start {start} and most {most}, expected start >= 0 and most >= 1 or None")


def no_rows_left(next_row: int, new_keys: int) -> StorageError:
    """The error for more new keys than there are rows."""
    return StorageError(f"next_row: got {next_row} for {new_keys} new keys, expected rows below 2^36")
