# SPDX-License-Identifier: Apache-2.0
"""A feature workflow: its definition, its fitted state, its files, and its transform of rows. See docs/workflows.md.

A workflow is saved as ``workflow.json`` and ``states/``. A step may name a function, which gets rows: a workflow from
another party could run any code. So only the functions of the presets are accepted as they are, and others
where the caller allows their package. A workflow that is made in Python names what its author could call anyway, and is
not checked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, Rows, concatenate_rows
from terarec.etl.ops import Operator, State
from terarec.etl.ops.base import operators
from terarec.etl.ops.user_steps import run_step
from terarec.etl.source.source import open_source
from terarec.etl.workflow.earlier_rows import copy_earlier_rows
from terarec.etl.workflow.plan import Plan, plan
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.serving import EncodedRecords, RecordEncoder, check_record
from terarec.etl.workflow.transform import column_block, data_set, state_of, with_metadata
from terarec.formats.block import ColumnBlock
from terarec.formats.dataset import EARLIER_ROWS, STATES, WORKFLOW_ENTRIES, WORKFLOW_FILE
from terarec.formats.frames import Frame, as_table, is_frame
from terarec.io.directories import ensure_parents, rewrite_error_paths
from terarec.io.exchange import LOCK_FILE, end_exchange, exchange, is_begun
from terarec.io.files import check_new_file, flush, flush_tree, read_versioned_json, write_versioned_json
from terarec.io.locks import wait_for_lock
from terarec.io.remote import PARTIAL_SUFFIX
from terarec.io.removal import check_removable, remove_tree, work_directory
from terarec.spec import DatasetSpec, LabelSpec, SourceColumn, SourceSpec, Split, WorkflowSpec, from_data, to_data
from terarec.spec.dataset import DatasetStorage
from terarec.spec.registry import OperatorSpec, check_allowed, imported

FORMAT = "terarec.workflow"
VERSION = 4
_FILES = r"(?s)\d{2,}[-.].+"
"""Names of the files of states and of earlier rows."""
_ROW_FUNCTIONS = "terarec.etl.ready.row_functions"
_NAMES = ("hour_and_weekday", "avazu_hour_and_weekday", "length", "modulo_10_million", "modulo_40_million")
PRESET_FUNCTIONS = frozenset(f"{_ROW_FUNCTIONS}:{name}{of}" for name in _NAMES for of in ("", "_of_record"))
"""The functions that the presets name. No others of terarec: its modules reach the rest of Python."""


def read_workflow(path: Path, allow_import: Sequence[str] = ()) -> WorkflowSpec:
    """Read a ``workflow.json``.

    Args:
        path: The file.
        allow_import: Packages whose functions its steps may name.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a workflow, or of another version.
        ConfigError: A field is wrong; the message has its JSON path. A step names a function that is not allowed.
    """
    # A save that was killed between its renames has left none.
    if path.name == WORKFLOW_FILE and not os.path.lexists(path):
        end_exchange(path.parent, WORKFLOW_ENTRIES)
    data = read_versioned_json(path, FORMAT, VERSION)
    for field in data:
        if field != "workflow":
            raise FormatError(f"{path}: $.{field}", "unknown field, expected only 'workflow'")
    # Before the codec reads the steps: it knows only operators that are registered, which importing them does.
    import_operators(data.get("workflow"), allow_import, str(path))
    spec: WorkflowSpec = from_data(WorkflowSpec, data.get("workflow"), f"{path}: $.workflow")
    # Before the plan is made, which imports the functions.
    check_functions(spec, allow_import, str(path))
    return spec


def save_states(plan: Plan, states: Mapping[int, State], directory: Path) -> None:
    """Write the states of steps into ``states/`` of `directory`, and force them to the disk."""
    # Without states no folder, since its presence means that the workflow is fitted.
    (directory / STATES if states else directory).mkdir(parents=True, exist_ok=True)
    for step, state in states.items():
        state.save(directory / STATES, state_name(plan, step))
    if states:
        flush_tree(directory / STATES)
        flush(directory)


def load_states(plan: Plan, directory: Path) -> dict[int, State]:
    """Read the files of `save_states`; return no states if there is no ``states/``.

    Raises:
        DataNotFoundError: The file of a step is missing.
        FormatError: A file is damaged.
    """
    if not (directory / STATES).is_dir():
        return {}
    fitted = [step for step, operator in enumerate(plan.operators) if operator.is_fitted]
    try:
        return {step: plan.operators[step].load_state(directory / STATES, state_name(plan, step)) for step in fitted}
    except ConfigError as error:
        # The files are at fault and not an argument of the caller.
        raise FormatError(directory / STATES, error.where, error.problem) from None


def state_name(plan: Plan, step: int) -> str:
    """Return how the names of the files of a step's state begin, in ``states/``."""
    return f"{step:02d}-{plan.spec.steps[step].kind}"


def import_operators(workflow: object, allow_import: Sequence[str], where: str) -> None:
    """Import the operators of users that the JSON data of a workflow name as ``"package.module:Class"``.

    Args:
        workflow: Parsed JSON, not validated yet.
        allow_import: As for `check_functions`.
        where: File of the workflow.

    Raises:
        ConfigError: An operator of a package that is not allowed, or one that does not exist.
    """
    steps = workflow.get("steps") if isinstance(workflow, dict) else None
    for position, step in enumerate(steps if isinstance(steps, list) else ()):
        kind = step.get("kind") if isinstance(step, dict) else None
        if isinstance(kind, str) and ":" in kind and kind not in OperatorSpec.members():
            check_allowed(kind, allow_import, f"{where}: steps[{position}]: operator {kind!r}")
            imported(kind)


def check_functions(spec: WorkflowSpec, allow_import: Sequence[str], where: str) -> None:
    """Raise unless every function that `spec` names is one of `PRESET_FUNCTIONS` or of a package that is allowed.

    Nothing is imported for a function that is rejected by its name.

    Args:
        spec: Workflow that was read.
        allow_import: Packages and modules, such as "shop" or "shop.features", with all below them.
        where: File that `spec` was read from.
    """
    if isinstance(allow_import, str):
        raise ConfigError("allow_import", f"got the text {allow_import!r}, expected a list of packages")
    for position, step in enumerate(operators(spec.steps)):
        place = f"{where}: steps[{position}] {type(step).__name__}"
        for field, function in step.functions.items():
            if function not in PRESET_FUNCTIONS:
                check_allowed(function, allow_import, f"{place}: {field} {function!r}")


def _check_replaceable(directory: Path) -> None:
    check_new_file(directory / WORKFLOW_FILE, replace=True)
    for folder in (STATES, EARLIER_ROWS):
        if os.path.lexists(directory / folder):
            check_removable(directory / folder, _FILES)


class WorkflowFields(TypedDict, total=False):
    """Optional fields of `WorkflowSpec`; lists are taken as tuples."""

    name: str
    tables: Mapping[str, SourceSpec]
    split: Split | None
    dense: Sequence[str]
    categorical: Sequence[str]
    keys: Sequence[str]
    weight: str | None
    metadata: Sequence[str]
    version: int


class Workflow:
    """Steps from raw rows to a data set.

    Attributes:
        spec: Source, steps, split and result columns.
        plan: Order of the passes and of the steps in them.
        states: Step -> state of each fitted step; empty before the workflow is fitted.
        earlier_rows: Directory of the rows of prepared files from which grouped steps continue; it is missing where the
            workflow was fitted and they were not kept. None for a workflow that has prepared nothing.

    Args:
        steps: Operators in order.
        source: Files of rows.
        labels: Labels, at least one.
        states: States of the steps; None for a workflow that is not fitted.
        fields: Further fields of `WorkflowSpec`.

    Raises:
        ConfigError: A field is wrong, or steps do not fit together.
    """

    def __init__(
        self,
        steps: Sequence[Operator],
        *,
        source: SourceSpec,
        labels: Sequence[LabelSpec],
        states: Mapping[int, State] | None = None,
        earlier_rows: Path | None = None,
        **fields: Unpack[WorkflowFields],
    ) -> None:
        others: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        self.spec = WorkflowSpec(
            **{"name": "workflow", **others}, source=source, steps=tuple(steps), labels=tuple(labels)
        )
        self.plan: Plan = plan(self.spec)
        check_record(self.plan)  # and not only when the trained model is to be served
        self.states: dict[int, State] = dict(states or {})
        self.earlier_rows = earlier_rows
        self._read: frozenset[str] | None = None

    @classmethod
    def of(cls, spec: WorkflowSpec, states: Mapping[int, State] | None = None) -> Workflow:
        """Return the workflow that `spec` describes, with the states of its steps if it is fitted."""
        fields: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return cls(**fields, states=states)

    @classmethod
    def from_json(cls, path: Path | str, *, allow_import: Sequence[str] = ()) -> Workflow:
        """Read an unfitted workflow from a ``workflow.json``.

        Args:
            path: The file.
            allow_import: Packages whose functions the steps may name, such as ``("shop",)``: a workflow from
                another party could run any code. Those of the presets need none.

        Raises:
            DataNotFoundError: No such file.
            FormatError: Not a workflow, or of another version.
            ConfigError: A field is wrong (JSON path), steps do not fit together, or one names a function that is not
                allowed.
        """
        return cls.of(read_workflow(Path(path), allow_import))

    def to_json(self, path: Path | str, *, replace: bool = True) -> None:
        """Write ``workflow.json`` without the fitted state.

        Args:
            path: The file.
            replace: Whether a file that is there is replaced.

        Raises:
            ConfigError: A directory is there, or a file that may not be replaced.
            StorageError: The disk is full.
        """
        write_versioned_json(Path(path), FORMAT, VERSION, {"workflow": to_data(self.spec)}, replace=replace)

    @classmethod
    def load(cls, directory: Path | str, *, allow_import: Sequence[str] = ()) -> Workflow:
        """Read the files of `save`; without states the workflow is unfitted.

        Args:
            directory: Directory with ``workflow.json``.
            allow_import: As for `from_json`.

        Raises:
            DataNotFoundError: A file is missing.
            FormatError: A file is damaged.
            ConfigError: As for `from_json`.
        """
        workflow = cls.from_json(Path(directory) / WORKFLOW_FILE, allow_import=allow_import)
        workflow.states = load_states(workflow.plan, Path(directory))
        earlier_rows = Path(directory) / EARLIER_ROWS
        if workflow.states or earlier_rows.is_dir():
            workflow.earlier_rows = earlier_rows
        return workflow

    def save(self, directory: Path | str) -> None:
        """Write ``workflow.json`` and the states of the steps to `directory`, which is made if necessary.

        They take the place of a workflow that is there, with its states and earlier rows. An error leaves that as it
        was, and so does a kill, unless it falls between the renames at the end: then the next call that reads or saves
        the workflow does the others.

        Raises:
            ConfigError: The folder of its states or earlier rows is a link, or holds files of others.
            StorageError: The disk is full, or cannot be written.
        """
        path = Path(directory)
        # Inside `path`, so that both are on one file system: a rename across two would be a copy.
        work, lock = path / PARTIAL_SUFFIX, path / LOCK_FILE  # which all saves to `path` share
        with rewrite_error_paths(work, path), ensure_parents(lock), wait_for_lock(lock):
            end_exchange(path, WORKFLOW_ENTRIES, is_locked=True)
            work_directory(work)
            try:
                save_states(self.plan, self.states, work)
                if self.earlier_rows is not None and self.earlier_rows.is_dir():
                    copy_earlier_rows(self.earlier_rows, work / EARLIER_ROWS)
                self.to_json(work / WORKFLOW_FILE)
                _check_replaceable(path)
                exchange(work, path, WORKFLOW_ENTRIES)
            finally:
                if not is_begun(work):
                    remove_tree(work, ignore_errors=True)

    def with_split(self, split: Split | None) -> Workflow:
        """Return this workflow with its state and another split: `OneSplit` for files that it only transforms.

        Raises:
            ConfigError: `split` names a column that is not there.
        """
        return self._with(dataclasses.replace(self.spec, split=split))

    def with_sample_columns(self, *, weight: str | None, metadata: Sequence[str]) -> Workflow:
        """Return this workflow with its state and other columns besides those that models read.

        Args:
            weight: As for `WorkflowSpec`.
            metadata: As for `WorkflowSpec`.

        Raises:
            ConfigError: A column that is not there, or of another type.
        """
        return self._with(dataclasses.replace(self.spec, weight=weight, metadata=tuple(metadata)))

    def __repr__(self) -> str:
        state = "fitted" if self.is_fitted else "not fitted"
        return f"Workflow({self.spec.name!r}, {len(self.spec.steps)} steps, {state})"

    @property
    def is_fitted(self) -> bool:
        """Whether all steps that need a state have one."""
        return all(not operator.is_fitted or step in self.states for step, operator in enumerate(self.plan.operators))

    def apply(self, rows: Rows | Frame, upto: int | None = None) -> Rows:
        """Apply all steps, or those before step `upto`, to rows, or to a table in memory with the source's columns.

        Grouped steps find the earlier rows of a group among these alone: they must be all rows of their groups.

        Raises:
            ConfigError: A step among them is not fitted.
            FormatError: A value that a step rejects, with its column and row.
        """
        if not isinstance(rows, Rows):
            rows = concatenate_rows(list(open_source(self.spec.source, rows).blocks()))
        rows = with_metadata(rows, self.spec.metadata)
        for step in range(len(self.plan.operators) if upto is None else upto):
            rows = run_step(self.plan.operators[step], rows, state_of(self.plan, step, self.states))
        return rows

    def dataset_spec(self, storage: DatasetStorage = "parquet") -> DatasetSpec:
        """Return the resulting data set without its shards; it names the directory ``workflow`` for the saved workflow.

        Raises:
            ConfigError: The workflow is not fitted.
        """
        self._check_fitted()
        return data_set(self.plan, self.states, storage)

    def encode_rows(self, rows: Rows) -> ColumnBlock:
        """Return the columns of the data set for rows after the last step.

        Raises:
            FormatError: A missing label, number or weight, a number that float32 does not hold, or a negative weight,
                with its column and row.
        """
        return column_block(self.plan, self._dataset, rows)

    @property
    def record_columns(self) -> Mapping[str, ColumnType]:
        """Raw columns of a served record, and their types.

        Raises:
            ConfigError: The workflow is not fitted.
        """
        return self._records.inputs

    @property
    def record_sources(self) -> Mapping[str, SourceColumn]:
        """Those of `record_columns` that are columns of files, and how these hold them.

        Raises:
            ConfigError: The workflow is not fitted.
        """
        return self._records.sources

    def encode(self, columns: Mapping[str, RawValues] | Frame) -> EncodedRecords:
        """Encode B raw records, given column by column, as `encode_rows` does rows of the source.

        Args:
            columns: Each of `record_columns` -> B values; None, null, ``""`` and, among numbers, NaN are missing. Other
                columns of the source may be there and are not read. Or a table in memory, such as a DataFrame, whose
                types are read as those of files, and which may have any further columns.

        Raises:
            ConfigError: The workflow is not fitted; a column that is missing, unknown or of another length; a value of
                another type, or one that a step rejects, with its column, row and what is accepted.
        """
        if isinstance(columns, Mapping):
            return self._records.encode(columns)
        if not is_frame(columns, "columns"):
            got = type(columns).__name__
            raise ConfigError("columns", f"got {got}, expected a dict of columns, or a table (pandas, Polars, Arrow)")
        return self._records.encode_table(as_table(columns, "columns"))

    def reading(self, names: Collection[str]) -> Workflow:
        """Return the workflow for a reader of some of its columns: in records `encode` makes zeros of the others.

        Their lists are empty. Raw columns on which they alone depend are not in `record_columns`.
        """
        restricted = Workflow.of(self.spec, self.states)
        restricted._read = frozenset(names)
        return restricted

    def _with(self, spec: WorkflowSpec) -> Workflow:
        changed = Workflow.of(spec, self.states)
        changed.earlier_rows = self.earlier_rows
        return changed

    @cached_property
    def _records(self) -> RecordEncoder:
        self._check_fitted()
        # At the first record, as preparing files needs none.
        return RecordEncoder(self.plan, self.states, self._read)

    @cached_property
    def _dataset(self) -> DatasetSpec:
        return self.dataset_spec()

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise ConfigError(f"workflow {self.spec.name!r}", "is not fitted, expected a fitted one")
