"""The parameter server: tables of served models in tiers (host memory, Redis or Valkey, disk), looked up in batches."""

from terarec.ps.cache import CacheStatistics, EmbeddingCache
from terarec.ps.disk import RowStoreTier
from terarec.ps.host_memory import HostMemoryTier
from terarec.ps.loading import Loading, LoadProgress
from terarec.ps.model_caches import ModelCaches
from terarec.ps.redis_server import RedisServer
from terarec.ps.redis_tier import RedisTier
from terarec.ps.server import ParameterServer
from terarec.ps.table import (
    DefaultRows,
    TableStatistics,
    TableTiers,
    TierUseStatistics,
    constant_rows,
    default_rows,
)
from terarec.ps.tier import Found, Tier, TierStatistics

__all__ = [
    "CacheStatistics",
    "DefaultRows",
    "EmbeddingCache",
    "Found",
    "HostMemoryTier",
    "LoadProgress",
    "Loading",
    "ModelCaches",
    "ParameterServer",
    "RedisServer",
    "RedisTier",
    "RowStoreTier",
    "TableStatistics",
    "TableTiers",
    "Tier",
    "TierStatistics",
    "TierUseStatistics",
    "constant_rows",
    "default_rows",
]
