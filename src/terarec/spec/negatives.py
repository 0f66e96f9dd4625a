# SPDX-License-Identifier: Apache-2.0
"""How items that a user does not have are drawn for a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from terarec.spec import checks

Draw = Literal["uniform", "popularity", "batch", "mixed", "hard", "column"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativesSpec:
    """Items that are drawn for a loss, none of them an item of the user.

    Attributes:
        count: Number that is drawn: for each positive item, or for a batch where all of its samples share them.
        draw: "uniform": from all items; "popularity": in proportion to (1 + the number of times that training has seen
            an item) ** `power`; "batch": from the items of the batch; "mixed": uniform ones with probability
            `uniform_share`, and those of the batch; "hard": of `pool` uniform ones that of the highest score;
            "column": from the sample's list in `column`.
        power: Exponent of the popularity.
        uniform_share: Share of uniform items among mixed ones.
        pool: Number of items of which a hard one is chosen.
        column: List column of items that the user was shown and did not take.
    """

    count: checks.BatchSize = 1
    draw: Draw = "uniform"
    power: Annotated[float, checks.number(0.0, 4.0)] = 0.75
    uniform_share: checks.Share = 0.5
    pool: checks.Width = 8
    column: checks.Name | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if (self.draw == "column") != (self.column is not None):
            checks.reject(
                self, "column", f"got {self.column!r} for {self.draw!r}, expected a column for 'column', and none else"
            )


def check_shared(owner: object, negatives: NegativesSpec) -> None:
    """Raise unless the negatives are drawn alike for all samples of a batch."""
    if negatives.draw in ("hard", "column"):
        checks.reject(owner, "negatives", f"got draw {negatives.draw!r} for items that all samples of a batch share")


def check_positions(owner: object, negatives: NegativesSpec) -> None:
    """Raise unless the negatives can be drawn for each position of a history."""
    if negatives.draw == "column":
        checks.reject(owner, "negatives", "got draw 'column', expected one of items for each position of a history")
