# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a preparation, which all engines share: its phases, the states that they fit, and their files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from terarec.errors import ConfigError
from terarec.etl.engine.grouped import EarlierOptions
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.report import bad_input_to_json
from terarec.etl.engine.split import Bounds, ListedRows, RowBounds, TimeBounds, bounds_from_data, bounds_to_data
from terarec.etl.ops import State
from terarec.etl.ops.base import ColumnTypes
from terarec.etl.ops.states import SpillOptions, Statistic
from terarec.etl.source.source import Source, open_source
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.earlier_rows import open_earlier_rows
from terarec.etl.workflow.plan import Plan, source_types
from terarec.etl.workflow.transform import WORKFLOW_DIRECTORY
from terarec.etl.workflow.workflow import save_states, state_name
from terarec.formats.dataset import EARLIER_ROWS, STATES, WORKFLOW_FILE
from terarec.io.files import flush_tree
from terarec.io.removal import remove_tree, work_directory
from terarec.kernels import memory
from terarec.spec import DatasetSpec, PrepareOptions

WORK = "work"
"""Directory of what phases pass on through the disk."""
Statistics: TypeAlias = Mapping[int, Statistic]
"""Position of a step -> its statistic."""
_UNKNOWN_MEMORY = 8 << 30
"""Free memory where the system does not say."""


class EngineRun(ABC):
    """The phases of one preparation: `fit`, then `write`, then `finish`. Complete ones are not run again.

    It saves the workflow, and the states that its steps are fitted to, in `WORKFLOW_DIRECTORY` of its directory.

    Args:
        workflow: Workflow to fit, unless it is fitted, and to transform rows with.
        source: Rows.
        options: Options of the preparation.
        phases: Runs each phase unless it is done.
        directory: Directory that becomes the data set, with `WORKFLOW_DIRECTORY` in it, and `WORK` until `finish`.
    """

    def __init__(
        self, workflow: Workflow, source: Source, options: PrepareOptions, phases: Phases, directory: Path
    ) -> None:
        self._work = directory / WORK
        self._work.mkdir(exist_ok=True)
        saved = directory / WORKFLOW_DIRECTORY
        # States that phases fit are added to those of an interrupted run, and the rows that grouped steps keep.
        save_states(workflow.plan, workflow.states, saved)
        workflow.to_json(saved / WORKFLOW_FILE)
        self._workflow = workflow
        self._plan = workflow.plan
        self._source = source
        self._options = options
        self._phases = phases
        self._directory = directory
        self._memory = options.memory_bytes or (memory.available_bytes() or _UNKNOWN_MEMORY) // 2
        self._earlier = EarlierOptions(
            rows=open_earlier_rows(workflow.plan, workflow.earlier_rows, options.earlier_rows),
            late_rows=options.late_rows,
            out=saved / EARLIER_ROWS,
        )
        self._states: dict[int, State] = dict(workflow.states)
        self._store = StateStore(self._plan, saved)
        self._statistics = _SpillingStatistics(self._plan, self._work / "spill", self._memory // 2)
        self._bounds: Bounds | None = None

    def fit(self) -> Workflow:
        """Return the fitted workflow."""
        # First: steps that choose rows, on which the bounds of the split depend, may read a side table.
        for step in self._plan.table_steps:
            # It reads nothing of the sources, whose bytes are what progress is measured by.
            self._fit_phase(f"table {step}", [step], partial(self._fit_table, step), 0)
        self._split_rows()
        if self._plan.grouped_steps:
            self._run_grouped_steps()
        for number, steps in enumerate(self._plan.fit_phases):
            self._fit_phase(f"fit {number + 1}", steps, partial(self._fit_rows, number), 1)
        return Workflow.of(self._workflow.spec, self._states)

    @abstractmethod
    def write(self, spec: DatasetSpec, location: Path) -> Result:
        """Write all rows, by the states that `fit` has fitted, into the directory of the run.

        Returns:
            "rows": split -> rows; "files": for each file split -> rows; "missing": column of the sources -> its missing
            and all values; "bad_input": "counts" of each kind, and the "first" faults.
        """

    def finish(self) -> None:
        """Remove the temporary files of the phases."""
        remove_tree(self._work)

    @abstractmethod
    def _split_rows(self) -> None:
        """Set `_bounds` where the split needs them, by a phase that may fit the first steps as well."""

    @abstractmethod
    def _run_grouped_steps(self) -> None:
        """Compute the outputs of the steps that look at other rows, for the phases that follow."""

    @abstractmethod
    def _fit_rows(self, number: int) -> Result:
        """Fit the steps of phase `number` of the plan on the training rows, and save their states."""

    def _fit_table(self, step: int) -> Result:
        """Fit a step on its side table, which is small, and save its state."""
        name, statistics = self._plan.operators[step].side_table, self._statistics.new([step])
        assert name is not None
        return fit_table(self._workflow, name, self._options, statistics[step]) | self._save(statistics)

    def _save(self, statistics: Statistics) -> Result:
        """Save the states of a phase; return "spilled": the steps that did not fit in memory, for the report."""
        states, spilled = self._statistics.finish(statistics)
        self._store.save(states)
        return {"spilled": spilled}

    def _fit_phase(self, name: str, steps: Sequence[int], work: Callable[[], Result], passes: int) -> Result:
        """Fit `steps`, unless they are, in a phase of this `name`, whose `work` saves their states."""
        # The workflow came with their states, which rows of later files must not change.
        if self._is_fitted(steps):
            return {}
        result = self._phase(name, work, passes)
        self._states.update({step: self._store.state(step) for step in steps})
        return result

    def _split_phase(self, find: Callable[[], RowBounds | TimeBounds]) -> Bounds:
        """Return the bounds that `find` counts in a phase of its own."""
        return bounds_from_data(self._phase("split", lambda: bounds_to_data(find()), 1))

    def _list_phase(self, find: Callable[[Path], None]) -> Bounds:
        """Return the splits of the rows that `find` lists in a file, in a phase of its own."""
        path = self._work / "listed"

        def work() -> Result:
            find(path)
            flush_tree(self._work)  # the journal must not outlive what it promises
            return {}

        self._phase("split", work, 1)
        return ListedRows(path=path)

    def _phase(self, name: str, work: Callable[[], Result], passes: int) -> Result:
        """Return the result of phase `name`, which reads all rows about `passes` times."""
        return self._phases.run(name, work, passes * self._source.num_bytes)

    def _is_fitted(self, steps: Sequence[int]) -> bool:
        return all(step in self._states for step in steps)

    @property
    def _num_fits(self) -> int:
        """Number of the phases that fit steps on rows."""
        return sum(not self._is_fitted(steps) for steps in self._plan.fit_phases)

    @property
    def _until_row(self) -> int | None:
        """Id of the first row that is not for training; None where it is not known."""
        # Only where a split goes by position do the training rows come first.
        return self._bounds.valid_from if isinstance(self._bounds, RowBounds) else None


StartRun: TypeAlias = Callable[[Workflow, Source, PrepareOptions, Phases, Path], EngineRun]
"""Makes the run of a workflow over a source, in a directory that becomes the data set."""


class StateStore:
    """Fitted states, in the files of the saved workflow, so that they survive a kill."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self._states: dict[int, State] = {}

    def save(self, states: Mapping[int, State]) -> None:
        """Save the states of these steps on the disk."""
        save_states(self._plan, states, self._directory)
        self._states.update(states)

    def state(self, step: int) -> State:
        """Return the state of a step that this run fitted, or an interrupted one."""
        if step in self._states:
            return self._states[step]
        # Fitted by an interrupted run: its state is on the disk alone.
        return self._plan.operators[step].load_state(self._directory / STATES, state_name(self._plan, step))


class _SpillingStatistics:
    """Statistics of the steps of a phase, in bounded memory."""

    def __init__(self, plan: Plan, directory: Path, memory_bytes: int) -> None:
        self._plan = plan
        self._directory = directory
        self._memory_bytes = memory_bytes

    def new(self, steps: Sequence[int]) -> Statistics:
        """Return empty statistics of `steps`."""
        work_directory(self._directory)
        statistics: dict[int, Statistic] = {}
        for step in steps:
            directory = self._directory / str(step)
            directory.mkdir()
            # In equal shares: how much a step needs is only known when its values have been counted.
            memory = SpillOptions(directory=directory, memory_bytes=self._memory_bytes // len(steps))
            statistics[step] = self._plan.operators[step].statistic(self._input_types(step), memory)
        return statistics

    def finish(self, statistics: Statistics) -> tuple[dict[int, State], list[str]]:
        """Return the states, and the names of the steps that did not fit in memory."""
        # Before `finish`, since sums remove each file once its groups are merged.
        spilled = [step for step in statistics if any((self._directory / str(step)).iterdir())]
        states = {step: statistic.finish() for step, statistic in statistics.items()}
        remove_tree(self._directory)
        return states, [f"steps[{step}] {type(self._plan.spec.steps[step]).__name__}" for step in spilled]

    def _input_types(self, step: int) -> ColumnTypes:
        table = self._plan.operators[step].side_table
        types: ColumnTypes = self._plan.types[step]
        return types if table is None else source_types(self._plan.spec.tables[table])


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
