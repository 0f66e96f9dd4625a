"""UCI's Adult: who earns more than 50,000 dollars (1994)."""

from __future__ import annotations

from terarec.etl.ops import Bucketize, Categorify, LogOp, Normalize
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFiles, WorkflowSpec

_TEXTS = (
    *("workclass", "education", "marital_status", "occupation"),
    *("relationship", "race", "sex", "native_country"),
)
_NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
)
_CUT = ("age", "hours_per_week")
_GAINS = ("capital_gain", "capital_loss")

_SPLIT = SplitByFiles(valid=1)


def adult(*, min_count: int = 1, intervals: int = 20, split: Split | None = _SPLIT) -> WorkflowSpec:
    """Prepares ``adult.data`` and ``adult.test``.

    Gains and losses come out twice: as logarithms, and as ids, since tax forms leave few exact amounts and some of
    them give the income away. So do age and hours: as numbers, and as intervals.

    Args:
        min_count: values that occur less often in the training part share an id.
        intervals: of age and hours.
        split: by default the last file.
    """
    intervals_of = tuple(f"{name}_interval" for name in _CUT)
    logs = tuple(f"{name}_log" for name in _GAINS)
    dense = ("age", "education_num", "hours_per_week")
    texts = (*_TEXTS, "income")
    return WorkflowSpec(
        name="adult",
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            trim=True,
            missing=("", "?"),
            columns=tuple(SourceColumn(name=name, type="text" if name in texts else "integer") for name in _NAMES),
        ),
        steps=(
            Bucketize(columns=_CUT, outputs=intervals_of, intervals=intervals),
            LogOp(columns=_GAINS, outputs=logs),
            Normalize(columns=(*dense, *logs)),
            Categorify(columns=(*_TEXTS, *_GAINS), min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="income", positives=(">50K", ">50K.")),),  # labels of the test file end with a dot
        dense=(*dense, *logs),
        categorical=(*_TEXTS, *_GAINS, *intervals_of),
    )
