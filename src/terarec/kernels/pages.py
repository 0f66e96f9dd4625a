# SPDX-License-Identifier: Apache-2.0
"""Zeros that take memory page by page, where they are first written."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from terarec.errors import NoSpaceError

# Below, a map of its own would cost more than the memory: the system allows a process some 65,000 of them.
_LEAST_MAPPED_BYTES = 1 << 20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which `mmap` names from Python 3.13 on alone


def reserve(num_bytes: int, purpose: str) -> mmap.mmap:
    """Map zeros that take memory page by page, where they are first written, and that may be more than the system has.

    Raises:
        StorageError: The system has too little address space.
    """
    try:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError):
        raise NoSpaceError(
            purpose, f"{num_bytes:,} bytes of address space requested, the system has too little"
        ) from None


def untouched_zeros(count: int, dtype: torch.dtype, purpose: str, *, huge_pages: bool = True) -> Tensor:
    """Return zeros [count] in host memory that take memory where they are written.

    Neither `torch.zeros` nor `numpy.zeros` does: the first writes all, and the second does where the C allocator has a
    freed block that is large enough, of which training keeps some (`terarec.train.devices.keep_freed_memory`).

    Args:
        count: Number of elements.
        dtype: Type of the elements.
        purpose: What the error names.
        huge_pages: Whether the system may give a huge page for a first write, which is faster where most are written.

    Raises:
        StorageError: The system has too little address space.
    """
    num_bytes = count * dtype.itemsize
    if num_bytes < _LEAST_MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(count, dtype=dtype)
    pages = reserve(num_bytes, purpose)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)
