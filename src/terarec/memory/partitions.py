# SPDX-License-Identifier: Apache-2.0
"""Partitions of the keys of a table: those of HugeCTR's parameter server, so that both find each other's rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    numbers = (mixed(keys.contiguous().numpy()) % np.uint64(num_partitions)).astype(
        np.uint16 if num_partitions < 2**16 else np.int64
    )
    order = torch.from_numpy(numbers.argsort(kind="stable"))  # a radix sort for 16 bits
    counts = np.bincount(numbers, minlength=num_partitions).tolist()
    for number, places in enumerate(torch.split(order, counts)):
        if places.numel():
            yield number, places
