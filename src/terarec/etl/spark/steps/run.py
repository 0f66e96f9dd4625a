"""Does a step of a workflow to a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl import ops
from terarec.etl.spark.expressions import ROW
from terarec.etl.spark.steps import categories, columns, given, groups, learnt, lists, numbers
from terarec.etl.spark.steps.refusals import refuse_rows, step_refusals
from terarec.etl.spark.steps.step import Step
from terarec.etl.spark.tables import Tables

_EXPRESSIONS: dict[type[Any], Callable[[Step], Mapping[str, Column]]] = {
    ops.Bucketize: numbers.bucketize,
    ops.Clip: numbers.clip,
    ops.Cross: categories.cross,
    ops.FillMissing: numbers.fill_missing,
    ops.GivenIds: given.given_ids,
    ops.HashBucket: categories.hash_bucket,
    ops.LambdaOp: columns.lambda_op,
    ops.ListSlice: lists.list_slice,
    ops.LogOp: numbers.log_op,
    ops.Normalize: numbers.normalize,
    ops.NormalizeMinMax: numbers.normalize_min_max,
    ops.Pad: lists.pad,
    ops.SplitText: columns.split_text,
}
_FRAMES: dict[type[Any], Callable[[DataFrame, Step], DataFrame]] = {
    ops.DifferenceLag: groups.difference_lag,
    ops.DropLowCardinality: lambda frame, step: frame,
    ops.Explode: columns.explode,
    ops.History: groups.history,
    ops.KeepRows: columns.keep_rows,
    ops.Rename: columns.rename,
}
_LOOKUPS: dict[type[Any], Callable[[DataFrame, Step, Tables], DataFrame]] = {
    ops.Categorify: learnt.categorify,
    ops.JoinGroupby: learnt.join_groupby,
    ops.JoinTable: learnt.join_table,
    ops.TargetEncoding: learnt.target_encoding,
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
