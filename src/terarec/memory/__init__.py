# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in several memories: a bounded fast one, host memory, and stores on disks and servers."""

from terarec.kernels.slots import Pin, RowBatch  # for embedding, which imports no kernels
from terarec.memory.cached_part import BudgetError
from terarec.memory.row_store import RowStore

__all__ = ["BudgetError", "Pin", "RowBatch", "RowStore"]
