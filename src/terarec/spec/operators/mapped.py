"""What the operators share: the columns that they read and write."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class InputColumns:
    """An operator that reads `columns`, and writes them again unless a subclass says otherwise.

    Attributes:
        columns: the inputs.
    """

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        columns_named(self, "columns")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return self.columns

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return self.columns

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedColumns(InputColumns):
    """An operator that makes one output column of each input column.

    Attributes:
        columns: the inputs.
        outputs: names of what comes out, one for each input; () replaces the inputs under their own names.
    """

    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        InputColumns.__post_init__(self)
        if self.outputs:
            columns_named(self, "outputs")
            if len(self.outputs) != len(self.columns):
                checks.fail(self, "outputs", f"{len(self.columns)} names, one for each of columns")

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.outputs or self.columns

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Each input and what is made of it."""
        return tuple(zip(self.columns, self.outputs or self.columns, strict=True))


def columns_named(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is a tuple of at least one column name, all distinct."""
    value = getattr(owner, field)
    if not isinstance(value, tuple) or not value or not all(isinstance(name, str) and name for name in value):
        checks.fail(owner, field, "a tuple of at least one column name")
    checks.distinct(owner, field, value)


def column_named(owner: object, field: str) -> None:
    """Raise unless ``owner.field`` is the name of a column."""
    value = getattr(owner, field)
    if not isinstance(value, str) or not value:
        checks.fail(owner, field, "the name of a column")
