# SPDX-License-Identifier: Apache-2.0
"""Errors of Spark are reported in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terarec.errors import (
    ClusterError,
    ConfigError,
    FormatError,
    MissingDependencyError,
    StorageError,
    TerarecError,
)
from terarec.etl.spark import check_master, check_spark
from tests.errors import at


def test_a_master_that_does_not_answer_is_reported_spark_errors() -> None:
    with pytest.raises(ClusterError, check=at("spark_master", "got 'spark://127.0.0.1:1', where no master answers")):
        check_master("spark://127.0.0.1:1")


@pytest.mark.parametrize(
    ("message", "error", "line"),
    [
        (
            "An error occurred while calling o7.collect.\n: org.apache.spark.SparkException: Job aborted due to stage "
            "failure: Task 0 in stage 1.0 failed 4 times: ExecutorLostFailure\nDriver stacktrace:\n\tat a.B",
            ClusterError,
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 "
            "times: ExecutorLostFailure",
        ),
        (
            "An exception was thrown from the Python worker. See below.\nTraceback (most recent call last):\n"
            "  File x, line 3\nZeroDivisionError: division by zero\n",
            ClusterError,
            "ZeroDivisionError: division by zero",
        ),
        (
            "java.io.IOException: No space left on device\n\tat a.B",
            StorageError,
            "expected room for shuffles",
        ),
        (
            "failed\n\tat a.B\nCaused by: java.lang.OutOfMemoryError",
            StorageError,
            "expected a higher spark.executor.mem",
        ),
    ],
)
def test_spark_messages_become_one_line(message: str, error: type[Exception], line: str) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    from pyspark.errors import PySparkException

    from terarec.etl.spark.jobs import spark_errors

    with pytest.raises(error, check=at("Spark", line)) as caught, spark_errors():
        raise PySparkException(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        StorageError("disk", "full, expected room"),
        FormatError("", "no place, expected one"),
        ConfigError('steps[0]\n: \x1e\u2028"', "text of two\nlines, expected 'one' \x1e "),
    ],
)
def test_errors_of_executors_keep_their_class(error: TerarecError) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    from pyspark.errors import PySparkException

    from terarec.etl.spark.jobs import executor_errors, spark_errors

    with pytest.raises(RuntimeError) as raised, executor_errors():
        raise error
    for rest in ("", "\n\tat a.B"):
        with pytest.raises(type(error), check=at(error.where, error.problem)), spark_errors():
            raise PySparkException(f"Traceback:\n  File x\nRuntimeError: {raised.value}{rest}".strip())


def test_an_error_that_ends_a_task_keeps_its_class(spark: Any) -> None:
    """Finding P6: PySpark strips messages, and the control character that ended an error was stripped with it."""
    from terarec.etl.spark import spark_session
    from terarec.etl.spark.jobs import spark_errors
    from terarec.etl.spark.tasks import map_items

    def fail(number: int, item: str) -> Any:
        raise StorageError(item, "full, expected room")

    expected = pytest.raises(StorageError, check=at("disk", "full, expected room"))
    with expected, spark_errors(), spark_session(None, {}) as session:
        map_items(session.sparkContext, ["disk"], fail).collect()


def test_executors_without_terarec_are_named() -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    from pyspark.errors import PySparkException

    from terarec.etl.spark.jobs import spark_errors

    with pytest.raises(ClusterError, check=at("Spark", "executors cannot import terarec")), spark_errors():
        raise PySparkException("Job aborted\nModuleNotFoundError: No module named 'terarec'\n\tat a.B")


def test_a_missing_java_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingDependencyError, check=at("Java", "bin/java, which does not run")):
        check_spark()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    with pytest.raises(MissingDependencyError, check=at("Java", "found version 11")):
        check_spark()
