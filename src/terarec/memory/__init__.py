# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in several memories: a bounded fast one, host memory, and stores on disks and servers."""

from terarec.kernels.slots import Pin, RowBatch
from terarec.memory.budget import TierBudget
from terarec.memory.cached_part import BudgetError
from terarec.memory.fast_tier import TierUse
from terarec.memory.redis_server import RedisServer
from terarec.memory.row_format import RowFormat
from terarec.memory.row_placement import PlacedRows
from terarec.memory.row_store import RowStore
from terarec.memory.tiered_rows import TieredRows

__all__ = [
    "BudgetError",
    "Pin",
    "PlacedRows",
    "RedisServer",
    "RowBatch",
    "RowFormat",
    "RowStore",
    "TierBudget",
    "TierUse",
    "TieredRows",
]
