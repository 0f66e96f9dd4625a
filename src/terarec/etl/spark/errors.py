"""Errors of executors and of Spark as errors of terarec, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from terarec import errors
from terarec.errors import ClusterError, StorageError, TerarecError
from terarec.spec.quoting import shortened

_MARK = "\x1e"
"""Surrounds the class, the place and the problem of an error of terarec in a stack trace of Spark."""
_SHOWN_CHARACTERS = 400
_ADVICE = {
    "No space left on device": "expected room for shuffles in spark.local.dir and for the data set",
    "maxResultSize": "expected a higher spark.driver.maxResultSize and spark.driver.memory for what the driver gathers",
    "OutOfMemoryError": "expected a higher spark.executor.memory (spark.driver.memory, where that is one process), "
    "or more of spark.sql.shuffle.partitions",
}
"""Part of a message of Spark that says that there is too little room -> what would be enough."""
_NO_TERAREC = "No module named 'terarec"
_PYTHON_ERROR = re.compile(r"[A-Za-z_.]+(?:Error|Exception|Interrupt|Exit): .+")
"""Last line of a stack trace of Python."""
_IN_PYTHON = "An exception was thrown from the Python worker"


@contextmanager
def executor_errors() -> Iterator[None]:
    """Raise errors of terarec in the block, which an executor runs, so that `spark_errors` finds them on the driver."""
    try:
        yield
    except TerarecError as error:
        raise RuntimeError(f"{_MARK}{type(error).__name__}{_MARK}{error.where}{_MARK}{error.problem}{_MARK}") from error


@contextmanager
def spark_errors() -> Iterator[None]:
    """Raise errors of Spark in the block as errors of terarec.

    Raises:
        TerarecError: An error of terarec on an executor, of the same class.
        StorageError: Too little memory, or room on a disk.
        ClusterError: Any other error of Spark.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise _translated(str(error)) from error


def raise_error(kind: str, *parts: str) -> NoReturn:
    """Raise the error of terarec whose class is named `kind`, with its message or the parts of it."""
    found = getattr(errors, kind, None)
    raise (found if isinstance(found, type) and issubclass(found, TerarecError) else ClusterError)(*parts)


def _translated(text: str) -> TerarecError:
    parts = text.split(_MARK)
    if len(parts) > 4:
        try:
            raise_error(*parts[1:4])
        except TerarecError as error:
            return error
    line = _first_line(text)
    for sign, advice in _ADVICE.items():
        if sign in text:
            return StorageError("Spark", f"{line}, {advice}")
    if _NO_TERAREC in text:
        return ClusterError(
            "Spark",
            "executors cannot import terarec, expected it in their Python (spark.archives with a packed "
            "environment, or PYSPARK_PYTHON; see docs/spark.md)",
        )
    return ClusterError("Spark", line)


def _first_line(text: str) -> str:
    """Return the line of Spark's message that says what happened; later ones say where in Spark's code."""
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")] or ["no reason was given"]
    line = lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
    if _IN_PYTHON in line or "PythonException" in line:
        line = next((found for found in lines[1:] if _PYTHON_ERROR.fullmatch(found)), line)
    return shortened(line, _SHOWN_CHARACTERS)
