"""The short way of a few records: the functions of a workflow's steps on plain values, ordered once.

What the steps read and write has its place in one list of slots. The raw columns come first, as callers hold them in
lists; then each operation takes some slots and adds what it makes of them. Numbers, and integers of which only the
number matters, go as matrices of several columns: Criteo's 13 numbers and 26 categories take 5 or 6 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import ColumnType
from terarec.etl.operators import State
from terarec.etl.operators.plain_function import PlainFunction, PlainLists, as_numbers
from terarec.etl.workflow.plain_reading import PlainReader, plain_reader
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.serving import ServingPlan
from terarec.formats import Keys
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.spec import MISSING_KEY, Rename


class Operation(NamedTuple):
    """Takes the slots that `fetch` gives and adds what `call` makes of them."""

    fetch: Callable[[list[Any]], Any]
    call: Callable[..., Any]


class NumberPlace(NamedTuple):
    """Where numbers are: a row of the matrix in a slot, or all of the slot, float64[n].

    Attributes:
        slot: see above.
        row: see above.
        rows: how many the matrix has, where that is known.
    """

    slot: int
    row: int | None = None
    rows: int | None = None


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
        self._keys = _fetch([builder.keys(name, end) for name in keys])
        self._operations = builder.operations()

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
        self._inputs = list(serving.inputs)
        self._functions = {
            step: plan.codes[step].plain_functions(serving.types[step], states.get(step)) for step in serving.steps
        }
        self._added: list[tuple[Sequence[int], Callable[..., Any]]] = []
        self._raw_rows: dict[str, list[int]] = {"number": [], "integer": []}
        self._num_slots = len(self._inputs)
        self._slots: dict[Any, int] = {}

    def operations(self) -> list[Operation]:
        """All that was asked for, in order."""
        return [Operation(_fetch(reads), call) for reads, call in self._added]

    def matrix(self, names: Sequence[str], before: int) -> int:
        """The slot of a matrix float64[c, n] of columns of numbers or integers."""
        places = tuple(self._numbers(name, before) for name in names)
        slots = {place.slot for place in places}
        rows = [place.row for place in places]
        first = rows[0]
        if len(slots) > 1 or first is None or rows != list(range(first, first + len(rows))):
            return self._once(places, [place.slot for place in places], _gathering(rows))
        if len(rows) == places[0].rows:
            return places[0].slot
        return self._once(places, [*slots], lambda matrix: (matrix[first : first + len(rows)],))

    def keys(self, name: str, before: int) -> int:
        """The slot of ids or keys as a model takes them."""
        slot, found = self.values(name, before), self._plan.types[-1][name]
        is_ready = found.kind == "id" and not found.is_list
        return slot if is_ready else self._once(("keys", slot), [slot], _alone(_keys))

    def values(self, name: str, before: int, *, is_checked: bool = False) -> int:
        """The slot of the plain values of a column; of raw ones where what takes them checks them."""
        step, name = self._maker(name, before)
        if step is None:
            return self._raw(name, is_checked=is_checked)
        made = self._made(step, name, "values")
        if made is not None:
            return made
        place = self._numbers(name, step + 1)
        return self._once(place, [place.slot], lambda matrix: (matrix[place.row],))

    def _numbers(self, name: str, before: int) -> NumberPlace:
        step, name = self._maker(name, before)
        if step is None:
            return self._raw_number(name)
        for function in self._functions[step]:
            if function.gives == "matrix" and name in function.writes:
                slot = self._emit(step, function)
                return NumberPlace(slot, function.writes.index(name), len(function.writes))
        values = self._made(step, name, "values")
        assert values is not None
        return NumberPlace(self._once(("numbers", values), [values], _alone(as_numbers)))

    def _maker(self, name: str, before: int) -> tuple[int | None, str]:
        """The last step before `before` that makes the column, and its name there; `Rename` is seen through."""
        for step in reversed(self._serving.steps):
            spec = self._plan.spec.steps[step]
            if step >= before or name not in spec.writes:
                continue
            if not isinstance(spec, Rename):
                return step, name
            name = next(old for old, new in spec.names.items() if new == name)
        return None, name

    def _made(self, step: int, name: str, gives: str) -> int | None:
        for function in self._functions[step]:
            if function.gives == gives and name in function.writes:
                return self._emit(step, function) + function.writes.index(name)
        return None

    def _emit(self, step: int, function: PlainFunction) -> int:
        """The slot of the first output of a step's function."""
        if function.takes == "matrix":
            reads = [self.matrix(function.reads, step)]
        else:
            is_checked = function.takes == "raw"
            reads = [self.values(name, step, is_checked=is_checked) for name in function.reads]
        outputs = 1 if function.gives == "matrix" else len(function.writes)
        call = _alone(function.call) if function.gives == "matrix" else function.call
        return self._once((step, function.writes, function.gives), reads, call, outputs)

    def _raw(self, name: str, *, is_checked: bool) -> int:
        found = self._serving.inputs[name]
        slot = self._inputs.index(name)
        if found == ColumnType("number"):
            place = self._raw_number(name)
            return self._once(place, [place.slot], lambda matrix: (matrix[place.row],))
        reader = plain_reader(found, self._source(name), is_checked=is_checked)
        return slot if reader is None else self._once(("raw", name, is_checked), [slot], _alone(reader))

    def _raw_number(self, name: str) -> NumberPlace:
        found, source = self._serving.inputs[name], self._source(name)
        if source is not None and source.format is not None:
            values = self._raw(name, is_checked=False)
            return NumberPlace(self._once(("numbers", values), [values], _alone(as_numbers)))
        rows, raw = self._raw_rows[found.kind], self._inputs.index(name)
        if raw not in rows:
            rows.append(raw)  # the matrix of all raw columns of the kind, which grows while they are asked for
        slot = self._once(("raw", found.kind), rows, partial(_raw_matrix, found.kind == "integer"))
        return NumberPlace(slot, rows.index(raw))

    def _source(self, name: str) -> Any:
        spec = self._plan.spec.source
        return spec.column(name) if name in self._plan.types[0] else None

    def _once(self, key: Any, reads: Sequence[int], call: Callable[..., Sequence[Any]], outputs: int = 1) -> int:
        """The slot of the first output of an operation, which is added unless it is there already."""
        if key not in self._slots:
            self._slots[key] = self._num_slots
            self._added.append((reads, call))
            self._num_slots += outputs
        return self._slots[key]


def _fetch(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    first = slots[0] if slots else 0
    return itemgetter(slice(first, first + len(slots)))  # one slot is a sequence, too


def _alone(call: PlainReader) -> Callable[..., Sequence[Any]]:
    return lambda value: (call(value),)


def _raw_matrix(whole: bool, *columns: list[Any]) -> Sequence[Any]:
    return (numbers_of_list(list(chain.from_iterable(columns)), whole=whole).reshape(len(columns), -1),)


def _keys(values: Any) -> Keys:
    """Plain ids, or integers, as a model takes them."""
    if isinstance(values, PlainLists):
        return _keys_of_items(values.items), np.array(values.offsets, dtype=np.int64)
    return _keys_of_items(values)


def _keys_of_items(items: Any) -> NDArray[np.int64]:
    if isinstance(items, list):
        return np.array([MISSING_KEY if item is None else item for item in items], dtype=np.int64)
    ids: NDArray[np.int64] = items
    return ids


def _gathering(rows: Sequence[int | None]) -> Callable[..., Sequence[Any]]:
    """What makes a matrix of one row of each of several, or of all of one where the row is None."""
    if rows == [None]:
        return lambda numbers: (numbers[None],)

    def gather(*matrices: NDArray[np.float64]) -> Sequence[Any]:
        gathered = np.empty((len(rows), matrices[0].shape[-1]))
        for place, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
            gathered[place] = matrix if row is None else matrix[row]
        return (gathered,)

    return gather
