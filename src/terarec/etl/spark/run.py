"""One preparation on Spark: rows with ids to a file, states phase by phase, then the data set."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.etl.engine.fitting import StateStore, fit_table
from terarec.etl.engine.preparation import WORK, WORKFLOW, Phases, Result
from terarec.etl.ops import SpillOptions, State, Statistic
from terarec.etl.source import Source
from terarec.etl.spark.bad_input import bad_input
from terarec.etl.spark.expressions import ROW, SPLIT, column
from terarec.etl.spark.failures import in_one_line
from terarec.etl.spark.judging import Judge
from terarec.etl.spark.learning import learn
from terarec.etl.spark.reading import read_rows
from terarec.etl.spark.results import check_positives, result_columns
from terarec.etl.spark.shards import RowOrder
from terarec.etl.spark.splits import split_column
from terarec.etl.spark.steps.run import run_step
from terarec.etl.spark.steps.step import Step
from terarec.etl.spark.storing import store
from terarec.etl.spark.tables import Tables
from terarec.etl.spark.watch import JobWatch
from terarec.etl.workflow import Pass, Workflow, source_types
from terarec.etl.workflow.plan import results_read
from terarec.etl.workflow.transform import metadata_name
from terarec.io import is_remote
from terarec.spec import DatasetSpec, PrepareOptions

Learnt: TypeAlias = tuple[Mapping[int, State], Result]
"""What steps learnt, and what their phase has to tell the journal."""

_WRITING_PASSES = 3
"""Of the last phase: counting rows, encoding them, and sorting each shard."""


class SparkRun:
    """The phases of one preparation on a Spark cluster; see `EngineRun`.

    Args:
        spark: the session.
        workflow: what to do.
        source: the rows.
        options: how.
        phases: knows what is done.
        directory: that becomes the data set; every executor sees it.

    Attributes:
        spilled: nothing, as Spark does not tell.
    """

    def __init__(
        self,
        spark: SparkSession,
        workflow: Workflow,
        source: Source,
        options: PrepareOptions,
        phases: Phases,
        directory: Path,
    ) -> None:
        workflow.save(directory / WORKFLOW)  # states that phases learn are added to it
        self.spilled: list[str] = []
        self._spark = spark
        self._workflow = workflow
        self._source = source
        self._options = options
        self._phases = phases
        self._directory = directory
        self._work = directory / WORK
        self._plan = workflow.plan
        self._kept = StateStore(self._plan, directory / WORKFLOW)
        self._states: dict[int, State] = dict(workflow.states)
        self._tables = Tables(spark, self._work / "tables")
        self._head = max((*self._plan.row_steps, *self._plan.grouped_steps), default=-1) + 1
        self._work.mkdir(exist_ok=True)
        self._watch = JobWatch(spark.sparkContext, phases.meter, source.num_bytes)
        phases.meter.total_bytes = source.num_bytes * self._num_passes()

    def fit(self) -> Workflow:
        """See `EngineRun`."""
        for step in self._plan.table_steps:
            self._learn(f"table {step}", [step], partial(self._learn_table, step), 0)
        self._read = self._phase("rows", self._write_rows, self._reading_passes)
        self._watch.num_rows = sum(self._read["file_rows"])
        for number, phase in enumerate(self._plan.fit_phases):
            look = partial(self._learn_rows, self._plan.fit_pass(number), phase)
            self._learn(f"fit {number + 1}", phase, look, len(phase))
        return Workflow.of(self._plan.spec, self._states)

    def write(self, spec: DatasetSpec, fitted: Workflow, location: Path) -> Result:
        """See `EngineRun`."""
        del fitted  # its states are those of this run

        def write() -> Result:
            for split in SPLIT_NAMES:  # of a run that was killed in this phase
                shutil.rmtree(self._directory / split, ignore_errors=True)
            frame = self._steps(self._rows, [step for step in self._plan.transform_pass().steps if step >= self._head])
            if not self._workflow.states:
                check_positives(frame.where(F.col(SPLIT) == TRAIN), self._plan)
            encoded = frame.select(ROW, SPLIT, *result_columns(self._plan, spec))
            seed = self._options.seed if self._options.shuffle else None
            order = RowOrder(self._options.rows_per_shard, seed)
            ordered = order.write(encoded, self._rows.select(ROW, SPLIT), spec, self._fresh("shards"))
            store(ordered, spec, self._directory, location, self._options)
            return {"rows": dict(ordered.rows), "missing": self._read["missing"], "bad_input": self._read["bad_input"]}

        return self._phase("write", write, _WRITING_PASSES)

    def finish(self) -> None:
        """See `EngineRun`."""
        # The last tasks of a run that was killed may still write here.
        shutil.rmtree(self._work, ignore_errors=True)

    @cached_property
    def _rows(self) -> DataFrame:
        """What the phase "rows" wrote, in this run or in an interrupted one, with the split of each row."""
        rows = self._spark.read.parquet(str(self._work / self._read["directory"]))
        return rows.withColumn(SPLIT, split_column(self._plan.spec, rows, self._read["file_rows"]))

    def _write_rows(self) -> Result:
        """Write rows after row steps and grouped steps to files, so that ids and groups are computed once."""
        paths = [file.path if is_remote(file.path) else str(Path(file.path).resolve()) for file in self._source.files]
        typed = read_rows(self._spark, self._plan.spec.source, paths, self._options.bad_input)
        self._watch.num_rows = sum(typed.file_rows)
        judge = Judge(self._plan, paths, self._step, partial(run_step, tables=self._tables))
        metadata = {metadata_name(index): column(name) for index, name in enumerate(self._plan.spec.metadata)}
        frame = judge.enter(typed.frame.withColumns(metadata) if metadata else typed.frame)
        frame = self._steps(frame, range(len(self._plan.row_steps), self._head))
        wanted = [*(name for name in self._columns_read() if name in frame.columns), *metadata]
        directory = self._fresh("rows")
        frame.select(ROW, *map(column, wanted)).write.parquet(str(directory))
        for refused in judge.refused:
            refused.are_counted_twice = typed.faults.are_counted_twice
        return {
            "directory": directory.name,
            "file_rows": list(typed.file_rows),
            "missing": typed.missing(),
            "bad_input": bad_input(self._options.bad_input, [typed.faults, *judge.refused]),
        }

    def _columns_read(self) -> list[str]:
        """Columns that stand after the first steps and that something later reads."""
        later = {name for code in self._plan.operators[self._head :] for name in code.reads}
        split = getattr(self._plan.spec.split, "column", None)
        needed = later | set(results_read(self._plan.spec)) | ({split} if split else set())
        return [name for name in self._plan.types[self._head] if name in needed]

    def _fresh(self, name: str) -> Path:
        """A path for a directory that no task of a killed run knows, which may be alive for a while."""
        for old in self._work.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        return self._work / f"{name}-{uuid4().hex}"

    @property
    def _reading_passes(self) -> int:
        """Counting lines, parsing them, and a shuffle for each grouped step."""
        return 2 + len(self._plan.grouped_steps)

    def _num_passes(self) -> int:
        """About how often all rows are gone through."""
        fits = [step for phase in self._plan.fit_phases for step in phase if step not in self._states]
        return self._reading_passes + len(fits) + _WRITING_PASSES

    def _phase(self, name: str, work: Callable[[], Result], passes: int) -> Result:
        """The result of phase `name`, which goes through all rows about so many times."""

        def watched() -> Result:
            with in_one_line(), self._watch.phase(name, passes):
                return work()

        return self._phases.run(name, watched, passes * self._source.num_bytes)

    def _learn(self, name: str, steps: Sequence[int], look: Callable[[], Learnt], passes: int) -> None:
        """Fit `steps`, unless they are, in a phase of this `name`."""
        if all(step in self._states for step in steps):
            return

        def work() -> Result:
            learnt, result = look()
            self._kept.save(learnt)
            return result

        self._phase(name, work, passes)
        self._states.update({step: self._kept.state(step) for step in steps})

    def _learn_rows(self, work: Pass, waiting: Sequence[int]) -> Learnt:
        """What the steps `waiting` learn, each from the training rows as they stand before it."""
        frame = self._rows.where(F.col(SPLIT) == TRAIN)
        if frame.isEmpty():
            raise FormatError("the sources hold no row for training, expected at least one")
        memory = SpillOptions(directory=self._work)
        learnt: dict[int, State] = {}
        for index in sorted({*work.steps, *waiting}):
            if index in waiting:
                learnt[index] = learn(frame, self._step(index), memory)
            if index in work.steps and index >= self._head:
                frame = run_step(frame, self._step(index), self._tables)
        return learnt, {}

    def _learn_table(self, index: int) -> Learnt:
        """Side tables are small: the driver reads them as the local engine does."""
        code = self._plan.operators[index]
        assert code.side_table is not None
        types = source_types(self._plan.spec.tables[code.side_table])
        statistic: Statistic = code.statistic(types, SpillOptions(directory=self._work))
        result = fit_table(self._workflow, code.side_table, self._options, statistic)
        return {index: statistic.finish()}, result

    def _steps(self, frame: DataFrame, steps: Sequence[int] | range) -> DataFrame:
        for step in steps:
            frame = run_step(frame, self._step(step), self._tables)
        return frame

    def _step(self, index: int) -> Step:
        plan = self._plan
        is_judged = index in plan.row_steps or index in plan.validation.steps
        state, made = self._states.get(index), plan.types[index + 1]
        return Step(index, plan.operators[index], plan.types[index], state, made, is_judged)
