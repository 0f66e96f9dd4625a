"""What goes wrong in Spark is told in one line."""

from __future__ import annotations

import pytest

from terarec.errors import ClusterError, StorageError
from terarec.etl.spark.session import check_master


def test_a_master_that_does_not_answer_is_told_in_one_line() -> None:
    with pytest.raises(ClusterError, match=r"spark_master: got 'spark://127.0.0.1:1', where no master answers \(127."):
        check_master("spark://127.0.0.1:1")


@pytest.mark.parametrize(
    ("told", "error", "line"),
    [
        (
            "An error occurred while calling o7.collect.\n: org.apache.spark.SparkException: Job aborted due to stage "
            "failure: Task 0 in stage 1.0 failed 4 times: ExecutorLostFailure\nDriver stacktrace:\n\tat a.B",
            ClusterError,
            "Spark: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 "
            "times: ExecutorLostFailure",
        ),
        (
            "java.io.IOException: No space left on device\n\tat a.B",
            StorageError,
            "Spark: .*, expected room for shuffles",
        ),
        (
            "failed\n\tat a.B\nCaused by: java.lang.OutOfMemoryError",
            StorageError,
            "expected a higher spark.executor.mem",
        ),
    ],
)
def test_what_spark_tells_becomes_one_line(told: str, error: type[Exception], line: str) -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    from pyspark.errors import PySparkException

    from terarec.etl.spark.failures import in_one_line

    with pytest.raises(error, match=line) as caught, in_one_line():
        raise PySparkException(told)
    assert "\n" not in str(caught.value)
