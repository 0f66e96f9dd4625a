# SPDX-License-Identifier: Apache-2.0
"""Stores, which map keys to rows behind one protocol, and the arenas of their rows."""

from terarec.storage.changes import ChangedRows, discard_changes
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.key_rows import FrozenKeys
from terarec.storage.static import Arena, StaticTable, static_tables
from terarec.storage.store import RowValues, Store
from terarec.storage.tiered import TieredArena, TieredTable, tiered_tables

AnyArena = Arena | TieredArena | DynamicArena
AnyTable = StaticTable | TieredTable | DynamicTable

__all__ = [
    "AnyArena",
    "AnyTable",
    "Arena",
    "ChangedRows",
    "DynamicArena",
    "DynamicTable",
    "FrozenKeys",
    "RowValues",
    "StaticTable",
    "Store",
    "TieredArena",
    "TieredTable",
    "discard_changes",
    "dynamic_tables",
    "static_tables",
    "tiered_tables",
]
