"""Operators on earlier rows of the same group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import ColumnType, Rows, array_of, is_missing, kind_of, lists_of, numpy_values
from terarec.etl.ops.base import (
    ColumnTypes,
    MappedColumns,
    Stage,
    State,
    check_column,
    scalar_input,
)
from terarec.ragged import offsets_of
from terarec.spec import checks, register


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
        check_column(self, "group")
        check_column(self, "order")

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
        begins = np.maximum(groups.group_begins, groups.tie_begins - self.max_length)
        lengths, firsts = np.zeros(rows.num_rows, dtype=np.int64), np.zeros(rows.num_rows, dtype=np.int64)
        lengths[groups.rows], firsts[groups.rows] = groups.tie_begins - begins, begins
        offsets = offsets_of(lengths)
        items = array_of(groups.rows[np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])])
        return rows.with_columns(
            {output: lists_of(rows.columns[name].take(items), offsets) for name, output in self.pairs}
        )
