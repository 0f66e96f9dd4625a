# SPDX-License-Identifier: Apache-2.0
"""A program that encodes records: the functions of a workflow's steps, in a fixed order, on lists and arrays of values.

All that the steps read and write has its place in one list of slots. The raw columns come first, as callers hold them
in lists, or many values in arrays; then each operation takes some slots and adds its outputs. Numbers, and integers of
which only the number matters, go as matrices of several columns: Criteo's 13 numbers and 26 categories take 5 or 6
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import ColumnType, numpy_values
from terarec.etl.ops import Operator, State
from terarec.etl.ops.base import ColumnTypes
from terarec.etl.ops.user_steps import guard_records
from terarec.etl.ops.values import HEX_DIGITS, RecordFunction, as_numbers, checked_integers, checked_texts
from terarec.etl.workflow.plan import Plan, producer
from terarec.etl.workflow.raw_values import as_list, cut_text, time_reader
from terarec.formats.block import Keys
from terarec.kernels.cpu.encoding import InvalidValueError, numbers_of_list, numbers_of_lists
from terarec.ragged import Ragged
from terarec.spec import SourceColumn
from terarec.spec.dataset import MISSING_KEY


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """The steps for a served record.

    Attributes:
        steps: Steps in order.
        inputs: Raw column -> type, before the first step.
        types: Step -> columns before it.
        brought: Those of the inputs that are outputs of grouped steps, whatever the source has under their names.
    """

    steps: tuple[int, ...]
    inputs: Mapping[str, ColumnType]
    types: Mapping[int, ColumnTypes]
    brought: frozenset[str]


RawColumn: TypeAlias = list[Any] | NDArray[Any] | pa.Array
"""Raw values of a column: a list; numbers as NumPy's; texts and hexadecimal digits as a LargeStringArray, integers as
an Int64Array. `as_list` is what the program makes of arrays that a function does not take."""


class RecordProgram:
    """Makes model inputs of raw values."""

    def __init__(
        self, plan: Plan, serving: ServingPlan, states: Mapping[int, State], dense: Sequence[str], keys: Sequence[str]
    ) -> None:
        builder = _Builder(plan, serving, states)
        end = len(plan.operators)
        self._dense = builder.matrix(dense, end) if dense else None
        self._keys = make_getter([builder.keys(name, end) for name in keys])
        # Last: matrices grow while columns are requested.
        self._operations = builder.operations.ordered()

    def run(self, columns: Sequence[RawColumn]) -> tuple[NDArray[np.float64] | None, Sequence[Keys]]:
        """Return the matrix float64[F, n], if there are dense columns, and the ids and keys of the others.

        Args:
            columns: Raw values of each of ``serving.inputs``.
        """
        slots: list[Any] = list(columns)
        for fetch, call in self._operations:
            slots.extend(call(*fetch(slots)))
        return None if self._dense is None else slots[self._dense], self._keys(slots)


class _Builder:
    """Orders the operations that make columns, each once, at the first request.

    Columns are named as they are before a step; so one name may mean several columns.
    """

    def __init__(self, plan: Plan, serving: ServingPlan, states: Mapping[int, State]) -> None:
        self._plan, self._serving = plan, serving
        self._functions = {
            step: plan.operators[step].record_functions(serving.types[step], states.get(step)) for step in serving.steps
        }
        self.operations = Operations(len(serving.inputs))
        self._raw = RawReading(plan, serving, self.operations)

    def matrix(self, names: Sequence[str], before: int) -> int:
        """Return the slot of a matrix float64[c, n] of columns of numbers or integers."""
        return self.operations.matrix([self._number_place(name, before) for name in names])

    def keys(self, name: str, before: int) -> int:
        """Return the slot of ids or keys as a model takes them."""
        slot, column_type = self.values(name, before), self._plan.types[-1][name]
        # Functions of records give ids as int64 arrays, which models take.
        is_ready = column_type.kind == "id" and not column_type.is_list
        return slot if is_ready else self.operations.memoize(("keys", slot), [slot], single_output(_keys))

    def values(self, name: str, before: int, *, is_checked: bool = False) -> int:
        """Return the slot of the values of a column; of unread ones where the next function checks them."""
        step, name = self._producer_of(name, before)
        if step is None:
            return self._raw.values(name, is_checked=is_checked)
        output = self._output_slot(step, name)
        return self.operations.row(self._number_place(name, step + 1)) if output is None else output

    def _number_place(self, name: str, before: int) -> NumberPlace:
        step, name = self._producer_of(name, before)
        if step is None:
            return self._raw.numbers(name)
        for function in self._functions[step]:
            if function.gives == "matrix" and name in function.writes:
                slot = self._add_function(step, function)
                return NumberPlace(slot, function.writes.index(name), len(function.writes))
        values = self._output_slot(step, name)
        assert values is not None
        return self.operations.numbers(values)

    def _producer_of(self, name: str, before: int) -> tuple[int | None, str]:
        """Return the last step before `before` that makes the column, and its name there; renaming makes nothing."""
        steps = [step for step in self._serving.steps if step < before]
        return producer(self._plan.operators, name, _old_name, steps)

    def _output_slot(self, step: int, name: str) -> int | None:
        for function in self._functions[step]:
            if function.gives == "values" and name in function.writes:
                return self._add_function(step, function) + function.writes.index(name)
        return None

    def _add_function(self, step: int, function: RecordFunction) -> int:
        """Return the slot of the first output of a step's function."""
        if function.takes == "matrix":
            reads = [self.matrix(function.reads, step)]
        else:
            is_checked = function.takes == "raw"
            reads = [self.values(name, step, is_checked=is_checked) for name in function.reads]
        outputs = 1 if function.gives == "matrix" else len(function.writes)
        guarded = guard_records(self._plan.operators[step], function.call)
        call = single_output(guarded) if function.gives == "matrix" else guarded
        return self.operations.memoize((step, function.writes, function.gives), reads, call, outputs)


def _old_name(operator: Operator, name: str) -> str | None:
    return operator.origin(name) if operator.renames else None


def _keys(values: Any) -> Keys:
    """Return ids, or integers, as a model takes them."""
    if isinstance(values, Ragged):
        return Ragged(_keys_of_items(values.values), np.array(values.offsets, dtype=np.int64))
    return _keys_of_items(values)


def _keys_of_items(items: Any) -> NDArray[np.int64]:
    if isinstance(items, list):
        return np.array([MISSING_KEY if item is None else item for item in items], dtype=np.int64)
    ids: NDArray[np.int64] = items
    return ids


class Operation(NamedTuple):
    """Takes the slots that `fetch` returns and appends the results of `call`."""

    fetch: Callable[[list[Any]], Any]
    call: Callable[..., Any]


class NumberPlace(NamedTuple):
    """Place of numbers: a row of the matrix in a slot, or all of the slot, float64[n].

    Attributes:
        slot: The slot.
        row: The row; None for all of the slot.
        rows: Number of rows of the matrix, where it is known.
    """

    slot: int
    row: int | None = None
    rows: int | None = None


class Operations:
    """Operations in the order in which they were first requested, each of them once."""

    def __init__(self, num_inputs: int) -> None:
        self._num_slots = num_inputs
        self._added: list[tuple[Sequence[int], Callable[..., Any]]] = []
        self._slots: dict[Any, int] = {}

    def ordered(self) -> list[Operation]:
        """Return all of them; the inputs of an operation may have grown after it was requested."""
        return [Operation(make_getter(reads), call) for reads, call in self._added]

    def memoize(self, key: Any, reads: Sequence[int], call: Callable[..., Sequence[Any]], outputs: int = 1) -> int:
        """Return the slot of the first output of an operation, which is added unless there is one of this `key`."""
        if key not in self._slots:
            self._slots[key] = self._num_slots
            self._added.append((reads, call))
            self._num_slots += outputs
        return self._slots[key]

    def numbers(self, slot: int) -> NumberPlace:
        """Return the numbers or integers of a slot as numbers."""
        return NumberPlace(self.memoize(("numbers", slot), [slot], single_output(as_numbers)))

    def row(self, place: NumberPlace) -> int:
        """Return the slot of one row of a matrix."""
        return self.memoize(place, [place.slot], lambda matrix: (matrix[place.row],))

    def matrix(self, places: Sequence[NumberPlace]) -> int:
        """Return the slot of a matrix float64[c, n] of the numbers at c places."""
        slots = {place.slot for place in places}
        rows = [place.row for place in places]
        first = rows[0]
        # Neighbouring rows of one matrix need no copy: they are a view of it.
        if len(slots) > 1 or first is None or rows != list(range(first, first + len(rows))):
            return self.memoize(tuple(places), [place.slot for place in places], _make_gather(rows))
        if len(rows) == places[0].rows:
            return places[0].slot
        return self.memoize(tuple(places), [*slots], lambda matrix: (matrix[first : first + len(rows)],))


def make_getter(slots: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function that returns the contents of some slots of all."""
    if len(slots) > 1:
        # In C, without a frame of Python for each operation.
        return itemgetter(*slots)
    first = slots[0] if slots else 0
    return itemgetter(slice(first, first + len(slots)))  # one slot is a sequence, too


def single_output(call: Callable[[Any], Any]) -> Callable[..., Sequence[Any]]:
    """Return `call` as an operation with one output."""
    return lambda value: (call(value),)


def _make_gather(rows: Sequence[int | None]) -> Callable[..., Sequence[Any]]:
    """Return the function that makes a matrix of one row of each of several, or of all of one where the row is None."""
    if rows == [None]:
        return lambda numbers: (numbers[None],)

    def gather(*matrices: NDArray[np.float64]) -> Sequence[Any]:
        gathered = np.empty((len(rows), matrices[0].shape[-1]))
        for place, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
            gathered[place] = matrix if row is None else matrix[row]
        return (gathered,)

    return gather


ValueReader: TypeAlias = Callable[[Any], Any]
"""Makes Python values of raw ones, or raises `InvalidValueError`."""


def value_reader(
    column_type: ColumnType, source: SourceColumn | None, cleaning: Cleaning, *, is_checked: bool
) -> ValueReader | None:
    """Return the function that reads a column of raw values; None where they need no reading.

    Args:
        column_type: Type of the result.
        source: Description of the column in files, as for `read_array`.
        cleaning: Cleaning of the items of lists.
        is_checked: Whether the next function rejects values of another kind.
    """
    is_time = source is not None and source.type == "time"
    items = None if is_checked and not is_time else _item_reader(column_type, source)
    if items is not None and not column_type.is_list:
        items = partial(_read_list, items)
    if column_type.kind == "integer" and not is_time:
        items = partial(_without_lowest, items)
    if not column_type.is_list:
        return items
    separator = None if source is None else source.separator
    return partial(_read_lists, items, cleaning if cleaning.is_needed else None, separator, column_type.max_length)


def _item_reader(column_type: ColumnType, source: SourceColumn | None) -> ValueReader:
    if source is not None and source.type == "time":
        return partial(_read_times, time_reader(source.format))
    readers: dict[str, ValueReader] = {
        "number": numbers_of_list,
        "integer": checked_integers,
        "text": checked_texts,
        "hex32": _checked_digits,
    }
    return readers[column_type.kind]


def _read_list(read: ValueReader, values: RawColumn) -> Any:
    return read(as_list(values))


def _without_lowest(read: ValueReader | None, values: Any) -> Any:
    # The steps take it as missing; see `terarec.etl.columns.without_lowest`.
    try:
        is_there = MISSING_KEY in (numpy_values(values) if isinstance(values, pa.Array) else values)
    except ValueError:  # an array among the values, which no integer column takes
        raise InvalidValueError(0) from None
    if is_there:
        raise InvalidValueError(0)
    return values if read is None else read(values)


def _checked_digits(values: list[Any]) -> list[Any]:
    for row, value in enumerate(values):
        if not (value is None or value == "" or (isinstance(value, str) and HEX_DIGITS.fullmatch(value))):
            raise InvalidValueError(row)
    return values


def _read_times(read: Callable[[Any], int], values: list[Any]) -> list[int | None]:
    try:
        return [None if value is None or value == "" else read(value) for value in values]
    except ValueError:
        # The row does not matter: the records go through the steps next, whose error names it.
        raise InvalidValueError(0) from None


def _read_lists(
    items: ValueReader | None,
    cleaning: Cleaning | None,
    separator: str | None,
    max_length: int | None,
    values: list[Any],
) -> Any:
    lists = [_listed(value, separator) for value in values]
    flat = list(chain.from_iterable(lists))
    if cleaning is not None:
        flat = cleaning.values(flat)
    lengths = list(map(len, lists))
    if max_length is not None and max(lengths, default=0) > max_length:
        raise InvalidValueError(0)
    return Ragged(flat if items is None else items(flat), list(accumulate(lengths, initial=0)))


def _listed(value: Any, separator: str | None) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value)
    if separator is None or not isinstance(value, str):
        raise InvalidValueError(0)
    return cut_text(value, separator)


class RawReading:
    """Adds the operations that read the requested raw columns."""

    def __init__(self, plan: Plan, serving: ServingPlan, operations: Operations) -> None:
        self._plan, self._types, self._operations = plan, serving.inputs, operations
        self._brought = serving.brought
        self._slots = {name: slot for slot, name in enumerate(serving.inputs)}
        self._rows: dict[str, list[int]] = {"number": [], "integer": []}

    def values(self, name: str, *, is_checked: bool) -> int:
        """Return the slot of the values of a raw column; of unread ones where the next function checks them."""
        column_type, slot = self._types[name], self._slots[name]
        if column_type == ColumnType("number"):
            return self._operations.row(self.numbers(name))
        source = self._source(name)
        cleaning = Cleaning() if source is None else Cleaning.of_records(self._plan.spec.source)
        if cleaning.is_needed:
            clean = partial(_read_list, cleaning.values)
            slot = self._operations.memoize(("clean", name), [slot], single_output(clean))
        reader = value_reader(column_type, source, cleaning, is_checked=is_checked)
        return (
            slot
            if reader is None
            else self._operations.memoize(("raw", name, is_checked), [slot], single_output(reader))
        )

    def numbers(self, name: str) -> NumberPlace:
        """Return the place of the numbers or integers of a raw column, one a row, as numbers."""
        column_type, source = self._types[name], self._source(name)
        if source is not None and source.type == "time":
            return self._operations.numbers(self.values(name, is_checked=False))
        rows, raw = self._rows[column_type.kind], self._slots[name]
        if raw not in rows:
            rows.append(raw)  # the matrix of all raw columns of the kind, which grows with the requests
        slot = self._operations.memoize(
            ("raw", column_type.kind), rows, partial(_matrix, column_type.kind == "integer")
        )
        return NumberPlace(slot, rows.index(raw))

    def _source(self, name: str) -> SourceColumn | None:
        return None if name in self._brought else self._plan.spec.source.column(name)


def _matrix(whole: bool, *columns: RawColumn) -> Sequence[Any]:
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) == len(columns):
        numbers = numbers_of_lists(lists, whole=whole).reshape(len(columns), -1)
    else:
        numbers = np.empty((len(columns), len(columns[0])))
        for row, column in zip(numbers, columns, strict=True):
            row[:] = numpy_values(column) if isinstance(column, pa.Array) else _row(whole, column)
        if np.isinf(numbers).any():
            raise InvalidValueError(0)
    if (numbers == MISSING_KEY).any():  # maybe one that stands for a missing integer, which the steps know
        raise InvalidValueError(0)
    return (numbers,)


def _row(whole: bool, column: list[Any] | NDArray[Any]) -> NDArray[Any]:
    return numbers_of_list(column, whole=whole) if isinstance(column, list) else column
