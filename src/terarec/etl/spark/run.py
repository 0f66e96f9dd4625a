"""One preparation on Spark: rows with ids to a file, states phase by phase, then the data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.errors import ConfigError
from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.etl.engine.options import PrepareOptions
from terarec.etl.engine.phases import Phases
from terarec.etl.engine.report import InputColumn
from terarec.etl.operators import SpillOptions, State, Statistic
from terarec.etl.source import open_source
from terarec.etl.spark.expressions import ROW, SPLIT, column
from terarec.etl.spark.learning import learn
from terarec.etl.spark.reading import TypedRows, read_rows
from terarec.etl.spark.results import result_columns
from terarec.etl.spark.shards import Shards
from terarec.etl.spark.splits import split_column
from terarec.etl.spark.steps.run import run_step
from terarec.etl.spark.steps.step import Step
from terarec.etl.spark.tables import Tables
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import Pass, source_types
from terarec.etl.workflow.results import results_read
from terarec.spec import DatasetSpec

Result = TypeVar("Result")


class SparkRun:
    """The phases of one preparation.

    Args:
        spark: the session.
        workflow: what to do.
        paths: of the files of rows, in order.
        options: how.
        directory: for what phases hand on through the disk; every executor sees it.
        phases: takes their times.

    Attributes:
        options: as given.
        phases: as given.
        faults: what is bad in the files, known after `fit`.
        split_rows: split -> its rows, known after `write`.
    """

    def __init__(
        self,
        spark: SparkSession,
        workflow: Workflow,
        paths: Sequence[str],
        options: PrepareOptions,
        directory: Path,
        phases: Phases,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.options = options
        self.phases = phases
        self.split_rows: dict[str, int] = {}
        self._plan = workflow.plan
        self._states: dict[int, State] = dict(workflow.states)
        self._directory = directory
        self._spark = spark
        self._tables = Tables(spark, directory / "tables")
        self._head = max((*self._plan.row_steps, *self._plan.grouped_steps), default=-1) + 1
        self._num_rows = 0
        read = partial(read_rows, spark, workflow.spec.source, paths, options.bad_input)
        self._typed: TypedRows = self._phase("number rows", read)
        self._num_rows = sum(self._typed.file_rows)
        self.faults = self._typed.faults

    def fit(self) -> Workflow:
        """The fitted workflow."""
        for step in self._plan.table_steps:
            if step not in self._states:
                self._states[step] = self._phase(f"table {step}", partial(self._learn_table, step))
        self._rows = self._phase("rows", self._write_rows)
        for number, phase in enumerate(self._plan.fit_phases):
            waiting = [step for step in phase if step not in self._states]
            if waiting:
                work = partial(self._fit_phase, self._plan.fit_pass(number), waiting)
                self._states.update(self._phase(f"fit {number + 1}", work))
        return Workflow.of(self._plan.spec, self._states)

    def write(self, dataset: DatasetSpec, directory: Path) -> DatasetSpec:
        """Write the shards of all rows into `directory`, as `dataset` describes them; returns it with its shards."""
        frame = self._steps(self._rows, [step for step in self._plan.transform_pass().steps if step >= self._head])
        encoded = frame.select(ROW, SPLIT, *result_columns(self._plan, dataset))
        seed = self.options.seed if self.options.shuffle else None
        shards = Shards(dataset, directory, self.options.rows_per_shard, seed)
        written = self._phase("write", lambda: shards.write(encoded, self._rows.select(ROW, SPLIT)))
        self.split_rows = {split: written.num_rows(split) for split in written.splits}
        if not self.split_rows.get(SPLIT_NAMES[TRAIN]):
            raise ConfigError("the sources leave no row for training, expected at least one")
        return written

    def inputs(self) -> tuple[InputColumn, ...]:
        """The columns of the sources."""
        return tuple(
            InputColumn(name=name, missing=missing, missing_share=missing / values if values else 0.0)
            for name, (missing, values) in self.faults.missing().items()
        )

    def _phase(self, name: str, work: Callable[[], Result]) -> Result:
        """Do `work` as a phase of the report."""
        done: list[Result] = []

        def run() -> dict[str, Any]:
            done.append(work())
            self.phases.meter.add(self._num_rows, 0)
            return {}

        self.phases.run(name, run, 0)
        return done[0]

    def _write_rows(self) -> DataFrame:
        """Rows after row steps and grouped steps, read from a file so that ids and groups are computed once."""
        frame = self._steps(self._typed.frame, range(self._head))
        wanted = [name for name in self._columns_read() if name in frame.columns]
        path = str(self._directory / "rows")
        frame.select(ROW, *map(column, wanted)).write.mode("overwrite").parquet(path)
        self._typed.faults.first()
        rows = self._spark.read.parquet(path)
        return rows.withColumn(SPLIT, split_column(self._plan.spec, rows, self._typed.file_rows))

    def _columns_read(self) -> list[str]:
        """Columns that stand after the first steps and that something later reads."""
        later = {name for code in self._plan.codes[self._head :] for name in code.reads}
        split = getattr(self._plan.spec.split, "column", None)
        needed = later | set(results_read(self._plan.spec)) | ({split} if split else set())
        return [name for name in self._plan.types[self._head] if name in needed]

    def _fit_phase(self, work: Pass, waiting: Sequence[int]) -> dict[int, State]:
        """What the steps `waiting` learn, each from the training rows as they stand before it."""
        frame = self._rows.where(F.col(SPLIT) == TRAIN)
        memory = SpillOptions(directory=self._directory)
        learnt: dict[int, State] = {}
        for index in sorted({*work.steps, *waiting}):
            if index in waiting:
                learnt[index] = learn(frame, self._step(index), memory)
            if index in work.steps and index >= self._head:
                frame = run_step(frame, self._step(index), self._tables)
        return learnt

    def _steps(self, frame: DataFrame, steps: Sequence[int] | range) -> DataFrame:
        for step in steps:
            frame = run_step(frame, self._step(step), self._tables)
        return frame

    def _step(self, index: int) -> Step:
        types = self._plan.types
        return Step(index, self._plan.codes[index], types[index], self._states.get(index), types[index + 1])

    def _learn_table(self, index: int) -> State:
        """Side tables are small: the driver reads them as the local engine does."""
        code = self._plan.codes[index]
        name = code.table
        assert name is not None
        if name not in self.options.tables:
            raise ConfigError(f"side table {name!r}: no file, expected --table {name}=PATH")
        spec = self._plan.spec.tables[name]
        source = open_source(spec, self.options.tables[name], self.options.bad_input, self.options.threads)
        statistic: Statistic = code.statistic(source_types(spec), SpillOptions(directory=self._directory))
        for block in source.blocks():
            statistic.merge(statistic.observe(block))
        return statistic.finish()
