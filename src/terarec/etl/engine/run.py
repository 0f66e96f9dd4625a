"""One preparation, phase by phase."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import SPLIT_NAMES, Block
from terarec.etl.engine.bounds import bounds_from_data, bounds_to_data, find_bounds, needs_bounds
from terarec.etl.engine.fit import fit_phase
from terarec.etl.engine.grouped import GroupedRows, partition_count, run_grouped
from terarec.etl.engine.learning import Learning, Look, Statistics
from terarec.etl.engine.options import PrepareOptions
from terarec.etl.engine.passes import Passes
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.rows_out import write_rows
from terarec.etl.engine.splits import Bounds, RowBounds, assign
from terarec.etl.engine.steps import Steps
from terarec.etl.generated import read_best_auc
from terarec.etl.in_order import available_threads
from terarec.etl.operators import State
from terarec.etl.sink import SinkOptions, create_sink
from terarec.etl.source import Source, open_source
from terarec.etl.workflow import Pass, Workflow, run_row_steps
from terarec.kernels import memory
from terarec.spec import Explode

WORK = "work"
"""Directory of what phases hand on through the disk."""
WORKFLOW = "workflow"
"""Directory of the fitted workflow in a data set."""
ITEM_BITS = 16
_UNKNOWN_MEMORY = 8 << 30
_IN_MEMORY = 3
"""Rows take about so many times the bytes of their text; text of compressed files is estimated in turn."""


class Run:
    """The phases of one preparation, each of which is done unless it is done already.

    Args:
        workflow: what to do.
        source: the rows.
        options: how.
        phases: knows what is done.
        directory: that becomes the data set, with `WORKFLOW` in it, and `WORK` until `finish`.

    Attributes:
        phases: as given.
        options: as given.
        input_bytes: size of the source files.
        best_auc: best reachable AUC, if the sources were generated and say so.
        spilled: names of the steps that did not fit in memory while they learnt.
    """

    def __init__(
        self, workflow: Workflow, source: Source, options: PrepareOptions, phases: Phases, directory: Path
    ) -> None:
        self._work = directory / WORK
        self._work.mkdir(exist_ok=True)
        workflow.save(directory / WORKFLOW)  # states that phases learn are added to it
        self.phases = phases
        self.input_bytes = sum(file.bytes for file in source.files)
        self.best_auc = read_best_auc([file.path for file in source.files])
        self.spilled: list[str] = []
        self._workflow = workflow
        self.options = options
        self._directory = directory
        self._memory = options.memory_bytes or (memory.available_bytes() or _UNKNOWN_MEMORY) // 2
        self._plan = workflow.plan
        self._learning = Learning(self._plan, directory / WORKFLOW, self._work / "spill", self._memory // 2)
        self._states: dict[int, State] = dict(workflow.states)
        item_bits = ITEM_BITS if any(isinstance(step, Explode) for step in workflow.spec.steps) else 0
        self._passes = Passes(source, options.threads or available_threads(), phases.meter, item_bits)
        self._partitions = partition_count(self._estimated_bytes, self._memory)
        self._expected: dict[str, int] = {}
        phases.meter.total_bytes = self.input_bytes * self._num_passes()

    def fit(self) -> Workflow:
        """The fitted workflow."""
        for step in self._plan.table_steps:
            self._learn(f"table {step}", [step], partial(self._look_at_table, step=step), 0)
        bounds = self._find_bounds()
        self._steps = Steps(self._plan, self._states, assign(self._workflow.spec.split, bounds))
        if self._plan.grouped_steps:
            grouped = self.phases.run("group", self._group, self.input_bytes)
            self._partitions = grouped["partitions"]  # what an interrupted run made them of, whatever its memory
        until_row = bounds.valid_from if isinstance(bounds, RowBounds) else None
        self._expected = self._expected_rows(bounds)
        for number, phase in enumerate(self._plan.fit_phases):
            look = partial(self._look_at_rows, work=self._plan.fit_pass(number), until_row=until_row)
            self._learn(f"fit {number + 1}", phase, look, self.input_bytes)
        return Workflow.of(self._workflow.spec, self._states)

    def write(self, fitted: Workflow, location: Path) -> Result:
        """Write all rows into the directory, which will lie at `location`.

        Returns:
            "rows": split -> rows; "missing": column of the sources -> its missing and all values; "bad_input": "counts"
            of each kind, and the "first" faults.
        """
        options, directory = self.options, self._directory
        sink_options = SinkOptions(
            storage=options.storage,
            rows_per_shard=options.rows_per_shard,
            seed=options.seed if options.shuffle else None,
            memory_bytes=self._memory // 2,
            estimated_bytes=self._estimated_bytes,
            expected=self._expected,
        )
        described = fitted.dataset_spec("raw" if options.storage == "raw" else "parquet")
        spec = dataclasses.replace(described, best_auc=self.best_auc)

        def write() -> Result:
            for split in SPLIT_NAMES:  # of a run that was killed in this phase
                shutil.rmtree(directory / split, ignore_errors=True)
            with create_sink(spec, directory, location, sink_options) as sink:
                beside = self._beside(self._plan.transform_pass())
                rows, missing = write_rows(self._passes, self._steps, fitted.encode_block, sink=sink, beside=beside)
                sink.close()
            if not rows:
                raise FormatError("the sources hold no row that the workflow keeps, expected at least one")
            found = self._passes.source.bad_input
            bad_input = {"counts": dict(found.counts), "first": [str(fault) for fault in found.first]}
            return {"rows": rows, "missing": missing, "bad_input": bad_input}

        return self.phases.run("write", write, self.input_bytes)

    def finish(self) -> None:
        """Remove what phases handed on."""
        shutil.rmtree(self._work)

    @property
    def _estimated_bytes(self) -> int:
        """About the bytes of all rows in memory."""
        return _IN_MEMORY * self._passes.source.text_bytes

    def _num_passes(self) -> int:
        fits = sum(not all(step in self._states for step in phase) for phase in self._plan.fit_phases)
        return needs_bounds(self._workflow.spec.split) + bool(self._plan.grouped_steps) + fits + 1

    def _expected_rows(self, bounds: Bounds | None) -> dict[str, int]:
        """Rows of each split, as far as positions tell them."""
        if not isinstance(bounds, RowBounds) or any(code.stage == "rows" for code in self._plan.codes):
            return {}
        valid, test = bounds.test_from - bounds.valid_from, bounds.end - bounds.test_from
        return {"train": bounds.valid_from, "valid": valid, "test": test}

    def _find_bounds(self) -> Bounds | None:
        split = self._workflow.spec.split
        if split is None or not needs_bounds(split):
            return None
        work = self._plan.row_pass()

        def enter(block: Block) -> Block:
            return run_row_steps(self._plan, work, block, self._states)

        def count() -> Result:
            return bounds_to_data(find_bounds(split, self._passes, enter, self._work))

        return bounds_from_data(self.phases.run("split", count, self.input_bytes))

    def _group(self) -> Result:
        run_grouped(self._passes, self._steps, self._work, self._partitions)
        return {"partitions": self._partitions}

    def _beside(self, work: Pass) -> GroupedRows | None:
        return GroupedRows(self._work, work.grouped, self._partitions) if work.grouped else None

    def _learn(self, name: str, steps: Sequence[int], look: Look, num_bytes: int) -> None:
        """Fit `steps`, unless they are, in a phase of this `name`."""
        if all(step in self._states for step in steps):
            return
        result = self.phases.run(name, lambda: self._learning.learn(steps, look), num_bytes)
        self.spilled += result["spilled"]
        self._expected.update(result["rows"])
        self._states.update({step: self._learning.state(step) for step in steps})

    def _look_at_rows(self, statistics: Statistics, work: Pass, until_row: int | None) -> dict[str, int]:
        beside = self._beside(work)
        rows = fit_phase(self._passes, self._steps, work, statistics, beside=beside, until_row=until_row)
        if not rows["train"]:
            raise FormatError("the sources hold no row for training, expected at least one")
        return rows if until_row is None else {}

    def _look_at_table(self, statistics: Statistics, step: int) -> dict[str, int]:
        name = self._plan.codes[step].table
        assert name is not None
        if name not in self.options.tables:
            raise ConfigError(f"side table {name!r}: no file, expected --table {name}=PATH")
        spec = self._workflow.spec.tables[name]
        source = open_source(spec, self.options.tables[name], self.options.bad_input, self.options.threads)
        for block in source.blocks():
            statistics[step].merge(statistics[step].observe(block))
        return {}
