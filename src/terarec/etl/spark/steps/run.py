"""Does a step of a workflow to a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec import spec
from terarec.etl.spark.expressions import ROW
from terarec.etl.spark.steps import categories, columns, given, groups, learnt, lists, numbers
from terarec.etl.spark.steps.refusals import refuse_rows, step_refusals
from terarec.etl.spark.steps.step import Step
from terarec.etl.spark.tables import Tables

_EXPRESSIONS: dict[type[Any], Callable[[Step], Mapping[str, Column]]] = {
    spec.Bucketize: numbers.bucketize,
    spec.Clip: numbers.clip,
    spec.Cross: categories.cross,
    spec.FillMissing: numbers.fill_missing,
    spec.GivenIds: given.given_ids,
    spec.HashBucket: categories.hash_bucket,
    spec.LambdaOp: columns.lambda_op,
    spec.ListSlice: lists.list_slice,
    spec.LogOp: numbers.log_op,
    spec.Normalize: numbers.normalize,
    spec.NormalizeMinMax: numbers.normalize_min_max,
    spec.Pad: lists.pad,
    spec.SplitText: columns.split_text,
}
_FRAMES: dict[type[Any], Callable[[DataFrame, Step], DataFrame]] = {
    spec.DifferenceLag: groups.difference_lag,
    spec.DropLowCardinality: lambda frame, step: frame,
    spec.Explode: columns.explode,
    spec.History: groups.history,
    spec.KeepRows: columns.keep_rows,
    spec.Rename: columns.rename,
}
_LOOKUPS: dict[type[Any], Callable[[DataFrame, Step, Tables], DataFrame]] = {
    spec.Categorify: learnt.categorify,
    spec.JoinGroupby: learnt.join_groupby,
    spec.JoinTable: learnt.join_table,
    spec.TargetEncoding: learnt.target_encoding,
}


def run_step(frame: DataFrame, step: Step, tables: Tables) -> DataFrame:
    """The frame after `step`; columns that it does not write stay.

    A row of which it refuses something is an error where its id is asked for, unless such rows were left out before.
    """
    refusals = [] if step.is_judged else step_refusals(step)
    if refusals:
        frame = frame.withColumn(ROW, refuse_rows(refusals, F.col(ROW)))
    kind = type(step.spec)
    if kind in _EXPRESSIONS:
        return frame.withColumns(dict(_EXPRESSIONS[kind](step)))
    if kind in _FRAMES:
        return _FRAMES[kind](frame, step)
    return _LOOKUPS[kind](frame, step, tables)
