"""Which code does an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terarec import spec as specs
from terarec.errors import ConfigError
from terarec.etl.operators.bucketize import BucketizeCode
from terarec.etl.operators.clip import ClipCode
from terarec.etl.operators.contract import OperatorCode
from terarec.etl.operators.cross import CrossCode
from terarec.etl.operators.explode import ExplodeCode
from terarec.etl.operators.fill_missing import FillMissingCode
from terarec.etl.operators.hash_bucket import HashBucketCode
from terarec.etl.operators.keep_rows import KeepRowsCode
from terarec.etl.operators.lambda_op import LambdaOpCode
from terarec.etl.operators.list_slice import ListSliceCode
from terarec.etl.operators.log_op import LogOpCode
from terarec.etl.operators.pad import PadCode
from terarec.etl.operators.rename import RenameCode
from terarec.etl.operators.split_text import SplitTextCode

_CODES: dict[type[Any], Callable[[Any], OperatorCode]] = {
    specs.Bucketize: BucketizeCode,
    specs.Clip: ClipCode,
    specs.Cross: CrossCode,
    specs.Explode: ExplodeCode,
    specs.FillMissing: FillMissingCode,
    specs.HashBucket: HashBucketCode,
    specs.KeepRows: KeepRowsCode,
    specs.LambdaOp: LambdaOpCode,
    specs.ListSlice: ListSliceCode,
    specs.LogOp: LogOpCode,
    specs.Pad: PadCode,
    specs.Rename: RenameCode,
    specs.SplitText: SplitTextCode,
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
