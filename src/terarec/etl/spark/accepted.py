"""What of a workflow this engine does, known before anything starts."""

from __future__ import annotations

from terarec.errors import ConfigError
from terarec.etl.ops import LambdaOp
from terarec.spec import WorkflowSpec
from terarec.spec.named_code import imported


def check_accepted(spec: WorkflowSpec) -> None:
    """Raise unless Spark can do all of a workflow.

    Raises:
        ConfigError: sources of a format that Spark does not read, or a function without one for Spark's columns.
    """
    if spec.source.format == "arrow":
        raise ConfigError(
            "source.format: got 'arrow', expected 'delimited', 'json_lines' or 'parquet' (engine 'spark')"
        )
    for position, step in enumerate(spec.steps):
        if isinstance(step, LambdaOp):
            if step.spark_function is None:
                raise ConfigError(
                    f"steps[{position}] LambdaOp: {step.function!r} has no spark_function, which engine 'spark' needs: "
                    "expected 'package.module:name' of a function that takes and returns Spark's columns"
                )
            imported(step.spark_function)
