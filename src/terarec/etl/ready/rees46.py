"""REES46's events of a shop with many categories (2019 and 2020)."""

from __future__ import annotations

from terarec.etl.ops import Categorify, DifferenceLag, FillMissing, History, KeepRows, LogOp, Normalize
from terarec.etl.ready.row_steps import row_step
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByTime, WorkflowSpec

_SOURCE = SourceSpec(
    format="delimited",
    delimiter=",",
    header=True,
    columns=(
        SourceColumn(name="event_time", type="time", format="%Y-%m-%d %H:%M:%S UTC"),
        SourceColumn(name="event_type", type="text"),
        SourceColumn(name="product_id", type="integer"),
        SourceColumn(name="category_id", type="integer"),
        SourceColumn(name="category_code", type="text"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="user_id", type="integer"),
    ),
)
_SPLIT = SplitByTime(column="event_time", valid=0.1)


def rees46(
    *,
    events: tuple[str, ...] = ("cart", "purchase"),
    positives: tuple[str, ...] = ("purchase",),
    min_count: int = 2,
    history: int = 20,
    split: Split | None = _SPLIT,
) -> WorkflowSpec:
    """Prepares the monthly CSV files: is an event a purchase?

    Args:
        events: types of events that are samples; ``("view", "cart", "purchase")`` keeps all.
        positives: types whose label is 1.
        min_count: values that occur less often in the training part share an id.
        history: the user's earlier samples, at most so many.
        split: by default the latest tenth.
    """
    past = ("past_products", "past_categories")
    since, change = "seconds_since_last", "price_change"
    alone = ("category_code", "brand", "hour_of_day", "weekday", "user_id")
    return WorkflowSpec(
        name="rees46",
        source=_SOURCE,
        steps=(
            KeepRows(column="event_type", values=events),
            row_step("hour_and_weekday", "event_time", "hour_of_day", "weekday"),
            DifferenceLag(columns=("event_time",), outputs=(since,), group="user_id", order="event_time"),
            DifferenceLag(columns=("price",), outputs=(change,), group="user_id", order="event_time"),
            History(
                columns=("product_id", "category_id"),
                outputs=past,
                group="user_id",
                order="event_time",
                max_length=history,
            ),
            FillMissing(columns=("price", change), value=0.0),
            FillMissing(columns=(since,), value=0.0, indicator=True),
            LogOp(columns=("price", since)),
            Normalize(columns=("price", change, since)),
            Categorify(columns=("product_id", "past_products"), min_count=min_count, joint=True),
            Categorify(columns=("category_id", "past_categories"), min_count=min_count, joint=True),
            Categorify(columns=alone, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="purchase", column="event_type", positives=positives),),
        dense=("price", change, since, f"{since}_missing"),
        categorical=("product_id", "category_id", *alone, *past),
    )
