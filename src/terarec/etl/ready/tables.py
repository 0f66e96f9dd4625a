# SPDX-License-Identifier: Apache-2.0
"""Presets for tables without histories: Criteo, Avazu, Adult, and any CSV or TSV (docs/your-own-data.md)."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ops import Bucketize, Categorify, FillMissing, JoinGroupby, LambdaOp, LogOp, Normalize, Operator
from terarec.etl.ready.histories import row_step
from terarec.spec import (
    CsvOptions,
    LabelSpec,
    LeaveOneOut,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByFiles,
    SplitByFraction,
    SplitByTime,
    WorkflowSpec,
)
from terarec.spec.workflow import SourceType

LABEL_NAME = "label"
INTEGER_NAMES = tuple(f"I{number}" for number in range(1, 14))
CATEGORY_NAMES = tuple(f"C{number}" for number in range(1, 27))
"""The columns of a line of Criteo, in this order."""

_CRITEO_SPLIT = SplitByFraction(valid=0.1)


def criteo(
    *, min_count: int = 15, split: Split | None = _CRITEO_SPLIT, modulo: Literal[10_000_000, 40_000_000] | None = None
) -> WorkflowSpec:
    """Prepare ``train.txt`` of Kaggle: a label, 13 integers and 26 categories a line.

    A missing integer is 0, integers are shifted to at least 1 and their logarithm is taken, categories become ids.

    Args:
        min_count: Categories that occur less often in the training part share an id.
        split: Split; by default the last tenth of the rows is for validation.
        modulo: Categories are taken modulo this first, as some published sizes have them; None: as they are.
    """
    return WorkflowSpec(
        name="criteo",
        source=SourceSpec(
            format="delimited",
            columns=(
                SourceColumn(name=LABEL_NAME, type="integer"),
                *(SourceColumn(name=name, type="integer") for name in INTEGER_NAMES),
                *(SourceColumn(name=name, type="hex32") for name in CATEGORY_NAMES),
            ),
        ),
        steps=(
            FillMissing(columns=INTEGER_NAMES, value=0.0),
            # Some of Criteo's integers are negative, so the shift is fitted.
            LogOp(columns=INTEGER_NAMES, shift=None),
            *_modulo(modulo),
            Categorify(columns=CATEGORY_NAMES, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name=LABEL_NAME, is_probability=True),),
        dense=INTEGER_NAMES,
        categorical=CATEGORY_NAMES,
    )


def criteo_terabyte(*, min_count: int = 15) -> WorkflowSpec:
    """Return the same for the 24 files ``day_0`` to ``day_23``; the last of them is the split "valid".

    Args:
        min_count: As for `criteo`.
    """
    return criteo(min_count=min_count, split=SplitByFiles(valid=1))


def _modulo(modulo: int | None) -> tuple[LambdaOp, ...]:
    names = {None: "", 10_000_000: "modulo_10_million", 40_000_000: "modulo_40_million"}
    if modulo not in names:
        raise ConfigError("criteo: modulo", f"got {modulo!r}, expected one of None, 10000000, 40000000")
    if modulo is None:
        return ()
    function = f"terarec.etl.ready.row_functions:{names[modulo]}"
    return (
        LambdaOp(
            columns=CATEGORY_NAMES,
            outputs=CATEGORY_NAMES,
            function=function,
            output_type="integer",
            record_function=f"{function}_of_record",
        ),
    )


_NUMBERED = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{number}" for number in range(14, 22)))
_HASHED = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
_COUNTED = ("device_id", "device_ip")

_AVAZU_SPLIT = SplitByTime(column="hour", valid=0.1)


def avazu(*, min_count: int = 2, split: Split | None = _AVAZU_SPLIT) -> WorkflowSpec:
    """Prepare ``train.csv``: ids of all columns, hour and weekday, and how often a device and its address are seen.

    Args:
        min_count: Values that occur less often in the training part share an id.
        split: By default the last tenth of the hours, which is the last of the ten days; `hour` is the integer
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

_ADULT_SPLIT = SplitByFiles(valid=1)


def adult(*, min_count: int = 1, intervals: int = 20, split: Split | None = _ADULT_SPLIT) -> WorkflowSpec:
    """Prepare ``adult.data`` and ``adult.test``.

    Gains and losses come out twice: as logarithms, and as ids, since tax forms leave few exact amounts and some of
    them give the income away. So do age and hours: as numbers, and as intervals.

    Args:
        min_count: Values that occur less often in the training part share an id.
        intervals: Intervals of age and hours.
        split: Split; by default the last file is for test.
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


def csv_workflow(options: CsvOptions) -> WorkflowSpec:
    """Return the workflow for a table.

    Raises:
        ConfigError: Two columns of the data set would have one name, or a delimiter that is none.
    """
    return WorkflowSpec(
        name=options.name,
        source=SourceSpec(
            format="delimited",
            delimiter=options.delimiter,
            header=not options.names,
            quote=True,
            trim=True,
            missing=options.missing,
            columns=tuple(
                SourceColumn(name=name, type=_type(options, name)) for name in options.names or options.columns
            ),
        ),
        steps=_steps(options),
        split=options.split,
        labels=(LabelSpec(name=options.label, positives=options.positives, is_probability=not options.positives),),
        dense=(*options.dense, *options.log),
        categorical=(
            *options.categorical,
            *(options.id_name(column) for column in options.ids),
            *(f"{column}_bucket" for column in options.buckets),
        ),
        keys=options.keys,
        weight=options.weight,
        metadata=options.metadata,
    )


def _type(options: CsvOptions, column: str) -> SourceType:
    if column in options.integers:
        return "integer"
    order = options.split.order if isinstance(options.split, LeaveOneOut) else None
    is_number = column in (*options.numbers, options.weight, order) or (
        column == options.label and not options.positives
    )
    return "number" if is_number else "text"


def _steps(options: CsvOptions) -> tuple[Operator, ...]:
    """Return the steps: first those that add columns, then those that replace columns."""
    steps: list[Operator] = []
    for count in sorted(set(options.buckets.values())):
        cut = tuple(column for column, intervals in options.buckets.items() if intervals == count)
        steps.append(Bucketize(columns=cut, outputs=tuple(f"{column}_bucket" for column in cut), intervals=count))
    added = tuple(column for column in options.ids if options.id_name(column) != column)
    if added:
        names = tuple(map(options.id_name, added))
        steps.append(Categorify(columns=added, outputs=names, min_count=options.min_count))
    replaced = (*options.categorical, *(column for column in options.ids if column not in added))
    if replaced:
        steps.append(Categorify(columns=replaced, min_count=options.min_count))
    if options.log:
        steps += [FillMissing(columns=options.log, value=0.0), LogOp(columns=options.log, shift=None)]
    if options.dense:
        # Filled after scaling: 0 is the mean of the training part then.
        steps += [Normalize(columns=options.dense), FillMissing(columns=options.dense, value=0.0)]
    return tuple(steps)
