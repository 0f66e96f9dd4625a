"""What goes wrong in Spark -> one of our errors, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from terarec.errors import ClusterError, FormatError, StorageError, TerarecError
from terarec.etl.spark.expressions import MARK
from terarec.spec.quoting import shortened

_SHOWN_CHARACTERS = 400
_ADVICE = {
    "No space left on device": "expected room for shuffles in spark.local.dir and for the data set",
    "maxResultSize": "expected a higher spark.driver.maxResultSize and spark.driver.memory for what the driver gathers",
    "OutOfMemoryError": "expected a higher spark.executor.memory (spark.driver.memory, where that is one process), "
    "or more of spark.sql.shuffle.partitions",
}
"""What a message of Spark holds that tells of too little room -> what would be enough."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise what Spark raises in the block as an error of ours.

    Raises:
        FormatError: a value that a step refuses.
        StorageError: too little memory, or room on a disk.
        ClusterError: anything else that Spark tells.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise _told(error) from error


def _told(error: Exception) -> TerarecError:
    parts = str(error).split(MARK)
    if len(parts) > 2:
        return FormatError(parts[1])
    line = _line(str(error))
    for sign, advice in _ADVICE.items():
        if sign in str(error):
            return StorageError(f"Spark: {line}, {advice}")
    return ClusterError(f"Spark: {line}")


def _line(text: str) -> str:
    """The line of Spark's message that tells what happened; those after it say where in Spark's code."""
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")] or ["no reason was told"]
    line = lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
    return shortened(line, _SHOWN_CHARACTERS)
