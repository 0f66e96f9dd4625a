"""Phases of a preparation: their progress, the states that they fit, and ``report.json``, the summary at the end."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from terarec.errors import ConfigError
from terarec.etl.ops import State, Statistic
from terarec.etl.source import FAULTS_SHOWN, BadInputReport, Source, open_source
from terarec.etl.workflow import Plan, Workflow
from terarec.etl.workflow.workflow import STATES, state_name
from terarec.io import Journal, write_versioned_json
from terarec.spec import DatasetSpec, PrepareOptions, to_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a preparation.

    Attributes:
        phase: Current work, such as "fit 1".
        rows: Rows of the phase so far.
        phase_bytes: Bytes of the sources that the phase has read, compressed as they are; on Spark, of the rows that
            the tasks of the phase have read, however often and in any form.
        done_bytes: Bytes that all phases have read so far.
        total_bytes: Bytes that all phases will read.
        rows_per_second: Rows per second of the phase.
        bytes_per_second: Bytes per second of the phase.
        seconds_left: Until the end of the last phase, at the speed so far; None before there is one.
    """

    phase: str
    rows: int
    phase_bytes: int
    done_bytes: int
    total_bytes: int
    rows_per_second: float
    bytes_per_second: float
    seconds_left: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReport:
    """Work and time of a phase.

    Attributes:
        name: Name of the phase.
        rows: Rows that it read.
        seconds: Time taken.
        rows_per_second: `rows` / `seconds`.
        resumed: Whether an interrupted run had done it already; the figures are that run's.
    """

    name: str
    rows: int
    seconds: float
    rows_per_second: float
    resumed: bool = False


OnProgress: TypeAlias = Callable[[Progress], None]


class ProgressMeter:
    """Counts blocks, phase by phase.

    Args:
        on_progress: Callback, called after every block.

    Attributes:
        total_bytes: Bytes of the sources to read in all phases together.
    """

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.total_bytes = 0
        self._on_progress = on_progress
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self._rows = self._phase_bytes = self._done_bytes = self._skipped_bytes = 0

    def begin(self, phase: str) -> None:
        """Start a phase."""
        self._phase = phase
        self._phase_begun = time.perf_counter()
        self._rows = self._phase_bytes = 0

    def add(self, rows: int, num_bytes: int) -> None:
        """Count a block of the phase."""
        self._rows += rows
        self._phase_bytes += num_bytes
        self._done_bytes += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._now())

    def skip(self, num_bytes: int) -> None:
        """Count bytes that need not be read, such as those of a phase that an interrupted run had done."""
        self._done_bytes += num_bytes
        self._skipped_bytes += num_bytes

    def end(self) -> PhaseReport:
        """Return the work and time of the phase."""
        seconds = time.perf_counter() - self._phase_begun
        rate = self._rows / seconds if seconds else 0.0
        return PhaseReport(name=self._phase, rows=self._rows, seconds=seconds, rows_per_second=rate)

    def _now(self) -> Progress:
        now = time.perf_counter()
        # The first block may come before the clock moves.
        seconds = max(now - self._phase_begun, 1e-9)
        read = self._done_bytes - self._skipped_bytes
        # Skipped bytes took no time, so they do not count for the speed.
        left = (self.total_bytes - self._done_bytes) * (now - self._begun) / read if read else None
        return Progress(
            phase=self._phase,
            rows=self._rows,
            phase_bytes=self._phase_bytes,
            done_bytes=self._done_bytes,
            total_bytes=self.total_bytes,
            rows_per_second=self._rows / seconds,
            bytes_per_second=self._phase_bytes / seconds,
            seconds_left=None if left is None else max(left, 0.0),
        )


WORK = "work"
"""Directory of what phases pass on through the disk."""

Result: TypeAlias = dict[str, Any]
"""Result of a phase, as JSON."""


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A preparation after its fit phases.

    Attributes:
        workflow: The fitted workflow.
        write: Function of the spec of the data set and its final place, which writes all rows into the directory of the
            run. It returns "rows": split -> rows; "missing": column of the sources -> its missing and all values;
            "bad_input": "counts" of each kind, and the "first" faults.
    """

    workflow: Workflow
    write: Callable[[DatasetSpec, Path], Result]


class EngineRun(Protocol):
    """The phases of one preparation: `fit`, then `FittedRun.write`, then `finish`. Complete ones are not run again.

    It saves the workflow, and the states that its steps are fitted to, in `WORKFLOW_DIRECTORY` of its directory.

    Attributes:
        spilled: Names of the steps whose statistics did not fit in memory.
    """

    spilled: list[str]

    def fit(self) -> FittedRun:
        """Fit the workflow."""
        ...

    def finish(self) -> None:
        """Remove the temporary files of the phases."""
        ...


class Phases:
    """Runs phases and commits them, so that each is run once, by this run or by an interrupted one before it.

    Args:
        journal: Record of the phases that are done.
        progress: Callback, called after every block.

    Attributes:
        meter: Progress meter, to be called for every block.
        reports: Report of each phase.
        results: Result of each phase.
    """

    def __init__(self, journal: Journal, progress: OnProgress | None) -> None:
        self.meter = ProgressMeter(progress)
        self.reports: list[PhaseReport] = []
        self.results: list[Result] = []
        self._journal = journal

    def run(self, name: str, work: Callable[[], Result], num_bytes: int) -> Result:
        """Return the result of phase `name`, computed by `work` unless it is done already.

        Args:
            name: Name of the phase.
            work: Function that does it; its result goes to the journal.
            num_bytes: Bytes of the sources that it reads.
        """
        known = self._journal.result(name)
        if known is not None:
            self.meter.skip(num_bytes)
            report, result = PhaseReport(**{**known["report"], "resumed": True}), dict(known["result"])
        else:
            self.meter.begin(name)
            result = work()
            report = self.meter.end()
            # With the report: a resumed run shows the time of the phase as it was.
            self._journal.commit(name, {"report": dataclasses.asdict(report), "result": result})
        self.reports.append(report)
        self.results.append(result)
        return result


StartRun: TypeAlias = Callable[[Workflow, Source, PrepareOptions, Phases, Path], EngineRun]
"""Makes the run of a workflow over a source, in a directory that becomes the data set."""


class StateStore:
    """Fitted states, in the files of the saved workflow, so that they survive a kill.

    Args:
        plan: Plan of the workflow.
        directory: Directory of the saved workflow.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory / STATES
        self._states: dict[int, State] = {}

    def save(self, states: Mapping[int, State]) -> None:
        """Save the states of these steps.

        Raises:
            StorageError: The disk is full.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for step, state in states.items():
            state.save(self._directory, state_name(self._plan, step))
        self._states.update(states)

    def state(self, step: int) -> State:
        """Return the state of a step that this run fitted, or an interrupted one."""
        if step in self._states:
            return self._states[step]
        return self._plan.operators[step].load_state(self._directory, state_name(self._plan, step))


def fit_table(workflow: Workflow, name: str, options: PrepareOptions, statistic: Statistic) -> dict[str, Any]:
    """Show the rows of the side table `name` to `statistic`.

    Returns:
        "bad_table": Its name and bad input, which the report finds among the results of phases.

    Raises:
        ConfigError: `options` name no file for it.
        DataNotFoundError: There is no such file.
        FormatError: Bad input, under the policy "raise".
    """
    if name not in options.tables:
        raise ConfigError(f"side table {name!r}", f"no file, expected one in tables (--table {name}=PATH)")
    source = open_source(workflow.spec.tables[name], options.tables[name], options.bad_input, options.threads)
    # Block by block and not by `Passes`: a side table has no split and no row steps, and fits in memory.
    for rows in source.blocks():
        statistic.merge(statistic.observe(rows))
    return {"bad_table": {"table": name, **bad_input_to_json(source.bad_input)}}


def bad_input_to_json(report: BadInputReport) -> dict[str, Any]:
    """Return "counts" of each kind of fault, and the "first" faults, each in one line."""
    return {"counts": dict(report.counts), "first": [str(fault) for fault in report.first]}


def add_bad_input(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bad input of several parts of the data together, each as `bad_input_to_json` returns it."""
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    first = [line for part in parts for line in part["first"]]
    return {"counts": dict(sorted(counts.items())), "first": first[:FAULTS_SHOWN]}


REPORT_FILE = "report.json"
FORMAT = "terarec.prepare-report"
VERSION = 1

_TABLE_WIDTHS = (16, 64, 128)
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputColumn:
    """A column of the data set.

    Attributes:
        name: Name of the column.
        role: "label", "dense", "categorical", "key", "weight" or "metadata".
        rows: Ids, the reserved ones included: the rows that a table for it needs; None where there are no ids.
        hotness: Maximum number of ids a row.
    """

    name: str
    role: Literal["label", "dense", "categorical", "key", "weight", "metadata"]
    rows: int | None = None
    hotness: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumn:
    """A column of the sources.

    Attributes:
        name: Name of the column.
        missing: Missing values, among lists missing items.
        missing_share: `missing` of all values.
    """

    name: str
    missing: int
    missing_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """Size of embedding tables for the data set (estimate): float32, without optimizer state.

    Attributes:
        width: Width of the vectors.
        rows: Rows of all tables together.
        bytes: `rows` x `width` x 4.
    """

    width: int
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """Input that could not be read, and how it was handled.

    Attributes:
        policy: "raise", "skip" or "missing".
        counts: Kind -> faults.
        first: The first ones, each in one line with file and line.
    """

    policy: str
    counts: Mapping[str, int]
    first: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """Summary of a preparation.

    Attributes:
        rows: Samples in all.
        splits: Split -> its samples.
        input_bytes: Size of the source files, compressed as they are.
        seconds: Time taken.
        rows_per_second: `rows` / `seconds`.
        peak_memory_bytes: Peak memory that the process held until now.
        best_auc: Best reachable AUC, if the data was generated and says so.
        columns: Columns of the data set.
        inputs: Columns of the sources.
        tables: Sizes of the tables that would follow, for some widths.
        bad_input: Input that could not be read.
        spilled: Steps whose statistics did not fit in the memory and went through the disk.
        phases: Phases in the order in which they were done.
    """

    rows: int
    splits: Mapping[str, int]
    input_bytes: int
    seconds: float
    rows_per_second: float
    peak_memory_bytes: int
    best_auc: float | None
    columns: tuple[OutputColumn, ...]
    inputs: tuple[InputColumn, ...]
    tables: tuple[TableSize, ...]
    bad_input: BadInput
    spilled: tuple[str, ...]
    phases: tuple[PhaseReport, ...]

    def save(self, directory: Path) -> None:
        """Write ``report.json``.

        Raises:
            StorageError: The disk is full.
        """
        write_versioned_json(directory / REPORT_FILE, FORMAT, VERSION, {"report": to_data(self)})


def output_columns(spec: DatasetSpec) -> tuple[OutputColumn, ...]:
    """Return the columns of a data set."""
    columns = [OutputColumn(name=column.name, role="label") for column in spec.labels]
    columns += [OutputColumn(name=column.name, role="dense") for column in spec.dense]
    for column in spec.categorical:
        role: Literal["categorical", "key"] = "key" if column.rows is None else "categorical"
        columns.append(OutputColumn(name=column.name, role=role, rows=column.rows, hotness=column.hotness))
    if spec.weight is not None:
        columns.append(OutputColumn(name=spec.weight, role="weight"))
    columns += [OutputColumn(name=column.name, role="metadata") for column in spec.metadata]
    return tuple(columns)


def table_sizes(columns: tuple[OutputColumn, ...]) -> tuple[TableSize, ...]:
    """Return the sizes of tables for the columns with ids, for a few usual widths."""
    rows = sum(column.rows or 0 for column in columns)
    return tuple(TableSize(width=width, rows=rows, bytes=rows * width * _FLOAT_BYTES) for width in _TABLE_WIDTHS)
