"""Avazu's clicks on mobile advertisements (Kaggle, 2014)."""

from __future__ import annotations

from terarec.etl.ops import Categorify, JoinGroupby, LogOp, Normalize
from terarec.etl.ready.row_steps import row_step
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByTime, WorkflowSpec

_NUMBERED = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{number}" for number in range(14, 22)))
_HASHED = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_COUNTED = ("device_id", "device_ip")

_SPLIT = SplitByTime(column="hour", valid=0.1)


def avazu(*, min_count: int = 2, split: Split | None = _SPLIT) -> WorkflowSpec:
    """Prepares ``train.csv``: ids of all columns, hour and weekday, and how often a device and its address are seen.

    Args:
        min_count: values that occur less often in the training part share an id.
        split: by default the last tenth of the hours, which is the last of the ten days; `hour` is the integer
            YYMMDDHH, so ``SplitByTime(column="hour", valid_from=14103000)`` says the same.
    """
    counts = tuple(f"{name}_count" for name in _COUNTED)
    categorical = (*_NUMBERED, *_HASHED, "hour_of_day", "weekday")
    return WorkflowSpec(
        name="avazu",
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            header=True,
            columns=(
                SourceColumn(name="click", type="integer"),
                SourceColumn(name="hour", type="integer"),
                *(SourceColumn(name=name, type="integer") for name in _NUMBERED),
                *(SourceColumn(name=name, type="hex32") for name in _HASHED),
            ),
        ),
        steps=(
            row_step("avazu_hour_and_weekday", "hour", "hour_of_day", "weekday"),
            JoinGroupby(columns=_COUNTED),
            LogOp(columns=counts),
            Normalize(columns=counts),
            Categorify(columns=categorical, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="click", is_probability=True),),
        dense=counts,
        categorical=categorical,
    )
