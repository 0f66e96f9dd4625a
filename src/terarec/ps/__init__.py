# SPDX-License-Identifier: Apache-2.0
"""The parameter server: tables of served models in tiers (host memory, Redis or Valkey, disk), looked up in batches."""

from terarec.memory.guarded import TierStatistics, TierUseStatistics
from terarec.ps.cache import EmbeddingCache, ModelCaches
from terarec.ps.group_cache import CacheStatistics
from terarec.ps.loading import Loading, LoadProgress
from terarec.ps.server import ParameterServer
from terarec.ps.table import (
    DefaultRows,
    Found,
    TableGroup,
    TableStatistics,
    TableTiers,
    constant_rows,
    default_rows,
)

__all__ = [
    "CacheStatistics",
    "DefaultRows",
    "EmbeddingCache",
    "Found",
    "LoadProgress",
    "Loading",
    "ModelCaches",
    "ParameterServer",
    "TableGroup",
    "TableStatistics",
    "TableTiers",
    "TierStatistics",
    "TierUseStatistics",
    "constant_rows",
    "default_rows",
]
