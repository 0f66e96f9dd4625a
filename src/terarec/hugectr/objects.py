# SPDX-License-Identifier: Apache-2.0
"""The objects that calls of HugeCTR create. Their attributes and signatures are in ``objects.pyi``.

``python -m tests.hugectr.generate stub > src/terarec/hugectr/objects.pyi`` writes that file.
"""

from __future__ import annotations

from collections.abc import Mapping

from terarec.hugectr.schema.record import Record
from terarec.hugectr.schema.types import CLASSES


class TrainingCallback:
    """Base of a script's callbacks, which `Model.fit` calls with iterations (23.04 on).

    A subclass overrides what it needs.
    """

    def on_training_start(self) -> None:
        """Do nothing before the first iteration."""

    def on_training_end(self, current_iter: int) -> None:
        """Do nothing after the last iteration, which was the `current_iter`-th."""

    def on_eval_start(self, current_iter: int) -> bool:
        """Return anything before an evaluation after `current_iter` iterations; HugeCTR does not look at it."""
        return False

    def on_eval_end(self, current_iter: int, eval_results: Mapping[str, float]) -> bool:
        """Return whether to end the training after an evaluation, by its metrics."""
        return False


CLASSES.add("TrainingCallback", TrainingCallback)


class DataSourceParams(Record, call="data.DataSourceParams"):
    """A file system; its attributes may be set."""

    is_writable = True


class Solver(Record, call="CreateSolver"):
    """A training run, made by `CreateSolver`."""


class SolverConfig(Solver, call="solver_parser_helper"):
    """A training run of 2.3 and 3.0, with the files to start from, made by `solver_parser_helper`."""


class OptParamsPy(Record, call="CreateOptimizer"):
    """An optimizer, made by `CreateOptimizer`."""


class OptimizerWithSchedule(OptParamsPy, call="optimizer.CreateOptimizer"):
    """An optimizer with its learning rate, made by `hugectr.optimizer.CreateOptimizer` of 3.0."""


class AsyncParam(Record, call="AsyncParam"):
    """Options of the RawAsync reader."""


class DataReaderParams(Record, call="DataReaderParams"):
    """Location and format of the data; ``source`` and ``keyset`` are always lists."""


class DataReaderSparseParam(Record, call="DataReaderSparseParam"):
    """Slots with one name; ``nnz_per_slot`` always has a number for each slot."""


class Input(Record, call="Input"):
    """The tensors of the data; every form has ``label_dims``, ``label_names`` and ``label_weights``."""


class DataGeneratorParams(Record, call="tools.DataGeneratorParams"):
    """Random data of a layout."""


class HybridEmbeddingParam(Record, call="HybridEmbeddingParam"):
    """Placement of the rows of a hybrid embedding."""


class SparseEmbedding(Record, call="SparseEmbedding"):
    """An embedding, with its capacity in MiB or rows for each GPU, or the sizes of its slots."""


class EmbeddingTableConfig(Record, call="EmbeddingTableConfig"):
    """A table of an embedding collection; ``max_vocabulary_size`` -1 is a dynamic table."""


class EmbeddingTablePlaceHolder(EmbeddingTableConfig, call="EmbeddingTablePlaceHolder"):
    """A table in release 3.7: the outputs of its lookups have two dimensions."""


class CollectionOptions(Record, call="EmbeddingCollectionConfig"):
    """The options of an `EmbeddingCollectionConfig`."""


class DenseLayerComputeConfig(Record, call="DenseLayerComputeConfig"):
    """Settings of a GPU that computes a layer."""


class DenseLayerSwitchs(Record, call="DenseLayerSwitchs"):
    """Settings of a GPU that computes a layer, in releases 3.7 to 4.3."""


class DenseLayer(Record, call="DenseLayer"):
    """A layer of the dense network; ``bottom_names`` and ``top_names`` are always lists."""


class GroupDenseLayer(Record, call="GroupDenseLayer"):
    """A chain of fully connected layers."""


class HMemCacheConfig(Record, call="CreateHMemCache"):
    """Blocks of rows in host memory, made by `CreateHMemCache`."""


class EmbeddingTrainingCacheParams(Record, call="CreateETC"):
    """A training cache, made by `CreateETC`."""


class ModelOversubscriberParams(Record, call="CreateMOS"):
    """A model oversubscriber of 3.1 and 3.2, made by `CreateMOS`."""


class VolatileDatabaseParams(Record, call="VolatileDatabaseParams"):
    """The memory or the server that keeps the rows of served tables; its attributes may be set."""

    is_writable = True


class CPUMemoryDatabaseParams(VolatileDatabaseParams, call="CPUMemoryDatabaseParams"):
    """The memory of the process in release 3.3."""


class DistributedDatabaseParams(VolatileDatabaseParams, call="DistributedDatabaseParams"):
    """A server in release 3.3."""


class PersistentDatabaseParams(Record, call="PersistentDatabaseParams"):
    """The disk that keeps the rows of served tables; its attributes may be set."""

    is_writable = True


class UpdateSourceParams(Record, call="UpdateSourceParams"):
    """A queue of changed rows; its attributes may be set."""

    is_writable = True


class InferenceParams(Record, call="InferenceParams"):
    """A model to serve; its attributes may be set."""

    is_writable = True


class ParameterServerConfig(Record, call="ParameterServerConfig"):
    """The models of a parameter server."""


class ParameterServer:
    """The tables of models: `inference.ParameterServer`, which `CreateParameterServer` makes in release 3.0."""

    def close(self) -> None:
        """Free the memory of the tables."""


CLASSES.add("ParameterServer", ParameterServer)


class EmbeddingCache:
    """The caches of a model's tables, of `ParameterServer.get_embedding_cache`, or `CreateEmbeddingCache` of 3.0."""

    def close(self) -> None:
        """Free the memory of the caches."""


CLASSES.add("EmbeddingCache", EmbeddingCache)
