"""The columns after a workflow's last step -> those of a data set, checked."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl.engine.write import SHOWN, no_positives
from terarec.etl.ops.values import value_of
from terarec.etl.spark.expressions import column
from terarec.etl.spark.steps.refusals import Refusal, dense_refusal, label_refusals, refuse_rows, weight_refusal
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.transform import metadata_name
from terarec.formats.block import key_dtype
from terarec.spec import MISSING_KEY, CategoricalColumn, DatasetSpec, LabelSpec


def result_columns(plan: Plan, dataset: DatasetSpec) -> list[Column]:
    """The columns of a data set in the types of its shards; values of metadata alone may be null."""
    key_type = "int" if key_dtype(dataset).itemsize == 4 else "bigint"
    made = [_label(label, plan).alias(label.name) for label in plan.spec.labels]
    made += [
        _float(item.name, dense_refusal(item.name, plan.types[-1][item.name].kind)).alias(item.name)
        for item in dataset.dense
    ]
    made += [_keys(item, plan, key_type).alias(item.name) for item in dataset.categorical]
    if dataset.weight is not None:
        refusal = weight_refusal(dataset.weight, plan.types[-1][dataset.weight].kind)
        made.append(_float(dataset.weight, refusal).alias(dataset.weight))
    metadata = enumerate(dataset.metadata_file_columns)
    return [*made, *(column(metadata_name(index)).alias(name) for index, name in metadata)]


def check_positives(training: DataFrame, plan: Plan) -> None:
    """Raise unless each label that is made of certain values has a positive one among the `training` rows.

    Raises:
        ConfigError: there are rows, and none of them is positive.
    """
    for label in plan.spec.labels:
        if label.positives and training.where(_is_positive(label, plan)).isEmpty():
            rows = training.select(column(label.source).cast("string")).distinct().limit(SHOWN + 1).collect()
            if rows:
                raise no_positives(label, [value for (value,) in rows])


def _is_positive(label: LabelSpec, plan: Plan) -> Column:
    kind = plan.types[-1][label.source].kind
    return column(label.source).isin(*(value_of(kind, value) for value in label.positives))


def _label(label: LabelSpec, plan: Plan) -> Column:
    x = column(label.source)
    if label.positives:
        number = _is_positive(label, plan).cast("float")
    elif label.at_least is not None:
        number = (x >= F.lit(label.at_least)).cast("float")
    else:
        number = x.cast("float")
    return F.coalesce(refuse_rows(label_refusals(label, plan), number), F.lit(0.0).cast("float"))


def _float(name: str, refusal: Refusal) -> Column:
    return F.coalesce(refuse_rows([refusal], column(name).cast("float")), F.lit(0.0).cast("float"))


def _keys(item: CategoricalColumn, plan: Plan, key_type: str) -> Column:
    absent = F.lit(MISSING_KEY if item.name in plan.spec.keys else 0).cast(key_type)
    x = column(item.name)
    if plan.types[-1][item.name].is_list:
        return F.coalesce(
            F.transform(x, lambda key: F.coalesce(key.cast(key_type), absent)), F.array().cast(f"array<{key_type}>")
        )
    return F.coalesce(x.cast(key_type), absent)
