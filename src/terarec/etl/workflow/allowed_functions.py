"""Which functions the steps of a workflow that is read from a file may name.

A step may name a function, and rows are handed to it: a workflow from somebody else would run code of their choice. So
only the functions of the ready workflows are taken without being asked for, and others where the caller allows their
package. A workflow that is made in Python names what its author could call anyway, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from terarec.errors import ConfigError
from terarec.etl.ops.base import operators
from terarec.spec import OperatorSpec, WorkflowSpec
from terarec.spec.named_code import check_allowed, imported

_ROW_FUNCTIONS = "terarec.etl.ready.row_functions"
_NAMES = ("hour_and_weekday", "avazu_hour_and_weekday", "length", "modulo_10_million", "modulo_40_million")
READY_FUNCTIONS = frozenset(f"{_ROW_FUNCTIONS}:{name}{of}" for name in _NAMES for of in ("", "_on_spark", "_of_record"))
"""The functions that the ready workflows name. No others of terarec: its modules reach the rest of Python."""


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
    """Raise unless every function that `spec` names is one of `READY_FUNCTIONS` or of a package that is allowed.

    Nothing is imported for a function that is refused by its name.

    Args:
        spec: a workflow that was read.
        allow_import: packages and modules, such as "shop" or "shop.features"; what lies below them is allowed too.
        where: the file that `spec` was read from.

    Raises:
        ConfigError: names the step, the function, and what would allow it.
    """
    if isinstance(allow_import, str):
        raise ConfigError(f"allow_import: got the text {allow_import!r}, expected a list of packages")
    for position, step in enumerate(operators(spec.steps)):
        place = f"{where}: steps[{position}] {type(step).__name__}"
        for field, function in step.functions.items():
            if function not in READY_FUNCTIONS:
                # One for Spark may need a library that only Spark's machines have: then it is not looked into here.
                check_allowed(function, allow_import, f"{place}: {field} {function!r}")
