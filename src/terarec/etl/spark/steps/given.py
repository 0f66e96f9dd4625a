"""Ids and keys that the source holds already."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column

from terarec.etl.spark.expressions import column
from terarec.etl.spark.steps.step import Step


def given_ids(step: Step) -> Mapping[str, Column]:
    """The same numbers."""
    return {output: column(name) for name, output in step.spec.pairs}
