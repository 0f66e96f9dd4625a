"""Fit phases: one pass over the training rows, in which all steps of the phase collect statistics."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import SPLIT_NAMES, Rows
from terarec.etl.engine.passes import JoinedRows, Passes, Pipeline, ReadRows
from terarec.etl.engine.split import RowBounds, assign, counted_bounds
from terarec.etl.ops import ColumnTypes, SpillOptions, State, Statistic
from terarec.etl.source import FAULTS_SHOWN, BadInputReport, RawBlock, Source, open_source
from terarec.etl.workflow import Pass, Plan, Workflow, source_types
from terarec.etl.workflow.workflow import STATES, state_name
from terarec.spec import PrepareOptions, SplitByFiles, SplitByFraction

Statistics: TypeAlias = Mapping[int, Statistic]
"""Position of a step -> its statistic."""

_HOLDBACK_FRACTION = 0.05
"""Share of the training text that waits until the rows are counted. Should the first lines be so much shorter than the
last ones that rows beyond the training part were observed, the pass is done again."""


def fit_pass(
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
            for step, partial in partials.items():
                statistics[step].merge(partial)
            rows += counts
    return dict(zip(SPLIT_NAMES, rows.tolist(), strict=True))


def check_training(rows: int) -> None:
    """Raise `FormatError` if there was no row for training."""
    if not rows:
        raise FormatError("sources", "got no row for training, expected at least one")


def fit_while_counting(
    passes: Passes,
    plan: Plan,
    states: dict[int, State],
    split: SplitByFiles | SplitByFraction,
    new_statistics: Callable[[], Statistics],
) -> tuple[Statistics, RowBounds]:
    """Fit the first phase in the pass that counts the rows of text files.

    Rows that are for training however many follow are observed while the rest is read and counted, the others after.

    Args:
        passes: The sources.
        plan: Plan of a workflow without grouped steps.
        states: Fitted states so far.
        split: Split by position, whose bounds depend on the counts.
        new_statistics: Function that returns empty statistics of the first phase.

    Returns:
        Statistics of all training rows, and the bounds.

    Raises:
        ConfigError, FormatError: Nothing is left for training.
    """
    work, prefix, statistics = plan.fit_pass(0), _TrainingPrefix(passes.source, split), new_statistics()
    everything = Pipeline(plan, states, assign(None, None))
    rows = fit_pass(passes, everything, work, statistics, joined=None, blocks=prefix)["train"]
    passes.meter.add(0, prefix.skipped_bytes)
    bounds = counted_bounds(split, passes, prefix.counts)
    last = prefix.last
    # The first lines were much shorter than the last: rows were observed that are for validation.
    if prefix.end << passes.item_bits > bounds.valid_from:
        rows, last, statistics = 0, None, new_statistics()
    pipeline, blocks = Pipeline(plan, states, assign(split, bounds)), passes.blocks(bounds.valid_from, last)
    rows += fit_pass(passes, pipeline, work, statistics, joined=None, blocks=blocks)["train"]
    check_training(rows)
    return statistics, bounds


class _TrainingPrefix:
    """Blocks that are surely for training; iterating reads the source to its end and counts all rows.

    Attributes:
        counts: Rows of each file.
        last: Last block that was yielded.
        end: Rows up to its end.
        skipped_bytes: Bytes of the blocks that were not yielded.
    """

    def __init__(self, source: Source, split: SplitByFiles | SplitByFraction) -> None:
        self.counts = [0] * len(source.files)
        self.last: RawBlock | None = None
        self.end = self.skipped_bytes = 0
        self._source = source
        self._split = split

    def __iter__(self) -> Iterator[RawBlock]:
        read = 0
        for raw in self._source.raw_blocks():
            self.counts[raw.file] += raw.num_rows
            read += raw.read_bytes
            if self._is_training(raw, read):
                self.last, self.end = raw, raw.first_row + raw.num_rows
                yield raw
            else:
                self.skipped_bytes += raw.read_bytes

    def _is_training(self, raw: RawBlock, read: int) -> bool:
        split, files, training = self._split, self._source.files, 1.0
        if isinstance(split, SplitByFiles):
            files = files[: len(files) - split.valid - split.test]
            # Whole files are for training: no count can change that.
            if not split.valid_fraction:
                return raw.file < len(files)
            training -= split.valid_fraction
        else:
            training -= split.valid + split.test
        return read <= (1 - _HOLDBACK_FRACTION) * training * sum(file.bytes for file in files)


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


class SpillingStatistics:
    """Statistics of the steps of a phase, in bounded memory.

    Args:
        plan: Plan of the workflow.
        directory: Directory for what does not fit in memory; made anew for each phase.
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
