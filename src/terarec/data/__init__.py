# SPDX-License-Identifier: Apache-2.0
"""Reading data sets and HugeCTR's files as batches.

The names are imported on first use: readers load torch, which generators and descriptions do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terarec.lazy_imports import lazy_names

if TYPE_CHECKING:
    from terarec.data.description import read_spec
    from terarec.data.open import open_reader
    from terarec.data.reader import BatchReader, InMemorySource, Reader
    from terarec.data.sampling import RankShare

__all__ = ["BatchReader", "InMemorySource", "RankShare", "Reader", "open_reader", "read_spec"]

_HOMES = {
    "description": ("read_spec",),
    "open": ("open_reader",),
    "reader": ("BatchReader", "InMemorySource", "Reader"),
    "sampling": ("RankShare",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
