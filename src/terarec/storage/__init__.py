"""Stores, which map keys to rows behind one protocol, and the arenas of their rows."""

from terarec.kernels.slots import Pin, RowBatch
from terarec.storage.cached_rows import BudgetError
from terarec.storage.changes import ChangedRows, discard_changes
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.fast_tier import TierUse
from terarec.storage.key_rows import FrozenKeys
from terarec.storage.row_format import RowFormat
from terarec.storage.row_placement import PlacedRows
from terarec.storage.row_store import MemoryRowStore, RowStore
from terarec.storage.static import Arena, StaticTable, static_tables
from terarec.storage.store import Rows, Store
from terarec.storage.tier_budget import TierBudget
from terarec.storage.tiered import TieredArena, TieredTable, tiered_tables
from terarec.storage.tiered_rows import TieredRows

AnyArena = Arena | TieredArena | DynamicArena
AnyTable = StaticTable | TieredTable | DynamicTable

__all__ = [
    "AnyArena",
    "AnyTable",
    "Arena",
    "BudgetError",
    "ChangedRows",
    "DynamicArena",
    "DynamicTable",
    "FrozenKeys",
    "MemoryRowStore",
    "Pin",
    "PlacedRows",
    "RowBatch",
    "RowFormat",
    "RowStore",
    "Rows",
    "StaticTable",
    "Store",
    "TierBudget",
    "TierUse",
    "TieredArena",
    "TieredRows",
    "TieredTable",
    "discard_changes",
    "dynamic_tables",
    "static_tables",
    "tiered_tables",
]
