# SPDX-License-Identifier: Apache-2.0
"""The arenas and tables that there are."""

from terarec.storage.dynamic import DynamicTable
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.static import Arena, StaticTable
from terarec.storage.tiered import TieredArena, TieredTable

AnyArena = Arena | TieredArena | DynamicArena
AnyTable = StaticTable | TieredTable | DynamicTable
