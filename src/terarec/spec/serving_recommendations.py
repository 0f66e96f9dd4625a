# SPDX-License-Identifier: Apache-2.0
"""Recommendations that a server answers: which of its models retrieve and rank which items."""

from __future__ import annotations

from dataclasses import dataclass, field

from terarec.spec import checks
from terarec.spec.serving import ItemIndexSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendationSpec:
    """Recommendations of a server.

    Attributes:
        items: File of the raw columns of all items: .parquet, .csv or .jsonl. It is read again when it changes.
        key: Column that identifies items, of integers or texts.
        retrieval: Name of the served model that retrieves candidates: two towers, or a model of sequences.
        ranker: Name of the served model that puts the candidates in order; None for the order of the candidates.
        score: Name of the score to rank by; None for the first one of the ranking model.
        index: Search method and its settings.
        index_dir: Directory that keeps the index; None to compute it at each start.
        candidates: Number of items that are retrieved for the ranking model, unless a request states one.
        most_items: Limit of the items for a user.
        most_candidates: Limit of the candidates for a user.
        poll_seconds: Seconds between two looks for another version of the retrieval model, or other items.
    """

    items: str
    key: str
    retrieval: str = "model"
    ranker: str | None = None
    score: str | None = None
    index: ItemIndexSpec = field(default_factory=ItemIndexSpec)
    index_dir: str | None = None
    candidates: int = 200
    most_items: int = 1000
    most_candidates: int = 10_000
    poll_seconds: float = 1.0

    def __post_init__(self) -> None:
        checks.column_name(self, "key")
        checks.name(self, "retrieval")
        if self.ranker is not None:
            checks.name(self, "ranker")
        elif self.score is not None:
            checks.reject(self, "score", f"got {self.score!r} without a ranker, expected both or none")
        checks.instance(self, "index", ItemIndexSpec, "ItemIndexSpec(...)")
        for name in ("most_items", "most_candidates"):
            checks.positive_int(self, name, maximum=checks.MOST_BATCH)
        checks.positive_int(self, "candidates", maximum=self.most_candidates)
        checks.finite_float(self, "poll_seconds", low=0.0, open_low=True)
