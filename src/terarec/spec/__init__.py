"""Frozen descriptions of what a user asks for: tables, features, data sets, models, optimizers, runs, servers.

Standard library only. A spec validates itself when it is made and raises `terarec.errors.ConfigError`.
"""

from terarec.spec.admission import (
    AdmissionSpec,
    FilterAdmission,
    FrequencyAdmission,
    ProbabilityAdmission,
    counting_filter,
    freq,
    prob,
)
from terarec.spec.codec import from_data, to_data
from terarec.spec.dataset import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, ShardSpec
from terarec.spec.encoder import (
    FIRST_ID,
    MISSING_ID,
    MISSING_KEY,
    RARE_ID,
    BucketizeEncoder,
    CategoricalEncoder,
    DenseEncoder,
    LogShiftEncoder,
    StandardizeEncoder,
    VocabularyEncoder,
)
from terarec.spec.eviction import (
    EvictionSpec,
    LFUEviction,
    LRUEviction,
    ScoreEviction,
    ScoreFunction,
    TTLEviction,
    by_score,
    lfu,
    lru,
    ttl,
)
from terarec.spec.feature import FeatureSpec, Pooling
from terarec.spec.field_error import FieldError
from terarec.spec.graph import (
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
)
from terarec.spec.model import DLRMSpec, ModelSpec, WideDeepSpec
from terarec.spec.optimizer import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    DenseOptimizerSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowWiseAdaGradSpec,
    SGDSpec,
    SparseOptimizerSpec,
)
from terarec.spec.records import RECORD_KINDS, RecordLayout, RecordSplit, RecordsSpec, SparseInput
from terarec.spec.row_options import RowOptions
from terarec.spec.run import RunSpec, TrainingSpec
from terarec.spec.serving import ServingSpec
from terarec.spec.table import DynamicTableSpec, Initializer, RowType, TableSpec
from terarec.spec.tables import DynamicTablesSpec, StaticTablesSpec, TablesSpec

__all__ = [
    "FIRST_ID",
    "MISSING_ID",
    "MISSING_KEY",
    "RARE_ID",
    "RECORD_KINDS",
    "AdaGradSpec",
    "AdamSpec",
    "AdamWSpec",
    "AdmissionSpec",
    "BucketizeEncoder",
    "CategoricalColumn",
    "CategoricalEncoder",
    "DLRMSpec",
    "DatasetSpec",
    "DenseColumn",
    "DenseEncoder",
    "DenseOptimizerSpec",
    "DynamicTableSpec",
    "DynamicTablesSpec",
    "EvictionSpec",
    "FTRLSpec",
    "FeatureSpec",
    "FieldError",
    "FilterAdmission",
    "FrequencyAdmission",
    "GraphEmbedding",
    "GraphFeature",
    "GraphLabel",
    "GraphLayer",
    "GraphSpec",
    "Initializer",
    "LFUEviction",
    "LRUEviction",
    "LabelColumn",
    "LogShiftEncoder",
    "ModelSpec",
    "MomentumSpec",
    "NesterovSpec",
    "Pooling",
    "ProbabilityAdmission",
    "RMSPropSpec",
    "RecordLayout",
    "RecordSplit",
    "RecordsSpec",
    "RowOptions",
    "RowType",
    "RowWiseAdaGradSpec",
    "RunSpec",
    "SGDSpec",
    "ScoreEviction",
    "ScoreFunction",
    "ServingSpec",
    "ShardSpec",
    "SparseInput",
    "SparseOptimizerSpec",
    "StandardizeEncoder",
    "StaticTablesSpec",
    "TTLEviction",
    "TableSpec",
    "TablesSpec",
    "TrainingSpec",
    "VocabularyEncoder",
    "WideDeepSpec",
    "by_score",
    "counting_filter",
    "freq",
    "from_data",
    "lfu",
    "lru",
    "prob",
    "to_data",
    "ttl",
]
