"""Frozen descriptions of what a user asks for: tables, features, data sets, models, optimizers, runs, servers.

Standard library only. A spec validates itself when it is made and raises `terarec.errors.ConfigError`.
"""

from terarec.spec.codec import from_data, to_data
from terarec.spec.dataset import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, ShardSpec
from terarec.spec.encoder import (
    FIRST_ID,
    MISSING_ID,
    RARE_ID,
    BucketizeEncoder,
    CategoricalEncoder,
    DenseEncoder,
    LogShiftEncoder,
    StandardizeEncoder,
    VocabularyEncoder,
)
from terarec.spec.feature import FeatureSpec, Pooling
from terarec.spec.field_error import FieldError
from terarec.spec.model import DLRMSpec, ModelSpec, WideDeepSpec
from terarec.spec.optimizer import (
    AdaGradSpec,
    AdamSpec,
    DenseOptimizerSpec,
    RowWiseAdaGradSpec,
    SGDSpec,
    SparseOptimizerSpec,
)
from terarec.spec.run import RunSpec, TrainingSpec
from terarec.spec.serving import ServingSpec
from terarec.spec.table import Initializer, TableSpec

__all__ = [
    "FIRST_ID",
    "MISSING_ID",
    "RARE_ID",
    "AdaGradSpec",
    "AdamSpec",
    "BucketizeEncoder",
    "CategoricalColumn",
    "CategoricalEncoder",
    "DLRMSpec",
    "DatasetSpec",
    "DenseColumn",
    "DenseEncoder",
    "DenseOptimizerSpec",
    "FeatureSpec",
    "FieldError",
    "Initializer",
    "LabelColumn",
    "LogShiftEncoder",
    "ModelSpec",
    "Pooling",
    "RowWiseAdaGradSpec",
    "RunSpec",
    "SGDSpec",
    "ServingSpec",
    "ShardSpec",
    "SparseOptimizerSpec",
    "StandardizeEncoder",
    "TableSpec",
    "TrainingSpec",
    "VocabularyEncoder",
    "WideDeepSpec",
    "from_data",
    "to_data",
]
