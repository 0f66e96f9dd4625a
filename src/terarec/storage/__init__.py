"""Stores, which map keys to rows behind one protocol, and the arenas of their rows."""

from terarec.storage.arena import Arena
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.key_rows import FrozenKeys
from terarec.storage.row_store import MemoryRowStore, RowStore
from terarec.storage.static import StaticTable, static_tables
from terarec.storage.store import Rows, Store

AnyArena = Arena | DynamicArena
AnyTable = StaticTable | DynamicTable

__all__ = [
    "AnyArena",
    "AnyTable",
    "Arena",
    "DynamicArena",
    "DynamicTable",
    "FrozenKeys",
    "MemoryRowStore",
    "RowStore",
    "Rows",
    "StaticTable",
    "Store",
    "dynamic_tables",
    "static_tables",
]
