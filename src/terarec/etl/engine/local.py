"""The single-machine engine: fits a workflow on the training part of logs, and writes the data set of all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, Rows
from terarec.etl.engine.grouped import GroupedRows, partition_count, run_grouped
from terarec.etl.engine.passes import JoinedRows, Passes, Pipeline, ReadRows
from terarec.etl.engine.phases import (
    WORK,
    FittedRun,
    Phases,
    Result,
    StateStore,
    add_bad_input,
    bad_input_to_json,
    fit_table,
)
from terarec.etl.engine.split import (
    Bounds,
    RowBounds,
    TrainingPrefix,
    assign,
    bounds_from_data,
    bounds_to_data,
    counted_bounds,
    find_bounds,
    needs_bounds,
)
from terarec.etl.engine.write import (
    PositiveRows,
    SinkOptions,
    WriteCheckpoints,
    create_sink,
    no_positives,
    training_values,
    write_rows,
)
from terarec.etl.ops import ColumnTypes, SpillOptions, State, Statistic
from terarec.etl.ops.sequences import ITEM_BITS
from terarec.etl.sink import PartOptions, closed_files
from terarec.etl.source import RawBlock, Source
from terarec.etl.workflow import Pass, Plan, Workflow, source_types
from terarec.etl.workflow.transform import WORKFLOW_DIRECTORY
from terarec.io import flush_tree
from terarec.kernels import memory
from terarec.parallel import available_threads
from terarec.spec import DatasetSpec, PrepareOptions, SplitByFiles, SplitByFraction

BYTES_PER_TEXT_BYTE = 3
"""Rows take about this multiple of the bytes of their text in memory; text of compressed files is estimated in turn."""
_UNKNOWN_MEMORY = 8 << 30
"""Free memory where the system does not say."""
Statistics: TypeAlias = Mapping[int, Statistic]
"""Position of a step -> its statistic."""
JoinedOutputs: TypeAlias = Callable[[Pass], GroupedRows | None]
"""Opens the outputs of the grouped steps that a pass needs."""


def _keep_files(directory: Path, kept: set[Path]) -> None:
    """Remove the files of a run that was killed in the write phase from `directory`, except complete shards."""
    if not any(path.parent == directory for path in kept):
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path not in kept:
            path.unlink()


class LocalRun:
    """The phases of one preparation on this machine; see `EngineRun`.

    Args:
        workflow: Workflow to fit, unless it is fitted, and to transform rows with.
        source: Rows.
        options: Options of the preparation.
        phases: Runs each phase unless it is done.
        directory: Directory that becomes the data set, with `WORKFLOW_DIRECTORY` in it, and `WORK` until `finish`.

    Attributes:
        spilled: Names of the steps whose statistics did not fit in memory.
    """

    def __init__(
        self, workflow: Workflow, source: Source, options: PrepareOptions, phases: Phases, directory: Path
    ) -> None:
        self._work = directory / WORK
        self._work.mkdir(exist_ok=True)
        workflow.save(directory / WORKFLOW_DIRECTORY)  # states that phases fit are added to it
        self.spilled: list[str] = []
        self._workflow = workflow
        self._source = source
        self._options = options
        self._phases = phases
        self._directory = directory
        self._memory = options.memory_bytes or (memory.available_bytes() or _UNKNOWN_MEMORY) // 2
        self._plan = workflow.plan
        self._states: dict[int, State] = dict(workflow.states)
        self._store = StateStore(self._plan, directory / WORKFLOW_DIRECTORY)
        self._statistics = _SpillingStatistics(self._plan, self._work / "spill", self._memory // 2)
        item_bits = ITEM_BITS if any(code.explodes for code in workflow.plan.operators) else 0
        self._passes = Passes(source, options.threads or available_threads(), phases.meter, item_bits)
        self._estimated_bytes = BYTES_PER_TEXT_BYTE * source.text_bytes
        self._expected_rows: dict[str, int] = {}
        phases.meter.total_bytes = source.num_bytes * self._num_passes()

    def fit(self) -> FittedRun:
        """Fit the workflow; see `EngineRun`."""
        # First: steps that choose rows, on which the bounds of the split depend, may read a side table.
        for step in self._plan.table_steps:
            self._fit_phase(f"table {step}", [step], partial(self._fit_table, step), 0)
        bounds = self._find_bounds()
        pipeline = Pipeline(self._plan, self._states, assign(self._workflow.spec.split, bounds))
        partitions = 0
        if self._plan.grouped_steps:
            grouped = self._phases.run("group", partial(self._group, pipeline), self._source.num_bytes)
            partitions = grouped["partitions"]  # of an interrupted run, which may have had another memory bound
        joined = partial(self._joined, partitions)
        # Steps that drop or add rows would make these numbers wrong.
        if isinstance(bounds, RowBounds) and not any(code.stage == "rows" for code in self._plan.operators):
            valid, test = bounds.test_from - bounds.valid_from, bounds.end - bounds.test_from
            self._expected_rows = {"train": bounds.valid_from, "valid": valid, "test": test}
        until_row = bounds.valid_from if isinstance(bounds, RowBounds) else None
        for number, steps in enumerate(self._plan.fit_phases):
            work = partial(self._fit_rows, pipeline, joined, self._plan.fit_pass(number), until_row, steps)
            self._fit_phase(f"fit {number + 1}", steps, work, self._source.num_bytes)
        fitted = Workflow.of(self._workflow.spec, self._states)
        return FittedRun(fitted, partial(self._write, fitted, pipeline, joined))

    def _write(
        self, fitted: Workflow, pipeline: Pipeline, joined: JoinedOutputs, spec: DatasetSpec, location: Path
    ) -> Result:
        """Write all rows; see `FittedRun`."""
        options = self._options
        checkpoints = WriteCheckpoints(self._work / "written.json", self._source)
        sink_options = SinkOptions(
            storage=options.storage,
            rows_per_shard=options.rows_per_shard,
            seed=options.seed if options.shuffle else None,
            memory_bytes=self._memory // 2,
            estimated_bytes=self._estimated_bytes,
            expected=self._expected_rows,
            begin=checkpoints.state,
            parts=PartOptions(count=options.parts, keysets=options.keysets),
        )
        work = self._plan.transform_pass()
        # A fitted workflow trains nothing here: its rows need no positive label.
        labels = () if self._workflow.states else self._workflow.spec.labels
        positives = PositiveRows(labels, checkpoints.absent)

        def write() -> Result:
            kept = closed_files(self._directory, spec, options.storage, checkpoints.state.closed)
            for split in SPLIT_NAMES:
                _keep_files(self._directory / split, kept)
            outputs = joined(work)
            if outputs is not None:
                # Outputs of grouped steps are read in order: those of rows that are written already are passed over.
                outputs.skip(checkpoints.begin.next_row << self._passes.item_bits)
            with create_sink(spec, self._directory, location, self._work, sink_options) as sink:
                totals = write_rows(
                    self._passes,
                    pipeline,
                    fitted.encode_rows,
                    sink=sink,
                    joined=outputs,
                    positives=positives,
                    checkpoints=checkpoints,
                )
                # Before the sink is closed, so that no data set without a positive row appears.
                label, rows = positives.absent, dict(totals.rows)
                if label is not None and rows:
                    # Another pass over the rows, only for the error, which names what the label holds.
                    values = training_values(self._passes, pipeline, label.source, joined(work))
                    raise no_positives(label, values)
                for _ in sink.finish():
                    checkpoints.save(sink, positives, at_end=True)
                sink.close()
            if not rows:
                raise FormatError("sources", "got no row that the workflow keeps, expected at least one")
            missing = {name: (totals.missing[name], count) for name, count in totals.values.items()}
            bad_input = add_bad_input([checkpoints.bad_input, bad_input_to_json(self._source.bad_input)])
            return {"rows": rows, "missing": missing, "bad_input": bad_input}

        return self._phases.run("write", write, self._source.num_bytes)

    def finish(self) -> None:
        """Remove the temporary files of the phases; see `EngineRun`."""
        shutil.rmtree(self._work)

    def _num_passes(self) -> int:
        fits = sum(not self._is_fitted(steps) for steps in self._plan.fit_phases)
        counts = needs_bounds(self._workflow.spec.split) and not self._fits_while_counting
        return counts + bool(self._plan.grouped_steps) + fits + 1

    @property
    def _fits_while_counting(self) -> bool:
        """Whether rows are counted in the pass that fits the first steps."""
        plan, split = self._plan, self._workflow.spec.split
        fits = bool(plan.fit_phases) and not self._is_fitted(plan.fit_phases[0])
        # With a limit the share of the bytes that were read says nothing about the share of the rows.
        is_by_rows = isinstance(split, SplitByFraction | SplitByFiles)
        return is_by_rows and fits and not plan.grouped_steps and self._source.is_text and self._source.limit is None

    def _is_fitted(self, steps: Sequence[int]) -> bool:
        return all(step in self._states for step in steps)

    def _find_bounds(self) -> Bounds | None:
        split = self._workflow.spec.split
        if split is None or not needs_bounds(split):
            return None
        if self._fits_while_counting:
            assert isinstance(split, SplitByFraction | SplitByFiles)
            work = partial(self._fit_while_counting, split)
            fitted = self._fit_phase("fit 1", self._plan.fit_phases[0], work, self._source.num_bytes)
            return bounds_from_data(fitted["bounds"])
        pipeline = Pipeline(self._plan, self._states, assign(None, None))
        preprocess = partial(pipeline.preprocess, self._plan.row_pass())

        def count() -> Result:
            return bounds_to_data(find_bounds(split, self._passes, preprocess, self._work))

        return bounds_from_data(self._phases.run("split", count, self._source.num_bytes))

    def _group(self, pipeline: Pipeline) -> Result:
        partitions = partition_count(self._estimated_bytes, self._memory)
        run_grouped(self._passes, pipeline, self._work, partitions)
        flush_tree(self._work)  # the journal must not outlive what it promises
        return {"partitions": partitions}

    def _joined(self, partitions: int, work: Pass) -> GroupedRows | None:
        return GroupedRows(self._work, work.grouped, partitions) if work.grouped else None

    def _fit_phase(
        self, name: str, steps: Sequence[int], work: Callable[[], tuple[Statistics, Result]], num_bytes: int
    ) -> Result:
        """Fit `steps`, unless they are, in a phase of this `name`; return its result."""
        if self._is_fitted(steps):
            return {}

        def run() -> Result:
            statistics, result = work()
            states, spilled = self._statistics.finish(statistics)
            self._store.save(states)
            return {"rows": {}, **result, "spilled": spilled}

        result = self._phases.run(name, run, num_bytes)
        self.spilled += result["spilled"]
        self._expected_rows.update(result["rows"])
        self._states.update({step: self._store.state(step) for step in steps})
        return result

    def _fit_rows(
        self, pipeline: Pipeline, joined: JoinedOutputs, work: Pass, until_row: int | None, steps: Sequence[int]
    ) -> tuple[Statistics, Result]:
        statistics, blocks = self._statistics.new(steps), self._passes.blocks(until_row)
        rows = _fit_pass(self._passes, pipeline, work, statistics, joined=joined(work), blocks=blocks)
        _check_training(rows["train"])
        return statistics, {"rows": rows if until_row is None else {}}

    def _fit_while_counting(self, split: SplitByFraction | SplitByFiles) -> tuple[Statistics, Result]:
        """Fit the first phase in the pass that counts the rows of text files; see `_fits_while_counting`.

        The first rows, which are for training whatever the number of all rows is, are observed in this pass, the other
        training rows after it.
        """
        passes, plan = self._passes, self._plan
        new_statistics = partial(self._statistics.new, plan.fit_phases[0])
        work, prefix, statistics = plan.fit_pass(0), TrainingPrefix(passes.source, split), new_statistics()
        everything = Pipeline(plan, self._states, assign(None, None))
        rows = _fit_pass(passes, everything, work, statistics, joined=None, blocks=prefix)["train"]
        passes.meter.add(0, prefix.skipped_bytes)
        bounds = counted_bounds(split, passes, prefix.counts)
        last = prefix.last
        # The first lines were much shorter than the last: rows were observed that are for validation.
        if prefix.end << passes.item_bits > bounds.valid_from:
            rows, last, statistics = 0, None, new_statistics()
        pipeline, blocks = Pipeline(plan, self._states, assign(split, bounds)), passes.blocks(bounds.valid_from, last)
        rows += _fit_pass(passes, pipeline, work, statistics, joined=None, blocks=blocks)["train"]
        _check_training(rows)
        return statistics, {"bounds": bounds_to_data(bounds)}

    def _fit_table(self, step: int) -> tuple[Statistics, Result]:
        name, statistics = self._plan.operators[step].side_table, self._statistics.new([step])
        assert name is not None
        return statistics, fit_table(self._workflow, name, self._options, statistics[step])


def _fit_pass(
    passes: Passes,
    pipeline: Pipeline,
    work: Pass,
    statistics: Statistics,
    *,
    joined: JoinedRows | None,
    blocks: Iterable[RawBlock],
) -> dict[str, int]:
    """Show the training rows of some blocks to the `statistics` of a phase.

    Args:
        passes: The sources.
        pipeline: Steps of the workflow, with the states of earlier phases.
        work: Pass of this phase.
        statistics: Statistics of its steps.
        joined: Outputs of the grouped steps.
        blocks: Blocks to read.

    Returns:
        Split -> rows that were read.
    """

    def observe(read: ReadRows) -> tuple[dict[int, Any], NDArray[np.int64]]:
        def partials_of(rows: Rows) -> dict[int, Any]:
            return pipeline.run(work, rows, read.joined, statistics)[1] if rows.num_rows else {}

        rows = pipeline.preprocess(work, read)
        assert rows.split is not None
        counts = np.bincount(rows.split, minlength=len(SPLIT_NAMES))
        return read.invalid.filter(partials_of, rows.training())[0], counts

    rows = np.zeros(len(SPLIT_NAMES), dtype=np.int64)
    with closing(passes.map(observe, joined=joined, blocks=blocks)) as results:
        for partials, counts in results:
            # Merged in the order of the sources, so that results do not depend on the threads.
            for step, found in partials.items():
                statistics[step].merge(found)
            rows += counts
    return dict(zip(SPLIT_NAMES, rows.tolist(), strict=True))


def _check_training(rows: int) -> None:
    """Raise `FormatError` if there was no row for training."""
    if not rows:
        raise FormatError("sources", "got no row for training, expected at least one")


class _SpillingStatistics:
    """Statistics of the steps of a phase, in bounded memory.

    Args:
        plan: Plan of the workflow.
        directory: Directory for what does not fit in memory; created for each phase.
        memory_bytes: Bound of the memory of all statistics of a phase together.
    """

    def __init__(self, plan: Plan, directory: Path, memory_bytes: int) -> None:
        self._plan = plan
        self._directory = directory
        self._memory_bytes = memory_bytes

    def new(self, steps: Sequence[int]) -> Statistics:
        """Return empty statistics of `steps`."""
        shutil.rmtree(self._directory, ignore_errors=True)
        statistics: dict[int, Statistic] = {}
        for step in steps:
            directory = self._directory / str(step)
            directory.mkdir(parents=True)
            # In equal shares: how much a step needs is only known when its values have been counted.
            memory = SpillOptions(directory=directory, memory_bytes=self._memory_bytes // len(steps))
            statistics[step] = self._plan.operators[step].statistic(self._input_types(step), memory)
        return statistics

    def finish(self, statistics: Statistics) -> tuple[dict[int, State], list[str]]:
        """Return the states, and the names of the steps that did not fit in memory.

        Raises:
            StorageError: The disk is full, or a state does not fit in memory.
        """
        # Before `finish`, since sums remove each file once its groups are merged.
        spilled = [step for step in statistics if any((self._directory / str(step)).iterdir())]
        states = {step: statistic.finish() for step, statistic in statistics.items()}
        shutil.rmtree(self._directory)
        return states, [f"steps[{step}] {type(self._plan.spec.steps[step]).__name__}" for step in spilled]

    def _input_types(self, step: int) -> ColumnTypes:
        table = self._plan.operators[step].side_table
        types: ColumnTypes = self._plan.types[step]
        return types if table is None else source_types(self._plan.spec.tables[table])
