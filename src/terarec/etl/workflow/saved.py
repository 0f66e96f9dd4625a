"""Workflows on the disk: ``workflow.json`` and ``states/``. Described in docs/workflows.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError, FormatError
from terarec.etl.ops import State
from terarec.etl.workflow.allowed_functions import check_functions, import_operators
from terarec.etl.workflow.plan import Plan
from terarec.io import read_json_and_version, write_versioned_json
from terarec.spec import WorkflowSpec, from_data, to_data

FORMAT = "terarec.workflow"
VERSION = 3
"""Version 2 had no `weight` and `metadata`. Version 1 had no `cleaning` in a source; it did what "fields" says."""
STATES = "states"


def read_workflow(path: Path, allow_import: Sequence[str] = ()) -> WorkflowSpec:
    """The workflow of a ``workflow.json``.

    Args:
        path: of the file.
        allow_import: packages whose functions its steps may name.

    Raises:
        DataNotFoundError: no such file.
        FormatError: not a workflow, or of a newer version.
        ConfigError: a field is wrong; the message has its JSON path. A step names a function that is not allowed.
    """
    version, data = read_json_and_version(path, FORMAT, VERSION)
    for field in data:
        if field != "workflow":
            raise FormatError(f"{path}: $.{field}: unknown field, expected only 'workflow'")
    if version == 1:
        _add_cleaning(data.get("workflow"))
    import_operators(data.get("workflow"), allow_import, str(path))
    spec: WorkflowSpec = from_data(WorkflowSpec, data.get("workflow"), f"{path}: $.workflow")
    check_functions(spec, allow_import, str(path))
    return spec


def _add_cleaning(workflow: Any) -> None:
    """Say of the sources in a workflow of version 1 how they clean values; what is no source is told by the codec."""
    if not isinstance(workflow, dict):
        return
    tables = workflow.get("tables")
    for source in (workflow.get("source"), *(tables.values() if isinstance(tables, dict) else ())):
        if isinstance(source, dict):
            source.setdefault("cleaning", "fields")


def write_workflow(spec: WorkflowSpec, path: Path, *, replace: bool = True) -> None:
    """Write ``workflow.json`` atomically."""
    write_versioned_json(path, FORMAT, VERSION, {"workflow": to_data(spec)}, replace=replace)


def save_states(plan: Plan, states: Mapping[int, State], directory: Path) -> None:
    """Write what steps learnt into ``states/`` of `directory`."""
    (directory / STATES if states else directory).mkdir(parents=True, exist_ok=True)
    for step, state in states.items():
        state.save(directory / STATES, state_name(plan, step))


def load_states(plan: Plan, directory: Path) -> dict[int, State]:
    """What `save_states` wrote; nothing where there is no ``states/``.

    Raises:
        DataNotFoundError: a step's file is missing.
        FormatError: a file is damaged.
    """
    if not (directory / STATES).is_dir():
        return {}
    fitted = [step for step, code in enumerate(plan.codes) if code.is_fitted]
    try:
        return {step: plan.codes[step].load_state(directory / STATES, state_name(plan, step)) for step in fitted}
    except ConfigError as error:
        raise FormatError(f"{directory / STATES}: {error}") from None


def state_name(plan: Plan, step: int) -> str:
    """What the files of a step's state begin with, in ``states/``."""
    return f"{step:02d}-{plan.spec.steps[step].kind}"
