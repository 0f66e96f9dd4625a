# SPDX-License-Identifier: Apache-2.0
"""Stores, which map keys to rows behind one protocol, and the arenas of their rows."""

from terarec.storage.static import Arena
from terarec.storage.store import RowValues, Store

__all__ = ["Arena", "RowValues", "Store"]
