# SPDX-License-Identifier: Apache-2.0
"""The single-machine engine: fits a workflow on the training part of logs, and writes the data set of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES, Rows
from terarec.etl.engine.grouped import GroupedRows, list_rows, partition_count, run_grouped
from terarec.etl.engine.passes import JoinedRows, Passes, Pipeline, ReadRows
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.report import add_bad_input, bad_input_to_json
from terarec.etl.engine.run import EngineRun, Statistics
from terarec.etl.engine.split import (
    RowBounds,
    TrainingPrefix,
    assign,
    bounds_from_data,
    bounds_to_data,
    check_splits,
    counted_bounds,
    find_bounds,
    needs_bounds,
    time_range,
)
from terarec.etl.engine.write import (
    PositiveRows,
    SinkOptions,
    WriteCheckpoints,
    create_sink,
    no_positives,
    rows_of_files,
    training_values,
    write_rows,
)
from terarec.etl.ops.sequences import ITEM_BITS
from terarec.etl.sink import PartOptions, closed_files
from terarec.etl.source.blocks import RawBlock
from terarec.etl.source.source import Source
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import Pass
from terarec.io.files import flush_tree
from terarec.io.removal import remove_tree
from terarec.parallel import available_threads
from terarec.spec import DatasetSpec, LeaveOneOut, PrepareOptions, SplitByFiles, SplitByFraction

BYTES_PER_TEXT_BYTE = 3
"""Rows take about this multiple of the bytes of their text in memory; text of compressed files is estimated in turn."""


def _keep_files(directory: Path, kept: set[Path]) -> None:
    """Remove the files of a run that was killed in the write phase from `directory`, except complete shards."""
    if not any(path.parent == directory for path in kept):
        remove_tree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path not in kept:
            path.unlink()


class LocalRun(EngineRun):
    """The phases of one preparation on this machine; see `EngineRun`."""

    def __init__(
        self, workflow: Workflow, source: Source, options: PrepareOptions, phases: Phases, directory: Path
    ) -> None:
        super().__init__(workflow, source, options, phases, directory)
        item_bits = ITEM_BITS if any(code.explodes for code in self._plan.operators) else 0
        self._passes = Passes(source, options.threads or available_threads(), phases.meter, item_bits)
        self._estimated_bytes = BYTES_PER_TEXT_BYTE * source.text_bytes
        self._partitions = 0
        # Counting takes a pass of its own, unless the first fit counts.
        counts = needs_bounds(workflow.spec.split) and not self._fits_while_counting
        num_passes = counts + bool(self._plan.grouped_steps) + self._num_fits + 1
        phases.meter.total_bytes = source.num_bytes * num_passes

    @override
    def write(self, spec: DatasetSpec, location: Path) -> Result:
        options, pipeline = self._options, self._pipeline()
        checkpoints = WriteCheckpoints(self._work / "written.json", self._source)
        sink_options = SinkOptions(
            storage=options.storage,
            rows_per_shard=options.rows_per_shard,
            seed=options.seed if options.shuffle else None,
            memory_bytes=self._memory // 2,
            estimated_bytes=self._estimated_bytes,
            expected=self._expected_rows(),
            begin=checkpoints.state,
            parts=PartOptions(count=options.parts, keysets=options.keysets),
        )
        work = self._plan.transform_pass()
        # A fitted workflow trains nothing here: its rows need no positive label.
        labels = () if self._workflow.states else self._workflow.spec.labels
        positives = PositiveRows(labels, checkpoints.absent)
        fitted = Workflow.of(self._workflow.spec, self._states)

        def write() -> Result:
            kept = closed_files(self._directory, spec, options.storage, checkpoints.state.closed)
            for split in SPLIT_NAMES:
                _keep_files(self._directory / split, kept)
            outputs = self._joined(work)
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
                label, rows, files = positives.absent, dict(totals.rows), totals.files
                if label is not None and rows:
                    # Another pass over the rows, only for the error, which names what the label holds.
                    values = training_values(self._passes, pipeline, label.source, self._joined(work))
                    raise no_positives(label, values)
                if rows and options.empty_splits == "raise":
                    check_splits(self._workflow.spec.split, rows, partial(self._time_range, pipeline), options.limit)
                # After each shard: with a shuffle nearly all of them are written only now.
                for _ in sink.finish():
                    checkpoints.save(sink, positives, at_end=True)
                sink.close()
            if not rows:
                raise FormatError("sources", "got no row that the workflow keeps, expected at least one")
            missing = {name: (totals.missing[name], count) for name, count in totals.values.items()}
            bad_input = add_bad_input([checkpoints.bad_input, bad_input_to_json(self._source.bad_input)])
            counts = rows_of_files(files, len(self._source.files))
            return {"rows": rows, "files": counts, "missing": missing, "bad_input": bad_input}

        return self._phase("write", write, 1)

    def _expected_rows(self) -> dict[str, int]:
        """Return the rows of each split, where a phase has counted them."""
        bounds, rows = self._bounds, dict[str, int]()
        # Steps that drop or add rows would make these numbers wrong.
        if isinstance(bounds, RowBounds) and not any(code.stage == "rows" for code in self._plan.operators):
            valid, test = bounds.test_from - bounds.valid_from, bounds.end - bounds.test_from
            rows = {"train": bounds.valid_from, "valid": valid, "test": test}
        for result in self._phases.results:
            rows.update(result.get("rows", {}))
        return rows

    def _time_range(self, pipeline: Pipeline, column: str) -> tuple[float, float]:
        """Return the least and the last time of a column, by another pass: only an error shows them."""
        work = self._plan.row_pass()
        with closing(
            self._passes.map(lambda read: time_range(pipeline.preprocess(work, read).columns[column]))
        ) as times:
            firsts, lasts = zip(*times, strict=True)
        return min(firsts), max(lasts)

    @property
    def _fits_while_counting(self) -> bool:
        """Whether rows are counted in the pass that fits the first steps."""
        plan, split = self._plan, self._workflow.spec.split
        fits = bool(plan.fit_phases) and not self._is_fitted(plan.fit_phases[0])
        # Other formats than text say how many rows they have.
        # With a limit the share of the bytes that were read says nothing about the share of the rows.
        is_by_rows = isinstance(split, SplitByFraction | SplitByFiles)
        return is_by_rows and fits and not plan.grouped_steps and self._source.is_text and self._source.limit is None

    @override
    def _split_rows(self) -> None:
        split = self._workflow.spec.split
        if split is None or not needs_bounds(split):
            return
        if self._fits_while_counting:
            assert isinstance(split, SplitByFraction | SplitByFiles)
            counted = self._fit_phase("fit 1", self._plan.fit_phases[0], partial(self._fit_while_counting, split), 1)
            self._bounds = bounds_from_data(counted["bounds"])
        else:
            # Before there are bounds, all rows count as those of one split.
            everything = Pipeline(self._plan, self._states, assign(None, None))
            preprocess = partial(everything.preprocess, self._plan.row_pass())
            if isinstance(split, LeaveOneOut):
                partitions = partition_count(self._estimated_bytes, self._memory)
                self._bounds = self._list_phase(partial(list_rows, self._passes, preprocess, split, partitions))
                return
            self._bounds = self._split_phase(
                lambda: find_bounds(split, self._passes, preprocess, self._work, self._options.empty_splits)
            )

    @override
    def _run_grouped_steps(self) -> None:
        grouped = self._phase("group", self._group, 1)
        self._partitions = grouped["partitions"]  # of an interrupted run, which may have had another memory bound

    def _group(self) -> Result:
        earlier = self._earlier.rows
        earlier_bytes = 0 if earlier is None else BYTES_PER_TEXT_BYTE * earlier.num_bytes
        partitions = partition_count(self._estimated_bytes + earlier_bytes, self._memory)
        late = run_grouped(self._passes, self._pipeline(), self._work, partitions, self._earlier)
        flush_tree(self._work)  # the journal must not outlive what it promises
        return {"partitions": partitions, "earlier_rows": self._earlier.num_rows(self._plan), "late_rows": late}

    def _pipeline(self) -> Pipeline:
        return Pipeline(self._plan, self._states, assign(self._workflow.spec.split, self._bounds))

    def _joined(self, work: Pass) -> GroupedRows | None:
        """Open the outputs of the grouped steps that a pass needs."""
        return GroupedRows(self._work, work.grouped, self._partitions) if work.grouped else None

    @override
    def _fit_rows(self, number: int) -> Result:
        work, statistics = self._plan.fit_pass(number), self._statistics.new(self._plan.fit_phases[number])
        blocks, joined = self._passes.blocks(self._until_row), self._joined(work)
        rows = _fit_pass(self._passes, self._pipeline(), work, statistics, joined=joined, blocks=blocks)
        _check_training(rows["train"])
        # A pass that ends with the training rows has counted no others.
        return {"rows": rows if self._until_row is None else {}, **self._save(statistics)}

    def _fit_while_counting(self, split: SplitByFraction | SplitByFiles) -> Result:
        """Fit the first phase in the pass that counts the rows of text files; see `_fits_while_counting`.

        The first rows, which are for training whatever the number of all rows is, are observed in this pass, the other
        training rows after it.
        """
        passes, plan = self._passes, self._plan
        new_statistics = partial(self._statistics.new, plan.fit_phases[0])
        work, prefix, statistics = plan.fit_pass(0), TrainingPrefix(passes.source, split), new_statistics()
        everything = Pipeline(plan, self._states, assign(None, None))
        rows = _fit_pass(passes, everything, work, statistics, joined=None, blocks=prefix)["train"]
        # Blocks behind the prefix were read, too, to count their rows.
        passes.meter.add(0, prefix.skipped_bytes)
        bounds = counted_bounds(split, passes, prefix.counts)
        last = prefix.last
        # The first lines were much shorter than the last: rows were observed that are for validation.
        if prefix.end << passes.item_bits > bounds.valid_from:
            rows, last, statistics = 0, None, new_statistics()
        pipeline, blocks = Pipeline(plan, self._states, assign(split, bounds)), passes.blocks(bounds.valid_from, last)
        rows += _fit_pass(passes, pipeline, work, statistics, joined=None, blocks=blocks)["train"]
        _check_training(rows)
        return {"bounds": bounds_to_data(bounds), **self._save(statistics)}


def _fit_pass(
    passes: Passes,
    pipeline: Pipeline,
    work: Pass,
    statistics: Statistics,
    *,
    joined: JoinedRows | None,
    blocks: Iterable[RawBlock],
) -> dict[str, int]:
    """Show the training rows of some blocks to the `statistics` of a phase; return split -> rows that were read."""

    def observe(read: ReadRows) -> tuple[dict[int, Any], NDArray[np.int64]]:
        def partials_of(rows: Rows) -> dict[int, Any]:
            # A block of other splits has nothing to observe.
            return pipeline.run(work, rows, read.joined, statistics)[1] if rows.num_rows else {}

        rows = pipeline.preprocess(work, read)
        assert rows.split is not None
        counts = np.bincount(rows.split, minlength=len(SPLIT_NAMES))
        return read.invalid.filter(partials_of, rows.training())[0], counts

    rows = np.zeros(len(SPLIT_NAMES), dtype=np.int64)
    with closing(passes.map(observe, joined=joined, blocks=blocks)) as results:
        for partials, counts in results:
            # Merged in the order of the sources, so that results do not depend on the threads.
            for step, states in partials.items():
                statistics[step].merge(states)
            rows += counts
    return dict(zip(SPLIT_NAMES, rows.tolist(), strict=True))


def _check_training(rows: int) -> None:
    """Raise `FormatError` if there was no row for training."""
    if not rows:
        raise FormatError("sources", "got no row for training, expected at least one")
