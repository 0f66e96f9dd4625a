# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's own interface, releases 2.3 to 25.03: ``import terarec.hugectr as hugectr`` and a script for HugeCTR runs.

Names and parameters, and which of them are supported, are in `terarec.hugectr.schema` and in docs/hugectr-compat.md.
Nothing that computes is imported here: a name imports its module when it is first used. Type checkers read the names in
``__init__.pyi``, which ``python -m tests.hugectr.generate names`` writes.
"""

from __future__ import annotations

import importlib

from terarec.hugectr import data, enums, inference, optimizer
from terarec.hugectr.embedding_collection import (
    EmbeddingCollectionConfig,
    EmbeddingCollectionPlaceholder,
    EmbeddingPlanner,
)
from terarec.hugectr.enums import CPUMemoryHashMapAlgorithm_t, DataSourceType_t
from terarec.hugectr.objects import (
    AsyncParam,
    DataReaderParams,
    DataReaderSparseParam,
    DenseLayer,
    DenseLayerComputeConfig,
    DenseLayerSwitchs,
    EmbeddingTableConfig,
    EmbeddingTablePlaceHolder,
    EmbeddingTrainingCacheParams,
    GroupDenseLayer,
    HMemCacheConfig,
    HybridEmbeddingParam,
    Input,
    ModelOversubscriberParams,
    OptParamsPy,
    Solver,
    SolverConfig,
    SparseEmbedding,
    TrainingCallback,
    UpdateSourceParams,
)

CreateSolver = Solver
CreateOptimizer = OptParamsPy
CreateETC = EmbeddingTrainingCacheParams
CreateHMemCache = HMemCacheConfig
CreateMOS = ModelOversubscriberParams
solver_parser_helper = SolverConfig

__version__ = "25.3.0"
"""The newest release whose interface this is."""

# torch takes seconds to import, and scripts that only print a version or make a solver need none of it.
_ON_USE = {
    "DataReader32": "terarec.hugectr.readers",
    "DataReader64": "terarec.hugectr.readers",
    "EmbeddingTrainingCache": "terarec.hugectr.training_cache",
    "IDataReader": "terarec.hugectr.readers",
    "LearningRateScheduler": "terarec.hugectr.schedule",
    "Model": "terarec.hugectr.model",
    "ModelOversubscriber": "terarec.hugectr.training_cache",
    "ModelPerfExt": "terarec.hugectr.model",
    "Session": "terarec.hugectr.training_json",
    "SolverParser": "terarec.hugectr.training_json",
    "get_learning_rate_scheduler": "terarec.hugectr.training_json",
}
"""Name -> the module that a first use of it imports."""

_SYNONYMS = {
    "DataReader32": "DataReader",
    "DataReader64": "DataReader",
    "EmbeddingTrainingCache": "TrainingCache",
    "IDataReader": "DataReader",
    "ModelOversubscriber": "TrainingCache",
    "ModelPerfExt": "Model",
}

__all__ = [
    "AsyncParam",
    "CreateETC",
    "CreateHMemCache",
    "CreateMOS",
    "CreateOptimizer",
    "CreateSolver",
    "DataReaderParams",
    "DataReaderSparseParam",
    "DenseLayer",
    "DenseLayerComputeConfig",
    "DenseLayerSwitchs",
    "EmbeddingCollectionConfig",
    "EmbeddingCollectionPlaceholder",
    "EmbeddingPlanner",
    "EmbeddingTableConfig",
    "EmbeddingTablePlaceHolder",
    "EmbeddingTrainingCacheParams",
    "GroupDenseLayer",
    "HMemCacheConfig",
    "HybridEmbeddingParam",
    "Input",
    "LearningRateScheduler",
    "Model",
    "ModelOversubscriberParams",
    "OptParamsPy",
    "Session",
    "Solver",
    "SolverConfig",
    "SolverParser",
    "SparseEmbedding",
    "TrainingCallback",
    "UpdateSourceParams",
    "data",
    "get_learning_rate_scheduler",
    "inference",
    "optimizer",
    "solver_parser_helper",
    "tools",
    "CPUMemoryHashMapAlgorithm_t",
    "DataSourceType_t",
    *(enum.__name__ for enum in enums.ENUMS),
]
globals().update({enum.__name__: enum for enum in enums.ENUMS})


def __getattr__(name: str) -> object:
    if name == "tools":
        return importlib.import_module("terarec.hugectr.tools")
    if name in _ON_USE:
        return getattr(importlib.import_module(_ON_USE[name]), _SYNONYMS.get(name, name))
    owners = enums.owners_of(name)
    # Either choice could silently be the wrong one, so a name of two enumerations is an error.
    if len(owners) > 1:
        spellings = " or ".join(f"{type(owner).__name__}.{name}" for owner in owners)
        raise AttributeError(f"hugectr.{name} is ambiguous: write {spellings}")
    if owners:
        return owners[0]
    # Not at the top of the file, where it would become a name of the package.
    from terarec.hugectr.schema.table import names

    reasons = (row.why for row in names()["Other names"] if row.name == name)
    reason = next(reasons, "docs/hugectr-compat.md lists what it has")
    raise AttributeError(f"terarec.hugectr has no {name!r}: {reason}")
