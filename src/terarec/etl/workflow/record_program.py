"""The short way of a few records: the functions of a workflow's steps on plain values, ordered once.

What the steps read and write has its place in one list of slots. The raw columns come first, as callers hold them in
lists; then each operation takes some slots and adds what it makes of them. Numbers, and integers of which only the
number matters, go as matrices of several columns: Criteo's 13 numbers and 26 categories take 5 or 6 operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.ops import State
from terarec.etl.ops.record_values import Ragged, RecordFunction
from terarec.etl.workflow.operations import NumberPlace, Operations, alone, fetching
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.raw_reading import RawReading
from terarec.etl.workflow.serving import ServingPlan
from terarec.formats import Keys
from terarec.spec import MISSING_KEY


class RecordProgram:
    """What makes a model's inputs of raw values.

    Args:
        plan: of a fitted workflow.
        serving: what leads to `dense` and `keys`.
        states: of the fitted steps.
        dense: columns that are wanted as rows of one matrix of numbers.
        keys: columns that are wanted as ids or keys.
    """

    def __init__(
        self, plan: Plan, serving: ServingPlan, states: Mapping[int, State], dense: Sequence[str], keys: Sequence[str]
    ) -> None:
        builder = _Builder(plan, serving, states)
        end = len(plan.codes)
        self._dense = builder.matrix(dense, end) if dense else None
        self._keys = fetching([builder.keys(name, end) for name in keys])
        self._operations = builder.operations.ordered()

    def run(self, columns: Sequence[list[Any]]) -> tuple[NDArray[np.float64] | None, Sequence[Keys]]:
        """The matrix float64[F, n], if there are dense columns, and the ids and keys of the others.

        Args:
            columns: the raw values of each of ``serving.inputs``.

        Raises:
            RefusedValueError: a value that a step or the type of its column refuses.
        """
        slots: list[Any] = list(columns)
        for fetch, call in self._operations:
            slots.extend(call(*fetch(slots)))
        return None if self._dense is None else slots[self._dense], self._keys(slots)


class _Builder:
    """Orders what makes columns, each made once, when it is first asked for.

    Columns are named as they stand before a step; so one name may stand for several.
    """

    def __init__(self, plan: Plan, serving: ServingPlan, states: Mapping[int, State]) -> None:
        self._plan, self._serving = plan, serving
        self._functions = {
            step: plan.codes[step].record_functions(serving.types[step], states.get(step)) for step in serving.steps
        }
        self.operations = Operations(len(serving.inputs))
        self._raw = RawReading(plan, serving, self.operations)

    def matrix(self, names: Sequence[str], before: int) -> int:
        """The slot of a matrix float64[c, n] of columns of numbers or integers."""
        return self.operations.matrix([self._numbers(name, before) for name in names])

    def keys(self, name: str, before: int) -> int:
        """The slot of ids or keys as a model takes them."""
        slot, found = self.values(name, before), self._plan.types[-1][name]
        is_ready = found.kind == "id" and not found.is_list
        return slot if is_ready else self.operations.once(("keys", slot), [slot], alone(_keys))

    def values(self, name: str, before: int, *, is_checked: bool = False) -> int:
        """The slot of the plain values of a column; of raw ones where what takes them checks them."""
        step, name = self._maker(name, before)
        if step is None:
            return self._raw.values(name, is_checked=is_checked)
        made = self._made(step, name)
        return self.operations.row(self._numbers(name, step + 1)) if made is None else made

    def _numbers(self, name: str, before: int) -> NumberPlace:
        step, name = self._maker(name, before)
        if step is None:
            return self._raw.numbers(name)
        for function in self._functions[step]:
            if function.gives == "matrix" and name in function.writes:
                slot = self._emit(step, function)
                return NumberPlace(slot, function.writes.index(name), len(function.writes))
        values = self._made(step, name)
        assert values is not None
        return self.operations.numbers(values)

    def _maker(self, name: str, before: int) -> tuple[int | None, str]:
        """The last step before `before` that makes the column, and its name there; renaming is looked through."""
        for step in reversed(self._serving.steps):
            code = self._plan.codes[step]
            if step >= before or name not in code.writes:
                continue
            if not code.renames:
                return step, name
            name = code.origin(name) or name
        return None, name

    def _made(self, step: int, name: str) -> int | None:
        for function in self._functions[step]:
            if function.gives == "values" and name in function.writes:
                return self._emit(step, function) + function.writes.index(name)
        return None

    def _emit(self, step: int, function: RecordFunction) -> int:
        """The slot of the first output of a step's function."""
        if function.takes == "matrix":
            reads = [self.matrix(function.reads, step)]
        else:
            is_checked = function.takes == "raw"
            reads = [self.values(name, step, is_checked=is_checked) for name in function.reads]
        outputs = 1 if function.gives == "matrix" else len(function.writes)
        call = alone(function.call) if function.gives == "matrix" else function.call
        return self.operations.once((step, function.writes, function.gives), reads, call, outputs)


def _keys(values: Any) -> Keys:
    """Plain ids, or integers, as a model takes them."""
    if isinstance(values, Ragged):
        return _keys_of_items(values.items), np.array(values.offsets, dtype=np.int64)
    return _keys_of_items(values)


def _keys_of_items(items: Any) -> NDArray[np.int64]:
    if isinstance(items, list):
        return np.array([MISSING_KEY if item is None else item for item in items], dtype=np.int64)
    ids: NDArray[np.int64] = items
    return ids
