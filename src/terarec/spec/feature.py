"""What a feature is: an input column that looks a table up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.spec import checks

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """An input column whose keys look up one table; several features may share a table.

    Attributes:
        name: unique among the features of a model; the name of the data set's categorical column.
        table: name of the table.
        pooling: how the vectors of a bag become one: "sum", "mean" (an empty bag gives zeros), or "none", which
            leaves them as a sequence.
    """

    name: str
    table: str
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        checks.name(self)
        checks.name(self, "table")
        checks.one_of(self, "pooling", ("sum", "mean", "none"))
