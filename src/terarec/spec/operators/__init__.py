"""The steps of a feature workflow as data: what each reads and writes, and its numbers.

Formulas, missing and unseen values and inverses are described in docs/workflows.md; the code is in `terarec.etl`. Every
operator has `reads` and `writes`, the columns that it takes and gives while a data set is prepared, and
`serving_reads`, those that a served record must bring for it.
"""

from typing import TypeAlias

from terarec.spec.operators.categories import (
    Categorify,
    Cross,
    DropLowCardinality,
    GivenIds,
    HashBucket,
    TargetEncoding,
)
from terarec.spec.operators.columns import KeepRows, LambdaOp, Rename, SplitText, ValueType
from terarec.spec.operators.groups import DifferenceLag, GroupStatistic, History, JoinGroupby, JoinTable
from terarec.spec.operators.lists import Explode, ListSlice, Pad
from terarec.spec.operators.numbers import Bucketize, Clip, FillMissing, LogOp, Normalize, NormalizeMinMax

Operator: TypeAlias = (
    FillMissing
    | Clip
    | LogOp
    | Normalize
    | NormalizeMinMax
    | Bucketize
    | Categorify
    | HashBucket
    | GivenIds
    | Cross
    | TargetEncoding
    | DropLowCardinality
    | JoinGroupby
    | DifferenceLag
    | History
    | JoinTable
    | ListSlice
    | Pad
    | Explode
    | Rename
    | LambdaOp
    | SplitText
    | KeepRows
)

__all__ = [
    "Bucketize",
    "Categorify",
    "Clip",
    "Cross",
    "DifferenceLag",
    "DropLowCardinality",
    "Explode",
    "FillMissing",
    "GivenIds",
    "GroupStatistic",
    "HashBucket",
    "History",
    "JoinGroupby",
    "JoinTable",
    "KeepRows",
    "LambdaOp",
    "ListSlice",
    "LogOp",
    "Normalize",
    "NormalizeMinMax",
    "Operator",
    "Pad",
    "Rename",
    "SplitText",
    "TargetEncoding",
    "ValueType",
]
