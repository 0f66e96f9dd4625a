"""Which functions the steps of a workflow that is read from a file may name.

A step may name a function, and rows are handed to it: a workflow from somebody else would run code of their choice. So
only the functions of the ready workflows are taken without being asked for, and others where the caller allows their
package. A workflow that is made in Python names what its author could call anyway, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from terarec.errors import ConfigError
from terarec.spec import LambdaOp, WorkflowSpec
from terarec.spec.named_code import check_allowed

_ROW_FUNCTIONS = "terarec.etl.ready.row_functions"
_NAMES = ("hour_and_weekday", "avazu_hour_and_weekday", "length", "modulo_10_million", "modulo_40_million")
READY_FUNCTIONS = frozenset(f"{_ROW_FUNCTIONS}:{name}{of}" for name in _NAMES for of in ("", "_on_spark", "_of_record"))
"""The functions that the ready workflows name. No others of terarec: its modules reach the rest of Python."""

FIELDS = ("function", "record_function", "spark_function")
"""The fields of a step that name a function."""


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
    for position, step in enumerate(spec.steps):
        if not isinstance(step, LambdaOp):
            continue
        for field in FIELDS:
            function = getattr(step, field)
            if function is not None and function not in READY_FUNCTIONS:
                # One for Spark may need a library that only Spark's machines have: then it is not looked into here.
                check_allowed(function, allow_import, f"{where}: steps[{position}] LambdaOp: {field} {function!r}")
