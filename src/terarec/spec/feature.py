"""What a feature is: an input column that looks a table up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.spec import checks

Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """An input column whose keys look up one table; several features may share a table.

    Attributes:
        name: unique among the features of a model; the name of the data set's categorical column.
        table: name of the table.
        pooling: how the vectors of a bag become one: "sum", "mean", "sqrtn" (the sum divided by the root of the number
            of keys) or "max" (column by column); an empty bag gives zeros. "none" leaves them as a sequence.
        max_keys: only so many first keys of each bag count; None for all.
    """

    name: str
    table: str
    pooling: Pooling = "sum"
    max_keys: int | None = None

    def __post_init__(self) -> None:
        checks.name(self)
        checks.name(self, "table")
        checks.one_of(self, "pooling", ("sum", "mean", "sqrtn", "max", "none"))
        if self.max_keys is not None:
            checks.positive_int(self, "max_keys")
