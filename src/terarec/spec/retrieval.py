"""How items are searched for those with the largest dot products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terarec.spec import checks

SearchMethod = Literal["auto", "exact", "graph"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemIndexSpec:
    """Search of the items whose vectors have the largest dot products with a query.

    Attributes:
        method: "exact" for all products; "graph" for a graph of near neighbours (HNSW), which finds most of the best
            items in a fraction of the time; "auto" for the exact one up to `exact_items`.
        exact_items: Most items that "auto" searches exactly.
        neighbors: Neighbours of an item in the graph.
        build_effort: Candidates for the neighbours of an item while the graph is built.
        search_effort: Candidates of a search in the graph, at least as many as items are asked for.
    """

    method: SearchMethod = "auto"
    exact_items: int = 50_000
    neighbors: int = 32
    build_effort: int = 40
    search_effort: int = 300

    def __post_init__(self) -> None:
        checks.one_of(self, "method", ("auto", "exact", "graph"))
        checks.positive_int(self, "exact_items", minimum=0)
        checks.positive_int(self, "neighbors", minimum=2)
        checks.positive_int(self, "build_effort")
        checks.positive_int(self, "search_effort")
