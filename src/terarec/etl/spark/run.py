# SPDX-License-Identifier: Apache-2.0
"""One preparation on Spark, phase by phase: count the sources, split them, fit steps, write the data set."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession
from typing_extensions import override

from terarec.errors import TerarecError
from terarec.etl.columns import SPLIT_NAMES
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.run import EngineRun
from terarec.etl.engine.split import check_splits, needs_bounds, row_bounds
from terarec.etl.engine.write import SHOWN, no_positives
from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.source.hive import files_spec
from terarec.etl.source.source import Source, reader_of
from terarec.etl.spark.fit import FitPhase, fit_steps, time_bounds_on_cluster, time_range_on_cluster
from terarec.etl.spark.grouped import group_on_cluster, list_on_cluster
from terarec.etl.spark.jobs import JobWatch, spark_errors
from terarec.etl.spark.read import Counted, FilePart, Range, count_range, cut_parquet, cut_text
from terarec.etl.spark.tasks import Fault, Job, PieceReport, Row, item_bits, map_items, raise_first
from terarec.etl.spark.write import store, write_shards, written_result
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.earlier_rows import EarlierRows, copy_earlier_rows
from terarec.etl.workflow.transform import WORKFLOW_DIRECTORY
from terarec.io.remote import is_remote
from terarec.io.removal import remove_tree
from terarec.spec import DatasetSpec, LeaveOneOut, PrepareOptions, SplitByFiles, SplitByFraction, SplitByTime
from terarec.spec.checks import FieldError, quoted
from terarec.spec.dataset import DATASET_STORAGES

_WRITING_PASSES = 2
"""Passes of the last phase over all rows: encoding them, and writing shards."""
_PIECE_SIZE = "spark.sql.files.maxPartitionBytes"
_LEAST_PIECE = 1 << 22
"""Bytes below which the start of a task takes longer than its work, as Spark sees it: `openCostInBytes`."""
_GROUP_BYTES = 1 << 28
"""About so much text belongs to the groups that one task holds."""


class SparkRun(EngineRun):
    """The phases of one preparation on a Spark cluster; see `EngineRun`. Every executor sees the directory."""

    def __init__(
        self,
        spark: SparkSession,
        workflow: Workflow,
        source: Source,
        options: PrepareOptions,
        phases: Phases,
        directory: Path,
    ) -> None:
        super().__init__(workflow, source, options, phases, directory.resolve())
        self._context = spark.sparkContext
        most = _piece_bytes(str(spark.conf.get(_PIECE_SIZE)))
        self._piece_bytes = even_pieces(source.num_bytes, most, self._context.defaultParallelism)
        self._files = source.files
        if not str(self._context.master).startswith("local"):  # executors run in directories of their own
            self._files = tuple(
                file if is_remote(file.path) else dataclasses.replace(file, path=os.path.abspath(file.path))
                for file in source.files
            )
        # Results of the first phases, which the later ones need.
        self._pieces: list[FilePart] = []
        self._grouped: Path | None = None
        self._watch = JobWatch(self._context, phases.meter, source.num_bytes)
        finds_rows = isinstance(workflow.spec.split, SplitByTime | LeaveOneOut) and needs_bounds(workflow.spec.split)
        num_passes = 1 + finds_rows + 2 * bool(self._plan.grouped_steps) + self._num_fits + _WRITING_PASSES
        phases.meter.total_bytes = source.num_bytes * num_passes

    @override
    def write(self, spec: DatasetSpec, location: Path) -> Result:
        def write() -> Result:
            for split in SPLIT_NAMES:  # of a run that was killed in this phase
                remove_tree(self._directory / split, ignore_errors=True)
            is_direct = self._options.storage in DATASET_STORAGES
            shards = self._directory if is_direct else self._fresh("shards")
            with self._scratch("encoded") as encoded:
                written, reports = write_shards(
                    self._context, self._job(), spec, self._pieces, encoded, shards, self._options
                )
            self._check_positives(reports)
            if self._options.empty_splits == "raise":
                rows = {split: written.num_rows(split) for split in written.splits}
                times = partial(time_range_on_cluster, self._context, self._job(), self._pieces)
                check_splits(self._plan.spec.split, rows, times)
            store(written, spec, shards, self._directory, location, self._options)
            return written_result(self._pieces, reports, written, len(self._files))

        return self._phase("write", write, _WRITING_PASSES)

    @override
    def finish(self) -> None:
        # The last tasks of a run that was killed may still write here.
        remove_tree(self._work, ignore_errors=True)

    def _job(self) -> Job:
        return Job(
            spec=self._plan.spec,
            source=self._source.spec,
            files=self._files,
            policy=self._options.bad_input,
            directory=self._directory / WORKFLOW_DIRECTORY,
            fitted=tuple(sorted(self._states)),
            bounds=self._bounds,
            grouped=self._grouped,
        )

    def _count(self) -> Result:
        """Cut the files into pieces and count their rows."""
        files = self._files
        spec = files_spec(self._source.spec, files)
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

    @override
    def _split_rows(self) -> None:
        counted = self._phase("count", self._count, 1)
        self._pieces = [FilePart(**{**piece, "names": tuple(piece["names"])}) for piece in counted["pieces"]]
        self._watch.num_rows = sum(piece.num_rows for piece in self._pieces)
        split = self._plan.spec.split
        if split is None or not needs_bounds(split):
            return
        if isinstance(split, SplitByTime):
            empty_splits = self._options.empty_splits
            self._bounds = self._split_phase(
                lambda: time_bounds_on_cluster(self._context, self._job(), self._pieces, split, empty_splits)
            )
            return
        if isinstance(split, LeaveOneOut):
            with self._scratch("users") as directory:
                self._bounds = self._list_phase(
                    partial(list_on_cluster, self._context, self._job(), self._pieces, split, self._parts, directory)
                )
            return
        assert isinstance(split, SplitByFiles | SplitByFraction)
        counts = [0] * len(self._source.files)
        for piece in self._pieces:
            counts[piece.file] += piece.num_rows
        self._bounds = row_bounds(split, counts, item_bits(self._plan))

    @override
    def _run_grouped_steps(self) -> None:
        self._grouped = self._work / self._phase("group", self._group, 2)["directory"]

    def _group(self) -> Result:
        directory, earlier, parts = self._fresh("group"), self._earlier, self._parts
        with self._scratch("earlier") as copies:
            if earlier.rows is not None:  # where every executor sees them
                copy_earlier_rows(earlier.rows.directory, copies)
                earlier = dataclasses.replace(earlier, rows=EarlierRows(copies, self._plan))
            late = group_on_cluster(self._context, self._job(), self._pieces, parts, directory, earlier)
        return {"directory": directory.name, "earlier_rows": earlier.num_rows(self._plan), "late_rows": late}

    @property
    def _parts(self) -> int:
        """Number of parts of groups."""
        return max(-(-self._source.text_bytes // _GROUP_BYTES), 2 * self._context.defaultParallelism)

    def _fresh(self, name: str) -> Path:
        """Return a path for a directory that no task of a killed run, which may still run for a while, knows."""
        for old in self._work.glob(f"{name}-*"):
            remove_tree(old, ignore_errors=True)
        return self._work / f"{name}-{uuid4().hex}"

    @contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """Yield such a path, which is removed at the end of the block."""
        directory = self._fresh(name)
        try:
            yield directory
        finally:
            remove_tree(directory, ignore_errors=True)

    @override
    def _phase(self, name: str, work: Callable[[], Result], passes: int) -> Result:
        def watched() -> Result:
            with spark_errors(), self._watch.phase(name, passes):
                return work()

        return super()._phase(name, watched, passes)

    @override
    def _fit_rows(self, number: int) -> Result:
        plan = self._plan
        phase = FitPhase(steps=plan.fit_phases[number], work=plan.fit_pass(number), until_row=self._until_row)
        with self._scratch("fit") as directory:
            self._store.save(fit_steps(self._context, self._job(), self._pieces, phase, directory))
        return {}

    def _check_positives(self, reports: Sequence[PieceReport]) -> None:
        """Raise if no training row has one of the `positives` of a label."""
        if self._workflow.states:
            return
        positives = set[int]().union(*(report.positives for report in reports))
        for place, label in enumerate(self._plan.spec.labels):
            if label.positives and place not in positives:
                values = dict.fromkeys(value for report in reports for value in report.values.get(place, ()))
                raise no_positives(label, list(values)[: SHOWN + 1])


def _piece_bytes(size: str) -> int:
    """Return the bytes of a size as Spark writes it, such as "128m" or "134217728b"."""
    match = re.fullmatch(r"([1-9]\d*)\s*([kmgt]?)b?", size.strip().lower())
    if match is None:
        problem = f"{_PIECE_SIZE}: got {quoted(size)}, expected a size of at least one byte such as '128m'"
        raise FieldError("", "spark_conf", problem)
    return int(match[1]) << 10 * (" kmgt".index(match[2] or " "))


def even_pieces(num_bytes: int, most: int, parallelism: int) -> int:
    """Return the size of pieces of at most `most` bytes that keep all cores busy in the last round of tasks, too."""
    rounds = -(-num_bytes // (most * parallelism))
    # Nine pieces of 128 MiB on two cores took 8 % longer than ten of equal size.
    return min(most, max(_LEAST_PIECE, -(-num_bytes // max(1, rounds * parallelism))))


def _count_range(spec: Any, files: Sequence[Any], piece_bytes: int, number: int, span: Range) -> Sequence[Row]:
    """Yield the counts of a range, or the error that ended counting."""
    try:
        # An error is a result here: the driver raises the first one in the order of the files.
        result: Any = count_range(reader_of(spec), spec, files[span.file], span, piece_bytes)
    except TerarecError as error:
        result = Fault(number, type(error).__name__, error.where, error.problem)
    return [(0, number, result)]
