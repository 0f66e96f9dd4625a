"""One preparation on Spark, phase by phase: count the sources, split them, fit steps, write the data set."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession

from terarec.errors import TerarecError
from terarec.etl.columns import SPLIT_NAMES
from terarec.etl.engine.phases import WORK, FittedRun, Phases, Result, StateStore, fit_table
from terarec.etl.engine.split import Bounds, RowBounds, bounds_from_data, bounds_to_data, needs_bounds, row_bounds
from terarec.etl.engine.write import SHOWN, no_positives
from terarec.etl.ops import SpillOptions, State
from terarec.etl.source import Source
from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.source.source import reader_of
from terarec.etl.spark.fit import FitPhase, fit_steps, time_bounds
from terarec.etl.spark.grouped import group_on_cluster
from terarec.etl.spark.jobs import JobWatch, spark_errors
from terarec.etl.spark.read import Counted, Piece, Range, count_range, cut_parquet, cut_text
from terarec.etl.spark.tasks import Fault, Job, PieceReport, Row, item_bits, map_items, raise_first
from terarec.etl.spark.write import store, write_shards, written_result
from terarec.etl.workflow import Workflow, source_types
from terarec.etl.workflow.transform import WORKFLOW_DIRECTORY
from terarec.io import is_remote
from terarec.spec import DatasetSpec, FieldError, PrepareOptions, SplitByFiles, SplitByFraction, SplitByTime
from terarec.spec.checks import quoted
from terarec.spec.dataset import DATASET_STORAGES

_WRITING_PASSES = 2
"""Passes of the last phase over all rows: encoding them, and writing shards."""
_PIECE_SIZE = "spark.sql.files.maxPartitionBytes"
_LEAST_PIECE = 1 << 22
"""Bytes below which the start of a task takes longer than its work, as Spark sees it: `openCostInBytes`."""
_GROUP_BYTES = 1 << 28
"""About so much text belongs to the groups that one task holds."""


class SparkRun:
    """The phases of one preparation on a Spark cluster; see `EngineRun`.

    Args:
        spark: Spark session.
        workflow: Workflow to fit, unless it is fitted, and to transform rows with.
        source: Rows.
        options: Options of the preparation.
        phases: Runs each phase unless it is done.
        directory: Directory that becomes the data set; every executor sees it.

    Attributes:
        spilled: Empty, as Spark does not report it.
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
        self._directory = directory.resolve()
        workflow.save(self._directory / WORKFLOW_DIRECTORY)  # states that phases fit are added to it
        self.spilled: list[str] = []
        self._context = spark.sparkContext
        most = _piece_bytes(str(spark.conf.get(_PIECE_SIZE)))
        self._piece_bytes = even_pieces(source.num_bytes, most, self._context.defaultParallelism)
        self._workflow = workflow
        self._source = source
        self._options = options
        self._phases = phases
        self._plan = workflow.plan
        self._files = source.files
        if not str(self._context.master).startswith("local"):  # executors run in directories of their own
            self._files = tuple(
                file if is_remote(file.path) else dataclasses.replace(file, path=str(Path(file.path).resolve()))
                for file in source.files
            )
        self._work = self._directory / WORK
        self._work.mkdir(exist_ok=True)
        self._store = StateStore(self._plan, self._directory / WORKFLOW_DIRECTORY)
        self._states: dict[int, State] = dict(workflow.states)
        # Results of the first phases, which the later ones need.
        self._pieces: list[Piece] = []
        self._bounds: Bounds | None = None
        self._grouped: Path | None = None
        self._watch = JobWatch(self._context, phases.meter, source.num_bytes)
        phases.meter.total_bytes = source.num_bytes * self._num_passes()

    def fit(self) -> FittedRun:
        """Fit the workflow; see `EngineRun`."""
        for step in self._plan.table_steps:
            self._fit(f"table {step}", [step], partial(self._fit_on_table, step), 0)
        counted = self._phase("count", self._count, 1)
        self._pieces = [Piece(**{**piece, "names": tuple(piece["names"])}) for piece in counted["pieces"]]
        self._watch.num_rows = sum(piece.num_rows for piece in self._pieces)
        self._bounds = self._find_bounds()
        if self._plan.grouped_steps:
            grouped = self._phase("group", self._group, 2)
            self._grouped = self._work / grouped["directory"]
        for number, steps in enumerate(self._plan.fit_phases):
            self._fit(f"fit {number + 1}", steps, partial(self._fit_on_rows, number), 1)
        return FittedRun(Workflow.of(self._plan.spec, self._states), self._write)

    def _write(self, spec: DatasetSpec, location: Path) -> Result:
        """Write all rows; see `FittedRun`."""

        def write() -> Result:
            for split in SPLIT_NAMES:  # of a run that was killed in this phase
                shutil.rmtree(self._directory / split, ignore_errors=True)
            is_direct = self._options.storage in DATASET_STORAGES
            shards = self._directory if is_direct else self._fresh("shards")
            with self._scratch("encoded") as encoded:
                written, reports = write_shards(
                    self._context, self._job(), spec, self._pieces, encoded, shards, self._options
                )
            self._check_positives(reports)
            store(written, spec, shards, self._directory, location, self._options)
            return written_result(reports, written)

        return self._phase("write", write, _WRITING_PASSES)

    def finish(self) -> None:
        """Remove the temporary files of the phases; see `EngineRun`."""
        # The last tasks of a run that was killed may still write here.
        shutil.rmtree(self._work, ignore_errors=True)

    def _job(self) -> Job:
        return Job(
            spec=self._plan.spec,
            files=self._files,
            policy=self._options.bad_input,
            directory=self._directory / WORKFLOW_DIRECTORY,
            fitted=tuple(sorted(self._states)),
            bounds=self._bounds,
            grouped=self._grouped,
        )

    def _count(self) -> Result:
        """Cut the files into pieces and count their rows."""
        spec, files = self._plan.spec.source, self._files
        reader = reader_of(spec)
        if isinstance(reader, ParquetReader):
            pieces = cut_parquet(files, reader, self._piece_bytes)
        else:

            def count(ranges: Sequence[Range]) -> Sequence[Counted]:
                function = partial(_count_range, spec, files, self._piece_bytes)
                results = [result for *_, result in map_items(self._context, ranges, function).collect()]
                raise_first(PieceReport(fault=result) for result in results if isinstance(result, Fault))
                return results

            pieces = cut_text(files, spec, self._piece_bytes, count)
        return {"pieces": [dataclasses.asdict(piece) for piece in pieces]}

    def _find_bounds(self) -> Bounds | None:
        split = self._plan.spec.split
        if split is None or not needs_bounds(split):
            return None
        if isinstance(split, SplitByTime):

            def count() -> Result:
                return bounds_to_data(time_bounds(self._context, self._job(), self._pieces, split))

            return bounds_from_data(self._phase("split", count, 1))
        assert isinstance(split, SplitByFiles | SplitByFraction)
        counts = [0] * len(self._source.files)
        for piece in self._pieces:
            counts[piece.file] += piece.num_rows
        return row_bounds(split, counts, item_bits(self._plan))

    def _group(self) -> Result:
        directory = self._fresh("group")
        parts = max(-(-self._source.text_bytes // _GROUP_BYTES), 2 * self._context.defaultParallelism)
        group_on_cluster(self._context, self._job(), self._pieces, parts, directory)
        return {"directory": directory.name}

    def _fresh(self, name: str) -> Path:
        """Return a path for a directory that no task of a killed run, which may still run for a while, knows."""
        for old in self._work.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        return self._work / f"{name}-{uuid4().hex}"

    @contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """Yield such a path, which is removed at the end of the block."""
        directory = self._fresh(name)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _num_passes(self) -> int:
        """Return about how often all rows are read."""
        plan, split = self._plan, self._plan.spec.split
        fits = sum(not all(step in self._states for step in phase) for phase in plan.fit_phases)
        by_time = isinstance(split, SplitByTime) and needs_bounds(split)
        return 1 + by_time + 2 * bool(plan.grouped_steps) + fits + _WRITING_PASSES

    def _phase(self, name: str, work: Callable[[], Result], passes: int) -> Result:
        """Return the result of phase `name`, which reads all rows about `passes` times."""

        def watched() -> Result:
            with spark_errors(), self._watch.phase(name, passes):
                return work()

        return self._phases.run(name, watched, passes * self._source.num_bytes)

    def _fit(self, name: str, steps: Sequence[int], work: Callable[[], Result], passes: int) -> None:
        """Fit `steps`, unless they are fitted, in a phase of this `name`."""
        if not all(step in self._states for step in steps):
            self._phase(name, work, passes)
            self._states.update({step: self._store.state(step) for step in steps})

    def _fit_on_rows(self, number: int) -> Result:
        plan, bounds = self._plan, self._bounds
        until_row = bounds.valid_from if isinstance(bounds, RowBounds) else None
        phase = FitPhase(steps=plan.fit_phases[number], work=plan.fit_pass(number), until_row=until_row)
        with self._scratch("fit") as directory:
            self._store.save(fit_steps(self._context, self._job(), self._pieces, phase, directory))
        return {}

    def _fit_on_table(self, step: int) -> Result:
        """Fit a step on its side table, which is small: the driver reads it as the local engine does."""
        code = self._plan.operators[step]
        assert code.side_table is not None
        types = source_types(self._plan.spec.tables[code.side_table])
        statistic = code.statistic(types, SpillOptions(directory=self._work))
        result = fit_table(self._workflow, code.side_table, self._options, statistic)
        self._store.save({step: statistic.finish()})
        return result

    def _check_positives(self, reports: Sequence[PieceReport]) -> None:
        """Raise if no training row has one of the `positives` of a label."""
        if self._workflow.states:
            return
        found = set[int]().union(*(report.positives for report in reports))
        for place, label in enumerate(self._plan.spec.labels):
            if label.positives and place not in found:
                values = dict.fromkeys(value for report in reports for value in report.values.get(place, ()))
                raise no_positives(label, list(values)[: SHOWN + 1])


def _piece_bytes(size: str) -> int:
    """Return the bytes of a size as Spark writes it, such as "128m" or "134217728b".

    Raises:
        FieldError: No size, or 0.
    """
    found = re.fullmatch(r"([1-9]\d*)\s*([kmgt]?)b?", size.strip().lower())
    if found is None:
        problem = f"{_PIECE_SIZE}: got {quoted(size)}, expected a size of at least one byte such as '128m'"
        raise FieldError("", "spark_conf", problem)
    return int(found[1]) << 10 * (" kmgt".index(found[2] or " "))


def even_pieces(num_bytes: int, most: int, parallelism: int) -> int:
    """Return the size of pieces of at most `most` bytes that keep all cores busy in the last round of tasks, too.

    Args:
        num_bytes: Size of all files.
        most: Largest size of a piece.
        parallelism: Tasks that run at once.
    """
    rounds = -(-num_bytes // (most * parallelism))
    # Nine pieces of 128 MiB on two cores took 8 % longer than ten of equal size.
    return min(most, max(_LEAST_PIECE, -(-num_bytes // max(1, rounds * parallelism))))


def _count_range(spec: Any, files: Sequence[Any], piece_bytes: int, number: int, found: Range) -> Sequence[Row]:
    """Yield the counts of a range, or the error that ended counting."""
    try:
        # An error is a result here: the driver raises the first one in the order of the files.
        result: Any = count_range(reader_of(spec), spec, files[found.file], found, piece_bytes)
    except TerarecError as error:
        result = Fault(number, type(error).__name__, error.where, error.problem)
    return [(0, number, result)]
