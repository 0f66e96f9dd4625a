# SPDX-License-Identifier: Apache-2.0
"""The Sparse Operation Kit's interface for TensorFlow: ``import terarec.tensorflow as sok``. It never imports torch.

Names are imported on first use, and TensorFlow with the first of them.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from terarec.errors import MissingDependencyError
from terarec.lazy_imports import lazy_names

if TYPE_CHECKING:
    from terarec.tensorflow.communication import global_gpu_id, local_rank, num_gpus, num_ranks, rank
    from terarec.tensorflow.dump_files import assign, dump, export, incremental_model_dump, load
    from terarec.tensorflow.dynamic_variables import DynamicVariable
    from terarec.tensorflow.lookups import (
        all2all_dense_embedding,
        embedding_lookup,
        embedding_lookup_sparse,
        lookup_sparse,
        sparse_read_and_evict,
    )
    from terarec.tensorflow.optimizers import SGD, Adam, OptimizerWrapper, filter_variables
    from terarec.tensorflow.plugin import (
        All2AllDenseEmbedding,
        DistributedEmbedding,
        Init,
        OptimizerScope,
        Saver,
        get_embedding,
        split_embedding_variable_from_others,
    )
    from terarec.tensorflow.session import init, set_comm_tool, tf_version
    from terarec.tensorflow.variables import Variable

__all__ = [
    "SGD",
    "Adam",
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicVariable",
    "Init",
    "OptimizerScope",
    "OptimizerWrapper",
    "Saver",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "dump",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "export",
    "filter_variables",
    "get_embedding",
    "global_gpu_id",
    "incremental_model_dump",
    "init",
    "load",
    "local_rank",
    "lookup_sparse",
    "num_gpus",
    "num_ranks",
    "rank",
    "set_comm_tool",
    "sparse_read_and_evict",
    "split_embedding_variable_from_others",
    "tf_version",
]

_HOMES = {
    "communication": ("global_gpu_id", "local_rank", "num_gpus", "num_ranks", "rank"),
    "dump_files": ("assign", "dump", "export", "incremental_model_dump", "load"),
    "dynamic_variables": ("DynamicVariable",),
    "lookups": (
        "all2all_dense_embedding",
        "embedding_lookup",
        "embedding_lookup_sparse",
        "lookup_sparse",
        "sparse_read_and_evict",
    ),
    "optimizers": ("SGD", "Adam", "OptimizerWrapper", "filter_variables"),
    "plugin": (
        "All2AllDenseEmbedding",
        "DistributedEmbedding",
        "Init",
        "OptimizerScope",
        "Saver",
        "get_embedding",
        "split_embedding_variable_from_others",
    ),
    "session": ("init", "set_comm_tool", "tf_version"),
    "variables": ("Variable",),
}
_MODULES = ("communication", "keras", "optimizers")
"""Modules that are names of the package, as scripts use them."""


if not TYPE_CHECKING:
    _import_name, __dir__ = lazy_names(__name__, _HOMES)

    def __getattr__(name: str) -> object:
        if (name in __all__ or name in _MODULES) and importlib.util.find_spec("tensorflow") is None:
            raise MissingDependencyError("tensorflow", "not installed, expected pip install 'terarec[tensorflow]'")
        if name == "experiment":  # 1.1.4 to 1.3 had what became 2.0 there
            return importlib.import_module(__name__)
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        return _import_name(name)
