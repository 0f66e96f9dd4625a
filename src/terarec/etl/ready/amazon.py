"""Amazon's reviews, as McAuley's group collects them (releases 2014, 2018 and 2023)."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ops import Categorify, History, JoinTable, ListSlice, LogOp, Normalize, Rename
from terarec.etl.ready.row_steps import row_step
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, SplitByTime, WorkflowSpec

_FIELDS = {
    "2018": ("reviewerID", "asin", "overall", "unixReviewTime", "brand", "category"),
    "2023": ("user_id", "parent_asin", "rating", "timestamp", "store", "categories"),
}
"""Of each release: user, product, rating and time of a review; brand and categories of a product."""
_MOST_CATEGORIES = 8


def amazon(
    *,
    layout: Literal["2018", "2023"] = "2018",
    liked_from: float = 4.0,
    min_count: int = 2,
    history: int = 50,
    valid: float = 0.1,
) -> WorkflowSpec:
    """Prepares reviews, JSON lines: does a user like a product, after those that he reviewed before?

    The side table "meta" is the file of products.

    Args:
        layout: release of the reviews, which decides the names of the fields; that of 2014 has those of "2018".
        liked_from: ratings from this on have the label 1.
        min_count: values that occur less often in the training part share an id.
        history: the products reviewed last, at most so many.
        valid: share of the reviews, the latest ones, that becomes the split "valid"; 0 for none.
    """
    if layout not in _FIELDS:
        raise ConfigError(f"amazon: layout: got {layout!r}, expected one of '2018', '2023'")
    user, product, rating, time, brand, categories = _FIELDS[layout]
    return WorkflowSpec(
        name="amazon",
        source=_reviews(user, product, rating, time),
        tables={"meta": _products(product, brand, categories)},
        steps=(
            JoinTable(table="meta", on=product, columns=(brand, categories)),
            History(columns=(product,), outputs=("past_products",), group=user, order=time, max_length=history),
            row_step("length", "past_products", "past_count"),
            LogOp(columns=("past_count",)),
            Normalize(columns=("past_count",)),
            Rename(names={user: "user", product: "product", brand: "brand", categories: "categories"}),
            ListSlice(columns=("categories",), stop=_MOST_CATEGORIES),
            Categorify(columns=("product", "past_products"), min_count=min_count, joint=True),
            Categorify(columns=("user", "brand", "categories"), min_count=min_count),
        ),
        split=SplitByTime(column=time, valid=valid) if valid else None,
        labels=(LabelSpec(name="liked", column=rating, at_least=liked_from),),
        dense=("past_count",),
        categorical=("user", "product", "brand", "categories", "past_products"),
    )


def _reviews(user: str, product: str, rating: str, time: str) -> SourceSpec:
    return SourceSpec(
        format="json_lines",
        columns=(
            SourceColumn(name=user, type="text"),
            SourceColumn(name=product, type="text"),
            SourceColumn(name=rating, type="number"),
            SourceColumn(name=time, type="integer"),
        ),
    )


def _products(product: str, brand: str, categories: str) -> SourceSpec:
    return SourceSpec(
        format="json_lines",
        columns=(
            SourceColumn(name=product, type="text"),
            SourceColumn(name=brand, type="text"),
            SourceColumn(name=categories, type="text", separator=" > "),
        ),
    )
