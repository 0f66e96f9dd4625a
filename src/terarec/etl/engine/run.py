"""One preparation, phase by phase."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from terarec.errors import FormatError
from terarec.etl.columns import SPLIT_NAMES
from terarec.etl.engine.bounds import bounds_from_data, bounds_to_data, find_bounds, needs_bounds
from terarec.etl.engine.counting_fit import CountingLook
from terarec.etl.engine.fit import check_training, fit_phase
from terarec.etl.engine.grouped import GroupedRows, partition_count, run_grouped
from terarec.etl.engine.learning import Learning, Look, Statistics
from terarec.etl.engine.learnt_states import LearntStates
from terarec.etl.engine.passes import Passes
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.positive_rows import PositiveRows, no_positives, training_values
from terarec.etl.engine.preparation import WORK, WORKFLOW
from terarec.etl.engine.rows_out import write_rows
from terarec.etl.engine.side_tables import observe_table, told
from terarec.etl.engine.splits import Bounds, RowBounds, assign
from terarec.etl.engine.steps import Steps
from terarec.etl.in_order import available_threads
from terarec.etl.ops import State
from terarec.etl.ops.lists import ITEM_BITS
from terarec.etl.sink import Sink, SinkOptions, create_sink
from terarec.etl.source import Source
from terarec.etl.workflow import Pass, Workflow
from terarec.formats.flush import flush_tree
from terarec.kernels import memory
from terarec.spec import DatasetSpec, PrepareOptions, SplitByFiles, SplitByFraction

_UNKNOWN_MEMORY = 8 << 30
_IN_MEMORY = 3
"""Rows take about so many times the bytes of their text; text of compressed files is estimated in turn."""


class Run:
    """The phases of one preparation on this machine; see `EngineRun`.

    Args:
        workflow: what to do.
        source: the rows.
        options: how.
        phases: knows what is done.
        directory: that becomes the data set, with `WORKFLOW` in it, and `WORK` until `finish`.

    Attributes:
        spilled: names of the steps that did not fit in memory while they learnt.
    """

    def __init__(
        self, workflow: Workflow, source: Source, options: PrepareOptions, phases: Phases, directory: Path
    ) -> None:
        self._work = directory / WORK
        self._work.mkdir(exist_ok=True)
        workflow.save(directory / WORKFLOW)  # states that phases learn are added to it
        self._phases = phases
        self.spilled: list[str] = []
        self._workflow = workflow
        self._options = options
        self._directory = directory
        self._memory = options.memory_bytes or (memory.available_bytes() or _UNKNOWN_MEMORY) // 2
        self._plan = workflow.plan
        self._kept = LearntStates(self._plan, directory / WORKFLOW)
        self._learning = Learning(self._plan, self._kept, self._work / "spill", self._memory // 2)
        self._states: dict[int, State] = dict(workflow.states)
        item_bits = ITEM_BITS if any(code.explodes for code in workflow.plan.codes) else 0
        self._passes = Passes(source, options.threads or available_threads(), phases.meter, item_bits)
        self._partitions = partition_count(self._estimated_bytes, self._memory)
        self._expected: dict[str, int] = {}
        phases.meter.total_bytes = self._passes.source.num_bytes * self._num_passes()

    def fit(self) -> Workflow:
        """The fitted workflow."""
        for step in self._plan.table_steps:
            self._learn(f"table {step}", [step], partial(self._look_at_table, step=step), 0)
        bounds = self._find_bounds()
        self._steps = Steps(self._plan, self._states, assign(self._workflow.spec.split, bounds))
        if self._plan.grouped_steps:
            grouped = self._phases.run("group", self._group, self._passes.source.num_bytes)
            self._partitions = grouped["partitions"]  # what an interrupted run made them of, whatever its memory
        until_row = bounds.valid_from if isinstance(bounds, RowBounds) else None
        self._expected = self._expected_rows(bounds)
        for number, phase in enumerate(self._plan.fit_phases):
            look = partial(self._look_at_rows, work=self._plan.fit_pass(number), until_row=until_row)
            self._learn(f"fit {number + 1}", phase, look, self._passes.source.num_bytes)
        return Workflow.of(self._workflow.spec, self._states)

    def write(self, spec: DatasetSpec, fitted: Workflow, location: Path) -> Result:
        """See `EngineRun`."""
        options, directory = self._options, self._directory
        sink_options = SinkOptions(
            storage=options.storage,
            rows_per_shard=options.rows_per_shard,
            seed=options.seed if options.shuffle else None,
            memory_bytes=self._memory // 2,
            estimated_bytes=self._estimated_bytes,
            expected=self._expected,
        )

        def write() -> Result:
            for split in SPLIT_NAMES:  # of a run that was killed in this phase
                shutil.rmtree(directory / split, ignore_errors=True)
            with create_sink(spec, directory, location, sink_options) as sink:
                rows, missing = self._write_rows(fitted, sink)
                sink.close()
            if not rows:
                raise FormatError("the sources hold no row that the workflow keeps, expected at least one")
            return {"rows": rows, "missing": missing, "bad_input": told(self._passes.source.bad_input)}

        return self._phases.run("write", write, self._passes.source.num_bytes)

    def finish(self) -> None:
        """See `EngineRun`."""
        shutil.rmtree(self._work)

    @property
    def _estimated_bytes(self) -> int:
        """About the bytes of all rows in memory."""
        return _IN_MEMORY * self._passes.source.text_bytes

    def _write_rows(self, fitted: Workflow, sink: Sink) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """What `write_rows` does and returns; where something is learnt, each label has to have a positive row."""
        work = self._plan.transform_pass()
        positives = PositiveRows(() if self._workflow.states else self._workflow.spec.labels)
        written = write_rows(
            self._passes,
            self._steps,
            fitted.encode_block,
            sink=sink,
            beside=self._beside(work),
            positives=positives,
        )
        label = positives.absent
        if label is not None and written[0]:
            raise no_positives(label, training_values(self._passes, self._steps, label.source, self._beside(work)))
        return written

    def _num_passes(self) -> int:
        fits = sum(not all(step in self._states for step in phase) for phase in self._plan.fit_phases)
        counts = needs_bounds(self._workflow.spec.split) and not self._learns_while_counting
        return counts + bool(self._plan.grouped_steps) + fits + 1

    @property
    def _learns_while_counting(self) -> bool:
        """Whether rows are counted in the pass that fits the first steps."""
        plan, split = self._plan, self._workflow.spec.split
        learns = bool(plan.fit_phases) and not all(step in self._states for step in plan.fit_phases[0])
        is_by_rows = isinstance(split, SplitByFraction | SplitByFiles)
        return is_by_rows and learns and not plan.grouped_steps and self._passes.source.is_text

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
        if self._learns_while_counting:
            assert isinstance(split, SplitByFraction | SplitByFiles)
            look = CountingLook(self._passes, self._plan, self._states, split)
            learnt = self._learn("fit 1", self._plan.fit_phases[0], look, self._passes.source.num_bytes)
            return bounds_from_data(learnt["bounds"])
        enter = partial(Steps(self._plan, self._states, assign(None, None)).enter, self._plan.row_pass())

        def count() -> Result:
            return bounds_to_data(find_bounds(split, self._passes, enter, self._work))

        return bounds_from_data(self._phases.run("split", count, self._passes.source.num_bytes))

    def _group(self) -> Result:
        run_grouped(self._passes, self._steps, self._work, self._partitions)
        flush_tree(self._work)  # the journal must not outlive what it promises
        return {"partitions": self._partitions}

    def _beside(self, work: Pass) -> GroupedRows | None:
        return GroupedRows(self._work, work.grouped, self._partitions) if work.grouped else None

    def _learn(self, name: str, steps: Sequence[int], look: Look, num_bytes: int) -> Result:
        """Fit `steps`, unless they are, in a phase of this `name`; its result."""
        if all(step in self._states for step in steps):
            return {}
        result = self._phases.run(name, lambda: self._learning.learn(steps, look), num_bytes)
        self.spilled += result["spilled"]
        self._expected.update(result["rows"])
        self._states.update({step: self._kept.state(step) for step in steps})
        return result

    def _look_at_rows(self, statistics: Statistics, work: Pass, until_row: int | None) -> Result:
        beside, blocks = self._beside(work), self._passes.blocks(until_row)
        rows = fit_phase(self._passes, self._steps, work, statistics, beside=beside, blocks=blocks)
        check_training(rows["train"])
        return {"rows": rows if until_row is None else {}}

    def _look_at_table(self, statistics: Statistics, step: int) -> Result:
        name = self._plan.codes[step].side_table
        assert name is not None
        return {"rows": {}, **observe_table(self._workflow, name, self._options, statistics[step])}
