# SPDX-License-Identifier: Apache-2.0
"""hugectr.inference: serving, in the interface of every release from 3.0 to 24.06."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from terarec.hugectr.enums import (
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    InferType,
    UpdateSourceType_t,
)
from terarec.hugectr.objects import (
    CPUMemoryDatabaseParams,
    DistributedDatabaseParams,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)

if TYPE_CHECKING:
    from terarec.hugectr.inference.hps import HPS
    from terarec.hugectr.inference.session import CreateInferenceSession, InferenceModel, InferenceSession
    from terarec.hugectr.inference.shared_tables import CreateParameterServer
    from terarec.hugectr.inference.shared_tables import LoadedEmbeddingCache as CreateEmbeddingCache
    from terarec.hugectr.inference.shared_tables import LoadedParameterServer as ParameterServer

__all__ = [
    "HPS",
    "CPUMemoryDatabaseParams",
    "CreateEmbeddingCache",
    "CreateInferenceSession",
    "CreateParameterServer",
    "DatabaseOverflowPolicy_t",
    "DatabaseType_t",
    "DistributedDatabaseParams",
    "EmbeddingCacheType_t",
    "InferType",
    "InferenceModel",
    "InferenceParams",
    "InferenceSession",
    "ParameterServer",
    "ParameterServerConfig",
    "PersistentDatabaseParams",
    "UpdateSourceParams",
    "UpdateSourceType_t",
    "VolatileDatabaseParams",
]

_SESSIONS = "terarec.hugectr.inference.session"
_SHARED_TABLES = "terarec.hugectr.inference.shared_tables"
# What computes is loaded when a script first names it: torch takes seconds.
_ON_USE = {
    "HPS": ("terarec.hugectr.inference.hps", "HPS"),
    "CreateEmbeddingCache": (_SHARED_TABLES, "LoadedEmbeddingCache"),
    "CreateInferenceSession": (_SESSIONS, "CreateInferenceSession"),
    "CreateParameterServer": (_SHARED_TABLES, "CreateParameterServer"),
    "InferenceModel": (_SESSIONS, "InferenceModel"),
    "InferenceSession": (_SESSIONS, "InferenceSession"),
    "ParameterServer": (_SHARED_TABLES, "LoadedParameterServer"),
}


if not TYPE_CHECKING:  # to a checker, it would be any name

    def __getattr__(name: str) -> object:
        if name not in _ON_USE:
            raise AttributeError(f"terarec.hugectr.inference has no {name!r}: docs/hugectr-compat.md lists what it has")
        module, attribute = _ON_USE[name]
        return getattr(importlib.import_module(module), attribute)
