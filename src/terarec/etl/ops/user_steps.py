# SPDX-License-Identifier: Apache-2.0
"""Steps that run a user's code, or functions by name: their exceptions reject the rows that cause them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terarec.errors import TerarecError, UserCodeError
from terarec.etl.columns import REJECTED_SHOWN, RowFaultError, Rows
from terarec.etl.ops.base import Operator
from terarec.etl.ops.states import State
from terarec.kernels.cpu.encoding import InvalidValueError
from terarec.user_code import describe, is_user_module

_VALUE_ERRORS = (ValueError, ArithmeticError, LookupError)
"""What a function raises for a value; other exceptions do so only where it returns for other rows."""
_TRIED_ROWS = 100
"""The first rows that are tried; a function that takes none of them is broken."""


def run_step(operator: Operator, rows: Rows, state: State | None) -> Rows:
    """Do a step to rows.

    Raises:
        RowFaultError: The step rejects values, or its functions raise an exception for some of the rows.
        UserCodeError: They raise an exception whatever the rows are, or need them together.
    """
    # MemoryError is one of the machine, not of the code.
    try:
        return operator.transform(rows, state)
    except (TerarecError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if not runs_functions(operator):
            raise
        if operator.stage not in ("stateless", "fitted"):
            raise UserCodeError(_name(operator), describe(error)) from error
        search = _Search(operator, state)
        failed = search.failed_rows(rows)
        if not failed:
            raise UserCodeError(_name(operator), f"{describe(error)}; not for any of the rows alone") from error
        if not search.has_result and (not isinstance(error, _VALUE_ERRORS) or len(failed) == _TRIED_ROWS):
            raise UserCodeError(_name(operator), describe(error)) from error
        got = [f"{_name(operator)} raised {describe(raised)}" for raised in list(failed.values())[:REJECTED_SHOWN]]
        raise RowFaultError(None, rows.ids[list(failed)], got, "a value that it takes") from error


class _Search:
    """Looks for the rows for which a step raises an exception, by halves.

    Attributes:
        has_result: Whether it raised none for some rows.
    """

    def __init__(self, operator: Operator, state: State | None) -> None:
        self._operator, self._state = operator, state
        self.has_result = False

    def failed_rows(self, rows: Rows) -> dict[int, BaseException]:
        """Return position -> exception; only the first `_TRIED_ROWS` where the step takes none of them."""
        failed: dict[int, BaseException] = {}
        parts = [(0, rows.num_rows)]
        while parts:
            begin, end = parts.pop()
            try:
                self._operator.transform(rows.slice(begin, end), self._state)
                self.has_result = True
            except (TerarecError, MemoryError):
                raise
            except (Exception, SystemExit) as error:
                if end - begin == 1:
                    failed[begin] = error
                    if len(failed) == _TRIED_ROWS and not self.has_result:
                        return failed
                else:
                    middle = (begin + end) // 2
                    # The first half is on top.
                    parts += [(middle, end), (begin, middle)]
        return failed


def runs_functions(operator: Operator) -> bool:
    """Return whether the step runs code of a user, or functions by name: those of presets raise as a user's do."""
    return bool(operator.functions) or is_user_module(type(operator).__module__)


def guard_records(operator: Operator, call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Return a function of records that raises `InvalidValueError` where functions of the step raise anything.

    The records go through `run_step` next, which says what is wrong.
    """
    return partial(_guarded, call) if runs_functions(operator) else call


def _guarded(call: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
    try:
        return call(*arguments)
    except (TerarecError, MemoryError):
        raise
    except (Exception, SystemExit):
        raise InvalidValueError(0) from None


def _name(operator: Operator) -> str:
    return " ".join([type(operator).__name__, *list(operator.functions.values())[:1]])
