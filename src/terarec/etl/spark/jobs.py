# SPDX-License-Identifier: Apache-2.0
"""Jobs of Spark: their progress while they run, and errors of executors and of Spark as errors of terarec."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import NoReturn
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from terarec import errors
from terarec.errors import ClusterError, StorageError, TerarecError
from terarec.etl.engine.phases import ProgressMeter
from terarec.spec.checks import shortened

_PERIOD = 1.0
"""Seconds between two polls, each of which reads a few numbers from the driver."""
_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


class JobWatch:
    """Reports the progress of a phase's jobs to a meter, by the completed tasks in Spark's status tracker.

    Attributes:
        num_rows: Rows of the sources, once they are counted.
    """

    def __init__(self, context: SparkContext, meter: ProgressMeter, num_bytes: int) -> None:
        self.num_rows = 0
        self._context = context
        self._meter = meter
        self._num_bytes = num_bytes

    @contextmanager
    def phase(self, name: str, passes: int) -> Iterator[None]:
        """Watch the jobs of the block, which go through all rows about `passes` times.

        A thread reports to the meter. An error of its callback cancels the jobs, and is raised here.
        """
        group = f"terarec-{uuid4().hex}"
        # The session may be the caller's, with a job group of his own.
        before = {name: self._context.getLocalProperty(name) for name in _PROPERTIES}
        self._context.setJobGroup(group, f"terarec: {name}")
        report = _Report(self, self._meter, passes * self._num_bytes)
        ended, failed = Event(), list[BaseException]()

        def poll() -> None:
            stages = _Stages(self._context, group)
            while not ended.wait(_PERIOD):
                try:
                    share = min(stages.passes() / max(passes, 1), 1.0)
                except Py4JError:  # the application is at its end, which the jobs report
                    return
                try:
                    report.update(share)
                except BaseException as error:  # of the callback, such as KeyboardInterrupt: raised below
                    failed.append(error)
                    self._context.cancelJobGroup(group)
                    return

        thread = Thread(target=poll, name=group, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for key, value in before.items():
                self._context.setLocalProperty(key, value)  # type: ignore[arg-type]  # None removes it
            if failed:
                raise failed[0]
        # The tracker may have missed the last tasks.
        report.update(1.0)


class _Report:
    """The state of a meter in a phase of a number of bytes."""

    def __init__(self, watch: JobWatch, meter: ProgressMeter, num_bytes: int) -> None:
        self._watch = watch
        self._meter = meter
        self._num_bytes = num_bytes
        self._rows = self._bytes = 0

    def update(self, share: float) -> None:
        """Report that `share` of the phase is done."""
        rows = max(int(share * self._watch.num_rows), self._rows)
        num_bytes = max(int(share * self._num_bytes), self._bytes)
        before = self._rows, self._bytes
        self._rows, self._bytes = rows, num_bytes
        self._meter.add(rows - before[0], num_bytes - before[1])


class _Stages:
    """The stages of the jobs of a group."""

    def __init__(self, context: SparkContext, group: str) -> None:
        self._tracker = context.statusTracker()
        self._group = group
        self._ended: set[int] = set()
        self._tasks: dict[int, tuple[int, int]] = {}

    def passes(self) -> float:
        """Return the passes over all rows: one for each stage of as many tasks as the first one of the phase.

        A stage of fewer tasks counts for less.
        """
        for job in self._tracker.getJobIdsForGroup(self._group):
            info = None if job in self._ended else self._tracker.getJobInfo(job)
            if info is None:
                continue
            for stage in info.stageIds:
                self._update(stage)
            if info.status != "RUNNING":
                self._ended.add(job)
        if not self._tasks:
            return 0.0
        # Stage ids rise, so the lowest is the first stage of the phase.
        whole = self._tasks[min(self._tasks)][0]
        return sum(done / max(tasks, whole) for tasks, done in self._tasks.values())

    def _update(self, stage: int) -> None:
        info = self._tracker.getStageInfo(stage)
        if info is not None and info.numTasks:
            _, done = self._tasks.get(stage, (0, 0))
            self._tasks[stage] = info.numTasks, max(done, info.numCompletedTasks)


_MARK = "terarec-error="
"""Stands in a stack trace of Spark before an error of terarec: its class, place and problem as a list in JSON."""
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
        # JSON in ASCII on one line, whose end is known: PySpark strips messages, of control characters as well.
        parts = json.dumps([type(error).__name__, error.where, error.problem])
        raise RuntimeError(f"{_MARK}{parts}") from error


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
    error_type = getattr(errors, kind, None)
    raise (error_type if isinstance(error_type, type) and issubclass(error_type, TerarecError) else ClusterError)(
        *parts
    )


def _translated(text: str) -> TerarecError:
    _, mark, rest = text.partition(_MARK)
    try:
        if mark:
            raise_error(*json.JSONDecoder().raw_decode(rest)[0])
    except TerarecError as error:
        return error
    except json.JSONDecodeError:  # a message that Spark has cut off
        pass
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
    """Return the line of Spark's message that describes the error; later lines are Spark's stack trace."""
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")] or ["no reason was given"]
    line = lines[1] if lines[0].startswith("An error occurred while calling") and len(lines) > 1 else lines[0]
    if _IN_PYTHON in line or "PythonException" in line:
        line = next((candidate for candidate in lines[1:] if _PYTHON_ERROR.fullmatch(candidate)), line)
    return shortened(line, _SHOWN_CHARACTERS)
