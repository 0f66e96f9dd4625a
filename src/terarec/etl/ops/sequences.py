# SPDX-License-Identifier: Apache-2.0
"""Operators on sequences: the lists of a row, and the earlier rows of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

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
from terarec.etl.ops.columns import KeepRows
from terarec.etl.ops.states import State
from terarec.etl.ops.values import RecordFunction, ValueLists, accepted_list, each, joined
from terarec.ragged import offsets_of
from terarec.spec import checks
from terarec.spec.dataset import MISSING_KEY
from terarec.spec.registry import register


@register("list_slice")
@dataclass(frozen=True, kw_only=True)
class ListSlice(MappedColumns):
    """``items[start:stop]`` of each list, as Python has it: negative positions count from the end.

    Attributes:
        start: Position of the first item that is kept.
        stop: Position after the last one; None for the end of the list.
    """

    takes_lists: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    start: checks.Int64 = 0
    stop: checks.Int64 | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop is not None and (self.start < 0) is (self.stop < 0) and self.stop <= self.start:
            checks.fail(self, "stop", f"a position above start, {self.start}")

    @property
    def max_length(self) -> int | None:
        """Length of the longest output, None without a bound."""
        if self.stop is None:
            return -self.start if self.start < 0 else None
        if self.start < 0 <= self.stop:
            return min(-self.start, self.stop)
        return self.stop - self.start if (self.start < 0) is (self.stop < 0) else None

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        types_of_outputs = {}
        for name, output in self.pairs:
            column_type = self.input_type(types, name)
            bounds = [bound for bound in (column_type.max_length, self.max_length) if bound is not None]
            types_of_outputs[output] = ColumnType(column_type.kind, True, min(bounds, default=None))
        return types_of_outputs

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        return [
            RecordFunction((name,), (output,), partial(self._convert, types[name].kind)) for name, output in self.pairs
        ]

    def _convert(self, kind: Kind, lists: ValueLists) -> Sequence[Any]:
        return (joined([items[self.start : self.stop] for items in each(lists)], kind),)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            lengths = list_lengths(array)
            begins = offsets_of(lengths)[:-1]
            first = _position(self.start, lengths)
            last = lengths if self.stop is None else _position(self.stop, lengths)
            offsets = offsets_of(np.maximum(last - first, 0))
            # The place of each kept item among all: the first of its list's slice, plus its position in the slice.
            items = np.repeat(begins + first - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
            outputs[output] = lists_of(flat(array).take(array_of(items)), offsets)
        return rows.with_columns(outputs)


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
    has_missing_id: ClassVar[bool] = True
    length: checks.Width
    value: float | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value, str):
            checks.finite_float(self, "value")
        elif not self.value:
            checks.fail(self, "value", "a number or a text that is not empty")

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        types_of_outputs = {}
        for name, output in self.pairs:
            column_type = self.input_type(types, name)
            value = value_of(column_type.kind, self.value, f"column {name!r}")
            if column_type.kind == "id" and value < 0:
                raise ConfigError(f"column {name!r}", f"got {self.value!r}, expected an id >= 0")
            types_of_outputs[output] = ColumnType(column_type.kind, True, self.length)
        return types_of_outputs

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        # The padding may be an id that no value has.
        return {output: max(rows[name], int(self.value) + 1) for name, output in self.pairs if name in rows}

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        return [
            RecordFunction((name,), (output,), partial(self._convert, types[name].kind)) for name, output in self.pairs
        ]

    def _convert(self, kind: Kind, lists: ValueLists) -> Sequence[Any]:
        length = self.length
        padding = [self.value if kind == "hex32" else value_of(kind, self.value)] * length
        return (joined([[*items[:length], *padding[len(items) :]] for items in each(lists)], kind),)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            values, lengths, places = flat(array), list_lengths(array), np.arange(self.length)
            if kind_of(array) == "id" and float(self.value) >= 2**31:  # vocabularies give ids of 32 bits
                values = array_of(numpy_values(values).astype(np.int64), are_ids=True)
            # The padding is one more value behind the others.
            items = offsets_of(lengths)[:-1, None] + places
            items = np.where(places < lengths[:, None], items, len(values)).ravel()
            padding = pa.array([value_of(kind_of(array), self.value)]).cast(values.type)
            offsets = np.arange(len(array) + 1, dtype=np.int64) * self.length
            outputs[output] = lists_of(pa.concat_arrays([values, padding]).take(array_of(items)), offsets)
        return rows.with_columns(outputs)


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
    @override
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.columns, self.columns, strict=True))

    @override
    def restricted_to(self, needed: set[str]) -> Explode:
        return replace(self, columns=tuple(name for name in self.columns if name in needed) or self.columns[:1])

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        return {name: ColumnType(self.input_type(types, name).kind) for name in self.columns}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Make a row of every item, other columns repeated.

        Raises:
            RowFaultError: The lists of a row differ in length, or one has more than 65,536 items.
        """
        first = self.columns[0]
        lengths = list_lengths(rows.columns[first])
        for name in self.columns[1:]:
            own_lengths = list_lengths(rows.columns[name])
            if (wrong := own_lengths != lengths).any():
                raise _rejected(rows, name, own_lengths, wrong, accepted_length(first))
        if (long := lengths > MAX_ITEMS).any():
            raise _rejected(rows, first, lengths, long, accepted_list(MAX_ITEMS))
        others = [name for name in rows.columns if name not in self.columns]
        # The lists themselves are not repeated, as their items are the new values.
        repeated = rows.select(others).take(np.repeat(np.arange(len(lengths)), lengths))
        offsets = offsets_of(lengths)
        items = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = {name: flat(rows.columns[name]) for name in self.columns}
        columns, ids = {**repeated.columns, **values}, (repeated.ids << ITEM_BITS) | items
        return replace(repeated, columns=columns, ids=ids)


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
    # Times that differ in their parts of a second alone differ, too.
    parts = rows.nanoseconds.get(order, np.zeros(rows.num_rows, dtype=np.int32))[placed]
    # `lexsort` sorts by its last argument first.
    sequence = np.lexsort((rows.ids[placed], parts, ranks, codes))
    codes, ranks, parts = codes[sequence], ranks[sequence], parts[sequence]
    starts_group = np.ones(len(placed), dtype=np.bool_)
    starts_group[1:] = codes[1:] != codes[:-1]
    starts_tie = starts_group.copy()
    starts_tie[1:] |= (ranks[1:] != ranks[:-1]) | (parts[1:] != parts[:-1])
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

    group: checks.ColumnName
    order: checks.ColumnName

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.columns, self.group, self.order)))

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        # None: the record has the step's outputs.
        return self.writes

    @override
    def late_rows(self, rows: Rows) -> NDArray[np.int64]:
        groups = row_groups(rows, self.group, self.order)
        if not len(groups.rows):
            return groups.rows
        places, ids = np.arange(len(groups.rows)), rows.ids[groups.rows]
        # The last carried row of each group, repeated for its rows.
        starts = np.unique(groups.group_begins)
        last = np.maximum.reduceat(np.where(ids < 0, places, -1), starts)
        lengths = np.diff(starts, append=len(groups.rows))
        return np.sort(groups.rows[(ids >= 0) & (places < np.repeat(last, lengths))])

    def _carried(self, rows: Rows, length: int, *, before_ties: bool) -> NDArray[np.int64]:
        """Return the positions of the last row of each group, and of the last ones with items for `length` places."""
        groups, is_item = row_groups(rows, self.group, self.order), self._are_items(rows)
        if not len(groups.rows):
            return groups.rows
        places, starts = np.arange(len(groups.rows)), np.unique(groups.group_begins)
        ends = np.append(starts[1:], len(groups.rows))
        lengths = ends - starts
        numbers = _numbers(groups, is_item)
        last = np.repeat(ends, lengths)
        is_carried = is_item[groups.rows] & (numbers[:-1] >= numbers[last] - length)
        if before_ties:
            ties = np.repeat(groups.tie_begins[ends - 1], lengths)
            is_carried |= is_item[groups.rows] & (numbers[:-1] >= numbers[ties] - length) & (places < ties)
        # By the last one later rows are found that come too late.
        is_carried[ends - 1] = True
        return np.sort(groups.rows[is_carried])

    def _are_items(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows other ones of their group look at, bool[n]."""
        return np.ones(rows.num_rows, dtype=np.bool_)

    def _check_group(self, types: ColumnTypes) -> None:
        scalar_input(types, self.group, ("text", "integer", "hex32"))
        scalar_input(types, self.order, ("integer", "number"))


_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


@register("difference_lag")
@dataclass(frozen=True, kw_only=True)
class DifferenceLag(GroupedColumns):
    """x - (the x of the row that is `lag` rows before in the same group, by rising `order`, then row id).

    Attributes:
        group: Column whose equal values make a group; a row with a missing one has a missing difference.
        lag: Number of rows between the two; the first ones of a group are missing.
        unit: Unit of the difference of times, as the source has them: "s", "ms", "us" or "ns". It is exact, and rounded
            down to whole units. None for columns of any numbers; of times it is "s". Differences beyond 64 bits are
            missing: in "ns" those of more than 292 years.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    carries_rows: ClassVar[bool] = True
    lag: checks.Width = 1
    unit: Literal["s", "ms", "us", "ns"] | None = None

    @property
    @override
    def reads_times(self) -> tuple[str, ...]:
        return () if self.unit is None else self.columns

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        self._check_group(types)
        return {output: scalar_input(types, name, self.accepted) for name, output in self.pairs}

    @override
    def carried_rows(self, rows: Rows) -> NDArray[np.int64]:
        # The last `lag` rows of each group.
        return self._carried(rows, self.lag, before_ties=False)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        groups = row_groups(rows, self.group, self.order)
        places = np.arange(len(groups.rows)) - self.lag
        # `places` before the begin belong to another group, or to none.
        has_one = places >= groups.group_begins
        later, earlier = groups.rows[has_one], groups.rows[places[has_one]]
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            values, missing = numpy_values(array), is_missing(array)
            absent = np.ones(rows.num_rows, dtype=np.bool_)
            absent[later] = missing[later] | missing[earlier]
            difference = np.zeros_like(values)
            difference[later] = values[later] - values[earlier]
            if kind_of(array) == "integer":  # whose difference wraps around where it has not the sign of the order
                absent[later] |= (difference[later] < 0) != (values[later] < values[earlier])
                absent[later] |= difference[later] == MISSING_KEY
            if name in rows.nanoseconds or self.unit is not None:
                per_second = _PER_SECOND[self.unit or "s"]
                parts = rows.nanoseconds.get(name, np.zeros(rows.num_rows, dtype=np.int32)).astype(np.int64)
                most = np.iinfo(np.int64).max // per_second - 1  # with room for the parts
                absent[later] |= (difference[later] > most) | (difference[later] < -most)
                difference[later] *= per_second
                difference[later] += (parts[later] - parts[earlier]) // (_PER_SECOND["ns"] // per_second)
            if kind_of(array) == "number":
                difference[absent] = np.nan
            outputs[output] = array_of(difference, absent)
        return rows.with_columns(outputs)


def _numbers(groups: RowGroups, is_item: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many of the sorted rows before each place are items, int64[k + 1]."""
    return offsets_of(is_item[groups.rows].astype(np.int64))


@register("history")
@dataclass(frozen=True, kw_only=True)
class History(GroupedColumns):
    """The list of the x of earlier rows of the same group: those with a strictly lower `order`, oldest first.

    Attributes:
        group: Column whose equal values make a group; a row with a missing one has an empty history.
        max_length: Number of last values that are kept.
        where: Column that chooses the rows whose x is in lists, such as an event or a label; None for all. The others
            have lists, too.
        values: Texts of that column, as in `KeepRows`.
        at_least: Lowest number of that column.
        at_most: Highest number of that column.
    """

    keeps_values: ClassVar[bool] = True
    carries_rows: ClassVar[bool] = True
    max_length: checks.Width
    where: str | None = None
    values: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where is None and (self.values, self.at_least, self.at_most) != ((), None, None):
            checks.reject(self, "where", "got none, expected the column that values, at_least and at_most are of")
        _ = self._condition

    @property
    def _condition(self) -> KeepRows | None:
        if self.where is None:
            return None
        return KeepRows(column=self.where, values=self.values, at_least=self.at_least, at_most=self.at_most)

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().reads, *([] if self.where is None else [self.where]))))

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        self._check_group(types)
        if (condition := self._condition) is not None:
            condition.output_types(types)
        return {
            output: ColumnType(scalar_input(types, name, self.accepted).kind, True, self.max_length)
            for name, output in self.pairs
        }

    @override
    def carried_rows(self, rows: Rows) -> NDArray[np.int64]:
        # The last `max_length` items of each group, and as many before those of its last order.
        # A later row of that order sees the ones before it alone.
        return self._carried(rows, self.max_length, before_ties=True)

    @override
    def _are_items(self, rows: Rows) -> NDArray[np.bool_]:
        condition = self._condition
        return super()._are_items(rows) if condition is None else condition.kept(rows)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        groups, is_item = row_groups(rows, self.group, self.order), self._are_items(rows)
        numbers = _numbers(groups, is_item)
        # Up to the first row of the same order: rows of one moment do not see each other.
        ends = numbers[groups.tie_begins]
        begins = np.maximum(numbers[groups.group_begins], ends - self.max_length)
        lengths, firsts = np.zeros(rows.num_rows, dtype=np.int64), np.zeros(rows.num_rows, dtype=np.int64)
        lengths[groups.rows], firsts[groups.rows] = ends - begins, begins
        offsets = offsets_of(lengths)
        sources = groups.rows[is_item[groups.rows]]
        items = array_of(sources[np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])])
        return rows.with_columns(
            {output: lists_of(rows.columns[name].take(items), offsets) for name, output in self.pairs}
        )
