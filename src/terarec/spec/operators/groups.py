"""Operators that look at other rows, or at another table. See docs/workflows.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from terarec.spec import checks
from terarec.spec.operators.mapped import InputColumns, MappedColumns, column_named, columns_named

GroupStatistic = Literal["count", "sum", "mean", "std", "min", "max"]
_STATISTICS = ("count", "sum", "mean", "std", "min", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinGroupby(InputColumns):
    """Statistics of the training rows that have a row's value: ``<column>_count``, ``<column>_<value>_<statistic>``.

    Attributes:
        columns: each is grouped by on its own (for several together, `Cross` them first).
        values: number or integer columns that the statistics but ``count`` are of; never read at serving.
        statistics: of "count", "sum", "mean", "std" (the population's), "min", "max".
    """

    kind: ClassVar[str] = "join_groupby"
    values: tuple[str, ...] = ()
    statistics: tuple[GroupStatistic, ...] = ("count",)

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        if self.values:
            columns_named(self, "values")
        if not self.statistics or any(statistic not in _STATISTICS for statistic in self.statistics):
            checks.fail(self, "statistics", f"some of {', '.join(map(repr, _STATISTICS))}")
        checks.distinct(self, "statistics", self.statistics)
        if bool(self.values) is (self.statistics == ("count",)):
            checks.reject(self, "values", "expected columns exactly where a statistic other than 'count' is asked")
        checks.distinct(self, "columns", self.writes)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return tuple(dict.fromkeys((*self.columns, *self.values)))

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds: column by column, ``count`` first, then value by value its statistics."""
        named: list[str] = []
        for column in self.columns:
            named += [f"{column}_count"] if "count" in self.statistics else []
            others = [statistic for statistic in self.statistics if statistic != "count"]
            named += [f"{column}_{value}_{statistic}" for value in self.values for statistic in others]
        return tuple(named)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedColumns(MappedColumns):
    """An operator whose outputs are of earlier rows of the same group.

    Attributes:
        group: the column whose equal values make a group.
        order: an integer or number column, mostly a time.
    """

    group: str
    order: str

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        column_named(self, "group")
        column_named(self, "order")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return tuple(dict.fromkeys((*self.columns, self.group, self.order)))

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served: the record brings what the step would make."""
        return self.writes


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceLag(GroupedColumns):
    """x - (the x of the row that is `lag` rows before in the same group, by rising `order`, then row id).

    Attributes:
        group: the column whose equal values make a group; a row with a missing one has a missing difference.
        lag: how many rows before; the first ones of a group are missing.
    """

    kind: ClassVar[str] = "difference_lag"
    lag: int = 1

    def __post_init__(self) -> None:
        GroupedColumns.__post_init__(self)
        checks.positive_int(self, "lag")


@dataclass(frozen=True, kw_only=True, slots=True)
class History(GroupedColumns):
    """The list of the x of earlier rows of the same group: those with a strictly lower `order`, oldest first.

    Attributes:
        group: the column whose equal values make a group; a row with a missing one has an empty history.
        max_length: only so many last values.
    """

    kind: ClassVar[str] = "history"
    max_length: int

    def __post_init__(self) -> None:
        GroupedColumns.__post_init__(self)
        checks.positive_int(self, "max_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTable:
    """Adds `columns` of the row of a side table whose `on` equals the row's; missing where there is none.

    Attributes:
        table: its name in ``WorkflowSpec.tables``.
        on: the column of that name, of one type, on both sides; distinct in the side table.
        columns: of the side table.
    """

    kind: ClassVar[str] = "join_table"
    table: str
    on: str
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.name(self, "table")
        column_named(self, "on")
        columns_named(self, "columns")
        if self.on in self.columns:
            checks.fail(self, "columns", f"columns other than {self.on!r}, which both sides have")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return (self.on,)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return (self.on,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.columns
