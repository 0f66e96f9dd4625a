# SPDX-License-Identifier: Apache-2.0
"""Operators of feature workflows: one class each, with its fields, fitting, and the transform of rows and records.

Described in docs/workflows.md; CONTRIBUTING.md shows how one is added.
"""

from terarec.etl.ops.base import MappedColumns, Operator
from terarec.etl.ops.categorical import Categorify
from terarec.etl.ops.columns import DropLowCardinality, KeepRows, LambdaOp, Rename
from terarec.etl.ops.groupby import JoinGroupby
from terarec.etl.ops.hashing import Cross, GivenIds, HashBucket
from terarec.etl.ops.joins import JoinTable, NegativeSampling
from terarec.etl.ops.numeric import Clip, LogOp, Normalize, NormalizeMinMax, NumberOperator
from terarec.etl.ops.parts import DateParts, SplitText
from terarec.etl.ops.quantiles import Bucketize, FillMissing
from terarec.etl.ops.sequences import DifferenceLag, Explode, History, ListSlice, Pad
from terarec.etl.ops.states import KeyedStatistic, MergeableStatistic, State
from terarec.etl.ops.target_encoding import TargetEncoding
from terarec.spec.registry import register

__all__ = [
    "Bucketize",
    "Categorify",
    "Clip",
    "Cross",
    "DateParts",
    "DifferenceLag",
    "DropLowCardinality",
    "Explode",
    "FillMissing",
    "GivenIds",
    "HashBucket",
    "History",
    "JoinGroupby",
    "JoinTable",
    "KeepRows",
    "KeyedStatistic",
    "LambdaOp",
    "ListSlice",
    "LogOp",
    "MappedColumns",
    "MergeableStatistic",
    "NegativeSampling",
    "Normalize",
    "NormalizeMinMax",
    "NumberOperator",
    "Operator",
    "Pad",
    "Rename",
    "SplitText",
    "State",
    "TargetEncoding",
    "register",
]
