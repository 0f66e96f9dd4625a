"""How items are searched for those with the largest dot products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.spec import checks

SearchMethod = Literal["auto", "exact", "lists"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemIndexSpec:
    """Search of the items whose vectors have the largest dot products with a query.

    Attributes:
        method: "exact" for all products; "lists" for inverted lists, which find most of the best items in a fraction
            of the time; "auto" for the exact one up to `exact_items`.
        exact_items: Most items that "auto" searches exactly.
        lists: Lists that the items are divided into; None for four times the root of their number.
        probes: Lists that a search reads, those nearest to a query; None for a sixteenth of them.
    """

    method: SearchMethod = "auto"
    exact_items: int = 50_000
    lists: int | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        checks.one_of(self, "method", ("auto", "exact", "lists"))
        checks.positive_int(self, "exact_items", minimum=0)
        for name in ("lists", "probes"):
            if getattr(self, name) is not None:
                checks.positive_int(self, name)
