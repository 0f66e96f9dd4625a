"""Which code does an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terarec.errors import ConfigError
from terarec.etl.operators.contract import OperatorCode
from terarec.spec import Operator

_CODES: dict[type[Any], Callable[[Any], OperatorCode]] = {}


def implementation(spec: Operator) -> OperatorCode:
    """The code of the step `spec`.

    Raises:
        ConfigError: none is known.
    """
    code = _CODES.get(type(spec))
    if code is None:
        known = ", ".join(sorted(kind.__name__ for kind in _CODES))
        raise ConfigError(f"got the operator {type(spec).__name__}, expected one of {known}")
    return code(spec)
