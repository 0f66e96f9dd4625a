"""Which code does an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terarec import spec as specs
from terarec.errors import ConfigError
from terarec.etl.operators.bucketize import BucketizeCode
from terarec.etl.operators.categorify import CategorifyCode
from terarec.etl.operators.clip import ClipCode
from terarec.etl.operators.contract import OperatorCode
from terarec.etl.operators.cross import CrossCode
from terarec.etl.operators.difference_lag import DifferenceLagCode
from terarec.etl.operators.drop_low_cardinality import DropLowCardinalityCode
from terarec.etl.operators.explode import ExplodeCode
from terarec.etl.operators.fill_missing import FillMissingCode
from terarec.etl.operators.given_ids import GivenIdsCode
from terarec.etl.operators.hash_bucket import HashBucketCode
from terarec.etl.operators.history import HistoryCode
from terarec.etl.operators.join_groupby import JoinGroupbyCode
from terarec.etl.operators.join_table import JoinTableCode
from terarec.etl.operators.keep_rows import KeepRowsCode
from terarec.etl.operators.lambda_op import LambdaOpCode
from terarec.etl.operators.learnt_log_op import LearntLogOpCode
from terarec.etl.operators.list_slice import ListSliceCode
from terarec.etl.operators.log_op import LogOpCode
from terarec.etl.operators.median_fill import MedianFillCode
from terarec.etl.operators.normalize import NormalizeCode
from terarec.etl.operators.normalize_min_max import NormalizeMinMaxCode
from terarec.etl.operators.pad import PadCode
from terarec.etl.operators.quantile_bucketize import QuantileBucketizeCode
from terarec.etl.operators.rename import RenameCode
from terarec.etl.operators.split_text import SplitTextCode
from terarec.etl.operators.target_encoding import TargetEncodingCode


def _bucketize(spec: specs.Bucketize) -> OperatorCode:
    return BucketizeCode(spec) if spec.intervals is None else QuantileBucketizeCode(spec)


def _fill_missing(spec: specs.FillMissing) -> OperatorCode:
    return MedianFillCode(spec) if spec.median else FillMissingCode(spec)


def _log_op(spec: specs.LogOp) -> OperatorCode:
    return LearntLogOpCode(spec) if spec.shift is None else LogOpCode(spec)


_CODES: dict[type[Any], Callable[[Any], OperatorCode]] = {
    specs.Bucketize: _bucketize,
    specs.Categorify: CategorifyCode,
    specs.Clip: ClipCode,
    specs.Cross: CrossCode,
    specs.DifferenceLag: DifferenceLagCode,
    specs.DropLowCardinality: DropLowCardinalityCode,
    specs.Explode: ExplodeCode,
    specs.FillMissing: _fill_missing,
    specs.GivenIds: GivenIdsCode,
    specs.HashBucket: HashBucketCode,
    specs.History: HistoryCode,
    specs.JoinGroupby: JoinGroupbyCode,
    specs.JoinTable: JoinTableCode,
    specs.KeepRows: KeepRowsCode,
    specs.LambdaOp: LambdaOpCode,
    specs.ListSlice: ListSliceCode,
    specs.LogOp: _log_op,
    specs.Normalize: NormalizeCode,
    specs.NormalizeMinMax: NormalizeMinMaxCode,
    specs.Pad: PadCode,
    specs.Rename: RenameCode,
    specs.SplitText: SplitTextCode,
    specs.TargetEncoding: TargetEncodingCode,
}


def implementation(spec: specs.Operator) -> OperatorCode:
    """The code of the step `spec`.

    Raises:
        ConfigError: none is known.
    """
    code = _CODES.get(type(spec))
    if code is None:
        known = ", ".join(sorted(kind.__name__ for kind in _CODES))
        raise ConfigError(f"got the operator {type(spec).__name__}, expected one of {known}")
    return code(spec)
