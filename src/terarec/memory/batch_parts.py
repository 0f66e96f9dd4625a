# SPDX-License-Identifier: Apache-2.0
"""Batches of rows in parts: by table, by partition of a table, and together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.kernels.slots import RowBatch


def by_table(batch: RowBatch) -> Iterator[tuple[int, Tensor | slice]]:
    """Yield each table of `batch` with the places of its rows: a slice where they lie together."""
    if not batch.tables.numel():
        return
    # Most batches come table by table; only others are sorted.
    numbers, counts = torch.unique_consecutive(batch.tables, return_counts=True)
    if numbers.numel() > 1 and not bool((numbers.diff() > 0).all()):
        order = batch.tables.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(batch.tables[order], return_counts=True)
        yield from zip(numbers.tolist(), torch.split(order, counts.tolist()), strict=True)
        return
    begin = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        yield number, slice(begin, begin + count)
        begin += count


class TableSpan(NamedTuple):
    """The rows of a table in a batch: those from `begin` on that end before `end`."""

    table: int
    begin: int
    end: int

    @property
    def places(self) -> slice:
        """The places of the rows."""
        return slice(self.begin, self.end)


def table_ends(batch: RowBatch, num_tables: int) -> list[int]:
    """Return where the rows of each table end in a batch whose tables come one after the other, rising."""
    # Nothing to search for, which small lookups notice.
    if num_tables == 1:
        return [batch.tables.numel()]
    # The tables rise, so that one search finds all ends.
    ends: list[int] = torch.searchsorted(batch.tables, torch.arange(1, num_tables + 1)).tolist()
    return ends


def table_spans(batch: RowBatch, num_tables: int) -> list[TableSpan]:
    """Return the tables that have rows in such a batch, with their places."""
    ends = table_ends(batch, num_tables)
    return [
        TableSpan(table, begin, end)
        for table, (begin, end) in enumerate(zip((0, *ends), ends, strict=False))
        if begin < end
    ]


def batch_of(keys: Tensor, table: int) -> RowBatch:
    """Return ``keys int64[n]`` of a table whose arena rows are its keys."""
    return RowBatch(keys, keys, torch.full_like(keys, table))


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Return the rows of all batches in one."""
    # Most often: then nothing is copied.
    if len(batches) == 1:
        return batches[0]
    return RowBatch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


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
    # Hashes are not needed where all keys are in one.
    if num_partitions == 1:
        if keys.numel():
            yield 0, slice(0, keys.numel())
        return
    numbers = (mixed(keys.contiguous().numpy()) % np.uint64(num_partitions)).astype(
        np.uint16 if num_partitions < 2**16 else np.int64
    )
    order = torch.from_numpy(numbers.argsort(kind="stable"))  # a radix sort for 16 bits
    counts = np.bincount(numbers, minlength=num_partitions).tolist()
    for number, places in enumerate(torch.split(order, counts)):
        if places.numel():
            yield number, places
