"""Key -> row stores behind one protocol, and the arenas that hold their rows."""

from terarec.storage.arena import Arena
from terarec.storage.protocol import Rows, Store
from terarec.storage.static import StaticTable, static_tables

__all__ = ["Arena", "Rows", "StaticTable", "Store", "static_tables"]
