"""All tables, in the order of the page: what docs/hugectr-compat.md and the tests are made from."""

from __future__ import annotations

from terarec.hugectr.tables.calls import (
    ADD,
    FIT,
    LOAD_DENSE_OPTIMIZER_STATES,
    LOAD_DENSE_WEIGHTS,
    LOAD_SPARSE_OPTIMIZER_STATES,
    LOAD_SPARSE_WEIGHTS,
    MODEL,
    SAVE_PARAMS_TO_FILES,
    SET_LEARNING_RATE,
    UPDATE,
)
from terarec.hugectr.tables.data_input import DataReaderSparseParam, Input
from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.dense_layer import DenseLayer, DenseLayerComputeConfig, DenseLayerSwitchs, GroupDenseLayer
from terarec.hugectr.tables.embedding_collection import (
    COLLECTION_CONFIG_23_02,
    EMBEDDING_COLLECTION_CONFIG,
    EMBEDDING_LOOKUP,
    PLAN_FILE,
    PLAN_MATRIX,
    PLANNER_LOOKUP,
    SHARD,
)
from terarec.hugectr.tables.embedding_table import EmbeddingTableConfig, EmbeddingTablePlaceHolder
from terarec.hugectr.tables.generator import DataGeneratorParams
from terarec.hugectr.tables.low_level import SESSION, SolverConfig
from terarec.hugectr.tables.optimizer import OptimizerWithSchedule, OptParamsPy
from terarec.hugectr.tables.reader import AsyncParam, DataReaderParams
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.schedule import LEARNING_RATE_SCHEDULER
from terarec.hugectr.tables.solver import Solver
from terarec.hugectr.tables.sparse_embedding import HybridEmbeddingParam, SparseEmbedding
from terarec.hugectr.tables.table import Table
from terarec.hugectr.tables.training_cache import (
    EmbeddingTrainingCacheParams,
    HMemCacheConfig,
    ModelOversubscriberParams,
)

RECORDS: tuple[type[Record], ...] = (
    Solver,
    OptParamsPy,
    OptimizerWithSchedule,
    DataReaderParams,
    AsyncParam,
    DataSourceParams,
    Input,
    DataReaderSparseParam,
    SparseEmbedding,
    HybridEmbeddingParam,
    DenseLayer,
    DenseLayerComputeConfig,
    DenseLayerSwitchs,
    GroupDenseLayer,
    EmbeddingTableConfig,
    EmbeddingTablePlaceHolder,
    EmbeddingTrainingCacheParams,
    HMemCacheConfig,
    ModelOversubscriberParams,
    SolverConfig,
    DataGeneratorParams,
)
"""Every class of objects that a table makes."""

TABLES: tuple[Table, ...] = (
    *(form for record in RECORDS for form in record.FORMS),
    EMBEDDING_COLLECTION_CONFIG,
    COLLECTION_CONFIG_23_02,
    EMBEDDING_LOOKUP,
    SHARD,
    PLANNER_LOOKUP,
    PLAN_FILE,
    PLAN_MATRIX,
    LEARNING_RATE_SCHEDULER,
    MODEL,
    ADD,
    FIT,
    SET_LEARNING_RATE,
    SAVE_PARAMS_TO_FILES,
    LOAD_DENSE_WEIGHTS,
    LOAD_DENSE_OPTIMIZER_STATES,
    LOAD_SPARSE_WEIGHTS,
    LOAD_SPARSE_OPTIMIZER_STATES,
    UPDATE,
    SESSION,
)
"""Every table."""
