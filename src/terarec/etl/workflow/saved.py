"""Workflows on the disk (``workflow.json`` and ``states/``, see docs/workflows.md), and the code that they may name.

A step may name a function, which gets rows: a workflow from another party could run any code. So only the
functions of the ready workflows are accepted as they are, and others where the caller allows their package. A workflow
that is made in Python names what its author could call anyway, and is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terarec.errors import ConfigError, FormatError
from terarec.etl.ops import State
from terarec.etl.ops.base import operators
from terarec.etl.workflow.plan import Plan
from terarec.io import read_json_and_version, write_versioned_json
from terarec.spec import OperatorSpec, WorkflowSpec, from_data, to_data
from terarec.spec.registry import check_allowed, imported

FORMAT = "terarec.workflow"
VERSION = 3
"""Version 2 had no `weight` and `metadata`. Version 1 had no `cleaning` in a source; it did what "fields" says. A
`LambdaOp` of an older file may have a `spark_function`, which was for Spark alone and is passed over."""
STATES = "states"
_ROW_FUNCTIONS = "terarec.etl.ready.row_functions"
_NAMES = ("hour_and_weekday", "avazu_hour_and_weekday", "length", "modulo_10_million", "modulo_40_million")
PRESET_FUNCTIONS = frozenset(f"{_ROW_FUNCTIONS}:{name}{of}" for name in _NAMES for of in ("", "_of_record"))
"""The functions that the ready workflows name. No others of terarec: its modules reach the rest of Python."""


def read_workflow(path: Path, allow_import: Sequence[str] = ()) -> WorkflowSpec:
    """Read a ``workflow.json``.

    Args:
        path: The file.
        allow_import: Packages whose functions its steps may name.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Not a workflow, or of a newer version.
        ConfigError: A field is wrong; the message has its JSON path. A step names a function that is not allowed.
    """
    version, data = read_json_and_version(path, FORMAT, VERSION)
    for field in data:
        if field != "workflow":
            raise FormatError(f"{path}: $.{field}", "unknown field, expected only 'workflow'")
    if version == 1:
        _add_cleaning(data.get("workflow"))
    _remove_spark_functions(data.get("workflow"))
    import_operators(data.get("workflow"), allow_import, str(path))
    spec: WorkflowSpec = from_data(WorkflowSpec, data.get("workflow"), f"{path}: $.workflow")
    check_functions(spec, allow_import, str(path))
    return spec


def _add_cleaning(workflow: Any) -> None:
    """Add to the sources of a workflow of version 1 how they clean values; the codec reports what is no source."""
    if not isinstance(workflow, dict):
        return
    tables = workflow.get("tables")
    for source in (workflow.get("source"), *(tables.values() if isinstance(tables, dict) else ())):
        if isinstance(source, dict):
            source.setdefault("cleaning", "fields")


def _remove_spark_functions(workflow: Any) -> None:
    """Remove what older workflows name for Spark, which calls `function`; the codec reports what is no workflow."""
    steps = workflow.get("steps") if isinstance(workflow, dict) else None
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and step.get("kind") == "lambda_op":
            step.pop("spark_function", None)


def write_workflow(spec: WorkflowSpec, path: Path, *, replace: bool = True) -> None:
    """Write ``workflow.json`` atomically."""
    write_versioned_json(path, FORMAT, VERSION, {"workflow": to_data(spec)}, replace=replace)


def save_states(plan: Plan, states: Mapping[int, State], directory: Path) -> None:
    """Write the states of steps into ``states/`` of `directory`."""
    (directory / STATES if states else directory).mkdir(parents=True, exist_ok=True)
    for step, state in states.items():
        state.save(directory / STATES, state_name(plan, step))


def load_states(plan: Plan, directory: Path) -> dict[int, State]:
    """Read what `save_states` wrote; nothing where there is no ``states/``.

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

    Raises:
        ConfigError: Names the step, the function, and what would allow it.
    """
    if isinstance(allow_import, str):
        raise ConfigError("allow_import", f"got the text {allow_import!r}, expected a list of packages")
    for position, step in enumerate(operators(spec.steps)):
        place = f"{where}: steps[{position}] {type(step).__name__}"
        for field, function in step.functions.items():
            if function not in PRESET_FUNCTIONS:
                check_allowed(function, allow_import, f"{place}: {field} {function!r}")
