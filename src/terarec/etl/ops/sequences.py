"""Operators on sequences: the lists of a row, and the earlier rows of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import (
    REJECTED_SHOWN,
    ColumnType,
    Kind,
    RowFaultError,
    Rows,
    array_of,
    flat,
    is_missing,
    kind_of,
    list_lengths,
    lists_of,
    numpy_values,
)
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes, MappedColumns, Stage, scalar_input, value_of
from terarec.etl.ops.states import State
from terarec.etl.ops.values import RecordFunction, ValueLists, accepted_list, each, joined
from terarec.ragged import offsets_of
from terarec.spec import checks, register


@register("list_slice")
@dataclass(frozen=True, kw_only=True)
class ListSlice(MappedColumns):
    """``items[start:stop]`` of each list, as Python has it: negative positions count from the end."""

    takes_lists: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.int64(self, "start")
        if self.stop is not None:
            checks.int64(self, "stop")
            if (self.start < 0) is (self.stop < 0) and self.stop <= self.start:
                checks.fail(self, "stop", f"a position above start, {self.start}")

    @property
    def max_length(self) -> int | None:
        """Length of the longest output, None without a bound."""
        if self.stop is None:
            return -self.start if self.start < 0 else None
        if self.start < 0 <= self.stop:
            return min(-self.start, self.stop)
        return self.stop - self.start if (self.start < 0) is (self.stop < 0) else None

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return lists, of a bounded length where the slice or the input has one."""
        made = {}
        for name, output in self.pairs:
            found = self.input_type(types, name)
            bounds = [bound for bound in (found.max_length, self.max_length) if bound is not None]
            made[output] = ColumnType(found.kind, True, min(bounds, default=None))
        return made

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions of Python lists."""
        return [
            RecordFunction((name,), (output,), partial(self._convert, types[name].kind)) for name, output in self.pairs
        ]

    def _convert(self, kind: Kind, lists: ValueLists) -> Sequence[Any]:
        return (joined([items[self.start : self.stop] for items in each(lists)], kind),)

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Slice the lists."""
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            lengths = list_lengths(array)
            begins = offsets_of(lengths)[:-1]
            first = _position(self.start, lengths)
            last = lengths if self.stop is None else _position(self.stop, lengths)
            offsets = offsets_of(np.maximum(last - first, 0))
            # The place of each kept item among all: the first of its list's slice, plus its position in the slice.
            items = np.repeat(begins + first - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
            made[output] = lists_of(flat(array).take(array_of(items)), offsets)
        return rows.with_columns(made)


def _position(position: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of a Python `position` in lists of these lengths."""
    if position < 0:
        return np.maximum(lengths + position, 0)
    return np.minimum(lengths, position)


@register("pad")
@dataclass(frozen=True, kw_only=True)
class Pad(MappedColumns):
    """Lists of exactly `length` items: longer ones lose their last items, shorter ones end in `value`.

    Attributes:
        length: Length of every list.
        value: A number for numbers, integers and ids (0 is the id of a missing value), a text for text.
    """

    takes_lists: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    length: int
    value: float | str

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "length")
        if not isinstance(self.value, str):
            checks.finite_float(self, "value")
        elif not self.value:
            checks.fail(self, "value", "a number or a text that is not empty")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return lists of `length`."""
        made = {}
        for name, output in self.pairs:
            found = self.input_type(types, name)
            value = value_of(found.kind, self.value, f"column {name!r}")
            if found.kind == "id" and value < 0:
                raise ConfigError(f"column {name!r}", f"got {self.value!r}, expected an id >= 0")
            made[output] = ColumnType(found.kind, True, self.length)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Return those of the inputs, the padding included."""
        # The padding may be an id that no value has.
        return {output: max(rows[name], int(self.value) + 1) for name, output in self.pairs if name in rows}

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions of Python lists."""
        return [
            RecordFunction((name,), (output,), partial(self._convert, types[name].kind)) for name, output in self.pairs
        ]

    def _convert(self, kind: Kind, lists: ValueLists) -> Sequence[Any]:
        length = self.length
        padding = [self.value if kind == "hex32" else value_of(kind, self.value)] * length
        return (joined([[*items[:length], *padding[len(items) :]] for items in each(lists)], kind),)

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Cut the lists, or pad them at the end."""
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            values, lengths, places = flat(array), list_lengths(array), np.arange(self.length)
            # The padding is one more value behind the others.
            items = offsets_of(lengths)[:-1, None] + places
            items = np.where(places < lengths[:, None], items, len(values)).ravel()
            padding = pa.array([value_of(kind_of(array), self.value)]).cast(values.type)
            offsets = np.arange(len(array) + 1, dtype=np.int64) * self.length
            made[output] = lists_of(pa.concat_arrays([values, padding]).take(array_of(items)), offsets)
        return rows.with_columns(made)


ITEM_BITS = 16
"""Bits of a row id that hold the position of the item."""
MAX_ITEMS = 1 << ITEM_BITS


@register("explode")
@dataclass(frozen=True, kw_only=True)
class Explode(ColumnsOperator):
    """A row for every item of the lists of `columns`, which have equal lengths in a row; an empty list gives no row.

    Item i of row r has the row id ``r << 16 | i``. A served record is one item already.
    """

    stage: ClassVar[Stage] = "rows"
    takes_lists: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    may_reject: ClassVar[bool] = True
    explodes: ClassVar[bool] = True

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Each input, which the items replace."""
        return tuple(zip(self.columns, self.columns, strict=True))

    def restricted_to(self, needed: set[str]) -> Explode:
        """Return the operator on the `needed` columns, or on the first to make the rows."""
        return replace(self, columns=tuple(name for name in self.columns if name in needed) or self.columns[:1])

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of the items."""
        return {name: ColumnType(self.input_type(types, name).kind) for name in self.columns}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Make a row of every item, other columns repeated.

        Raises:
            RowFaultError: The lists of a row differ in length, or one has more than 65,536 items.
        """
        first = self.columns[0]
        lengths = list_lengths(rows.columns[first])
        for name in self.columns[1:]:
            found = list_lengths(rows.columns[name])
            if (wrong := found != lengths).any():
                raise _rejected(rows, name, found, wrong, accepted_length(first))
        if (long := lengths > MAX_ITEMS).any():
            raise _rejected(rows, first, lengths, long, accepted_list(MAX_ITEMS))
        others = [name for name in rows.columns if name not in self.columns]
        # The lists themselves are not repeated, as their items are the new values.
        repeated = rows.select(others).take(np.repeat(np.arange(len(lengths)), lengths))
        offsets = offsets_of(lengths)
        items = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = {name: flat(rows.columns[name]) for name in self.columns}
        return Rows({**repeated.columns, **values}, (repeated.ids << ITEM_BITS) | items, repeated.split)


def accepted_length(first: str) -> str:
    """Describe the length of a list next to that of the column `first`."""
    return f"as many items as in column {first!r}"


def _rejected(
    rows: Rows, name: str, lengths: NDArray[np.int64], wrong: NDArray[np.bool_], accepted: str
) -> RowFaultError:
    """Return the error for lists of these `lengths` in `wrong` rows, which should be `accepted`."""
    got = [f"got a list of {length}" for length in lengths[wrong][:REJECTED_SHOWN].tolist()]
    return RowFaultError(name, rows.ids[wrong], got, accepted)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The k of n rows that have a group and a place in it, sorted by group, then by order, then by row id.

    Attributes:
        rows: int64[k], positions of the sorted rows.
        group_begins: int64[k], where in `rows` the group of each begins.
        tie_begins: int64[k], where the rows of its group and order begin.
    """

    rows: NDArray[np.int64]
    group_begins: NDArray[np.int64]
    tie_begins: NDArray[np.int64]


def row_groups(rows: Rows, group: str, order: str) -> RowGroups:
    """Sort the rows of whole groups; rows that lack `group` or `order` are left out."""
    groups, orders = rows.columns[group], rows.columns[order]
    placed = np.flatnonzero(~(is_missing(groups) | is_missing(orders)))
    codes, ranks = _codes(groups)[placed], numpy_values(orders)[placed]
    # `lexsort` sorts by its last argument first.
    sequence = np.lexsort((rows.ids[placed], ranks, codes))
    codes, ranks = codes[sequence], ranks[sequence]
    starts_group = np.ones(len(placed), dtype=np.bool_)
    starts_group[1:] = codes[1:] != codes[:-1]
    starts_tie = starts_group.copy()
    starts_tie[1:] |= ranks[1:] != ranks[:-1]
    return RowGroups(placed[sequence], _begins(starts_group), _begins(starts_tie))


def _codes(groups: pa.Array) -> NDArray[np.generic]:
    """Return a number for each of the n values, equal where they are equal."""
    if kind_of(groups) != "text":
        return numpy_values(groups)
    codes: NDArray[np.int32] = groups.dictionary_encode().indices.fill_null(-1).to_numpy()
    return codes


def _begins(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))


@dataclass(frozen=True, kw_only=True)
class GroupedColumns(MappedColumns):
    """Base of operators on earlier rows of the same group.

    Attributes:
        group: Column whose equal values make a group.
        order: An integer or number column, mostly a time.
    """

    stage: ClassVar[Stage] = "grouped"

    group: str
    order: str

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.column_name(self, "group")
        checks.column_name(self, "order")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return tuple(dict.fromkeys((*self.columns, self.group, self.order)))

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: none, since the record has the step's outputs."""
        return self.writes

    def _check_group(self, types: ColumnTypes) -> None:
        scalar_input(types, self.group, ("text", "integer", "hex32"))
        scalar_input(types, self.order, ("integer", "number"))


@register("difference_lag")
@dataclass(frozen=True, kw_only=True)
class DifferenceLag(GroupedColumns):
    """x - (the x of the row that is `lag` rows before in the same group, by rising `order`, then row id).

    Attributes:
        group: Column whose equal values make a group; a row with a missing one has a missing difference.
        lag: Number of rows between the two; the first ones of a group are missing.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    lag: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "lag")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of the inputs."""
        self._check_group(types)
        return {output: scalar_input(types, name, self.accepted) for name, output in self.pairs}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Subtract the x of ``lag`` rows before."""
        groups = row_groups(rows, self.group, self.order)
        places = np.arange(len(groups.rows)) - self.lag
        # `places` before the begin belong to another group, or to none.
        has_one = places >= groups.group_begins
        later, earlier = groups.rows[has_one], groups.rows[places[has_one]]
        made = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            values, missing = numpy_values(array), is_missing(array)
            absent = np.ones(rows.num_rows, dtype=np.bool_)
            absent[later] = missing[later] | missing[earlier]
            difference = np.zeros_like(values)
            difference[later] = values[later] - values[earlier]
            if kind_of(array) == "number":
                difference[absent] = np.nan
            made[output] = array_of(difference, absent)
        return rows.with_columns(made)


@register("history")
@dataclass(frozen=True, kw_only=True)
class History(GroupedColumns):
    """The list of the x of earlier rows of the same group: those with a strictly lower `order`, oldest first.

    Attributes:
        group: Column whose equal values make a group; a row with a missing one has an empty history.
        max_length: Number of last values that are kept.
    """

    keeps_values: ClassVar[bool] = True
    max_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_int(self, "max_length")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return lists."""
        self._check_group(types)
        return {
            output: ColumnType(scalar_input(types, name, self.accepted).kind, True, self.max_length)
            for name, output in self.pairs
        }

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """List the values of the last ``max_length`` rows before those of a row's order."""
        groups = row_groups(rows, self.group, self.order)
        # Up to the first row of the same order: rows of one moment do not see each other.
        begins = np.maximum(groups.group_begins, groups.tie_begins - self.max_length)
        lengths, firsts = np.zeros(rows.num_rows, dtype=np.int64), np.zeros(rows.num_rows, dtype=np.int64)
        lengths[groups.rows], firsts[groups.rows] = groups.tie_begins - begins, begins
        offsets = offsets_of(lengths)
        items = array_of(groups.rows[np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])])
        return rows.with_columns(
            {output: lists_of(rows.columns[name].take(items), offsets) for name, output in self.pairs}
        )
