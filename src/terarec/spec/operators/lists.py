"""Operators on columns of lists. See docs/workflows.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks
from terarec.spec.operators.mapped import InputColumns, MappedColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSlice(MappedColumns):
    """``items[start:stop]`` of each list, as Python has it: negative positions count from the end."""

    kind: ClassVar[str] = "list_slice"
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        checks.int64(self, "start")
        if self.stop is not None:
            checks.int64(self, "stop")
            if (self.start < 0) is (self.stop < 0) and self.stop <= self.start:
                checks.fail(self, "stop", f"a position above start, {self.start}")

    @property
    def max_length(self) -> int | None:
        """The longest list that can come out, None without a bound."""
        if self.stop is None:
            return -self.start if self.start < 0 else None
        if self.start < 0 <= self.stop:
            return min(-self.start, self.stop)
        return self.stop - self.start if (self.start < 0) is (self.stop < 0) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pad(MappedColumns):
    """Lists of exactly `length` items: longer ones lose their last items, shorter ones end in `value`.

    Attributes:
        length: of every list.
        value: a number for numbers, integers and ids (0 is the id of a missing value), a text for text.
    """

    kind: ClassVar[str] = "pad"
    length: int
    value: float | str

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        checks.positive_int(self, "length")
        if not isinstance(self.value, str):
            checks.finite_float(self, "value")
        elif not self.value:
            checks.fail(self, "value", "a number or a text that is not empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explode(InputColumns):
    """A row for every item of the lists of `columns`, which have equal lengths in a row; an empty list gives no row.

    Item i of row r has the row id ``r << 16 | i``. A served record is one item already.
    """

    kind: ClassVar[str] = "explode"
