# SPDX-License-Identifier: Apache-2.0
"""Rows in a file that processes map, so that they are in memory once."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.io.files import atomic_file


def mapped_rows(rows: Tensor, path: Path) -> Tensor:
    """Return rows that are read from a file; what is written to them stays in this process.

    Args:
        rows: Rows [n, D] in host memory, which are written to the file if there is none.
        path: The file. Processes that have mapped it keep it when it is removed.

    Raises:
        StorageError: The file system has too little room.
    """
    if not path.is_file():
        size, available = rows.numel() * rows.element_size(), shutil.disk_usage(path.parent).free
        if size > available:  # said here, as NumPy reports a write that was cut without its reason
            raise NoSpaceError(path.parent, f"{size:,} bytes requested, {available:,} available")
        with atomic_file(path, flushes=False) as partial:
            rows.contiguous().view(torch.uint8).numpy().tofile(partial)
    return torch.from_file(str(path), shared=False, size=rows.numel(), dtype=rows.dtype).view(rows.shape)
