# SPDX-License-Identifier: Apache-2.0
"""Presets for logs with histories: REES46, MIND, MovieLens and Amazon reviews."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ops import (
    Categorify,
    DifferenceLag,
    Explode,
    FillMissing,
    History,
    JoinTable,
    KeepRows,
    LambdaOp,
    ListSlice,
    LogOp,
    Normalize,
    Rename,
    SplitText,
)
from terarec.etl.ready import row_functions
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFiles, SplitByTime, WorkflowSpec


def row_step(function: str, column: str, *outputs: str) -> LambdaOp:
    """Return the step that makes the integers `outputs` of `column` by the row function, and its form for records."""
    place = f"{row_functions.__name__}:{function}"
    return LambdaOp(
        columns=(column,),
        outputs=outputs,
        function=place,
        output_type="integer",
        record_function=f"{place}_of_record",
    )


_REES46_SOURCE = SourceSpec(
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
_REES46_SPLIT = SplitByTime(column="event_time", valid=0.1)


def rees46(
    *,
    events: tuple[str, ...] = ("cart", "purchase"),
    positives: tuple[str, ...] = ("purchase",),
    min_count: int = 2,
    history: int = 20,
    split: Split | None = _REES46_SPLIT,
) -> WorkflowSpec:
    """Prepare the monthly CSV files: is an event a purchase?

    Args:
        events: Types of events that are samples; ``("view", "cart", "purchase")`` keeps all.
        positives: Types whose label is 1.
        min_count: Values that occur less often in the training part share an id.
        history: Maximum number of earlier samples of a user.
        split: Split; by default the latest tenth is for validation.
    """
    past = ("past_products", "past_categories")
    since, change = "seconds_since_last", "price_change"
    alone = ("category_code", "brand", "hour_of_day", "weekday", "user_id")
    return WorkflowSpec(
        name="rees46",
        source=_REES46_SOURCE,
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


_NEWS = ("news_id", "category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities")

_MIND_SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="impression_id", type="integer"),
        SourceColumn(name="user_id", type="text"),
        SourceColumn(name="time", type="time", format="%m/%d/%Y %I:%M:%S %p"),
        SourceColumn(name="history", type="text", separator=" "),
        SourceColumn(name="impressions", type="text", separator=" "),
    ),
)
_ARTICLES = SourceSpec(format="delimited", columns=tuple(SourceColumn(name=name, type="text") for name in _NEWS))

_MIND_SPLIT = SplitByFiles(valid=1)


def mind(*, min_count: int = 2, history: int = 50, split: Split | None = _MIND_SPLIT) -> WorkflowSpec:
    """Prepare ``behaviors.tsv``: every article on a page is a sample, with the articles that its reader read before.

    The side table "news" is ``news.tsv``, with every article once.

    Args:
        min_count: Values that occur less often in the training part share an id.
        history: Maximum number of articles that were read last.
        split: By default the last file, that of the day to predict.
    """
    alone = ("subcategory", "user_id", "hour_of_day")
    return WorkflowSpec(
        name="mind",
        source=_MIND_SOURCE,
        tables={"news": _ARTICLES},
        steps=(
            Explode(columns=("impressions",)),
            SplitText(columns=("impressions",), separator="-", outputs=("shown", "clicked"), types=("text", "integer")),
            row_step("hour_and_weekday", "time", "hour_of_day", "weekday"),
            ListSlice(columns=("history",), start=-history),
            row_step("length", "history", "read_count"),
            LogOp(columns=("read_count",)),
            Normalize(columns=("read_count",)),
            # The table is joined twice by its key's name: to all that was read, and to the shown article.
            Rename(names={"history": "news_id"}),
            JoinTable(table="news", on="news_id", columns=("category",)),
            Rename(names={"news_id": "read_news", "category": "read_categories"}),
            Rename(names={"shown": "news_id"}),
            JoinTable(table="news", on="news_id", columns=("category", "subcategory")),
            Categorify(columns=("news_id", "read_news"), min_count=min_count, joint=True),
            Categorify(columns=("category", "read_categories"), min_count=min_count, joint=True),
            Categorify(columns=alone, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="clicked", is_probability=True),),
        dense=("read_count",),
        categorical=("news_id", "category", *alone, "read_news", "read_categories"),
    )


_MOST_GENRES = 10
_OF_USER = ("gender", "age", "occupation", "zip")

_MOVIELENS_SPLIT = SplitByTime(column="timestamp", valid=0.1)


def movielens(
    *,
    layout: Literal["latest", "1m"] = "latest",
    liked_from: float = 4.0,
    min_count: int = 2,
    history: int = 50,
    split: Split | None = _MOVIELENS_SPLIT,
) -> WorkflowSpec:
    """Prepare the ratings: does a user like a film, given the films rated before?

    The side table "movies" is ``movies.csv`` or ``movies.dat``; that of ml-1m has a table "users", too, ``users.dat``.

    Args:
        layout: "latest" for CSV files with a header line (ml-latest, ml-25m, ml-32m); "1m" for those of ml-1m,
            which have ``::`` between the fields, and a table of users.
        liked_from: Ratings from this on have the label 1.
        min_count: Values that occur less often in the training part share an id.
        history: Maximum number of films that were rated last.
        split: Split; by default the latest tenth is for validation.
    """
    if layout not in ("latest", "1m"):
        raise ConfigError("movielens: layout", f"got {layout!r}, expected one of 'latest', '1m'")
    ratings, movies = _sources(is_csv=layout == "latest")
    of_user = _OF_USER if layout == "1m" else ()
    return WorkflowSpec(
        name="movielens",
        source=ratings,
        tables={"movies": movies, "users": _users()} if of_user else {"movies": movies},
        steps=(
            History(
                columns=("movieId",), outputs=("past_movies",), group="userId", order="timestamp", max_length=history
            ),
            row_step("length", "past_movies", "past_count"),
            LogOp(columns=("past_count",)),
            Normalize(columns=("past_count",)),
            JoinTable(table="movies", on="movieId", columns=("genres",)),
            ListSlice(columns=("genres",), stop=_MOST_GENRES),
            *([JoinTable(table="users", on="userId", columns=of_user)] if of_user else []),
            Categorify(columns=("movieId", "past_movies"), min_count=min_count, joint=True),
            Categorify(columns=("userId", "genres", *of_user), min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="liked", column="rating", at_least=liked_from),),
        dense=("past_count",),
        categorical=("userId", "movieId", "genres", "past_movies", *of_user),
    )


def _sources(*, is_csv: bool) -> tuple[SourceSpec, SourceSpec]:
    """Return the ratings, and the films."""
    delimiter = "," if is_csv else "::"
    ratings = SourceSpec(
        format="delimited",
        delimiter=delimiter,
        header=is_csv,
        columns=(
            SourceColumn(name="userId", type="integer"),
            SourceColumn(name="movieId", type="integer"),
            SourceColumn(name="rating", type="number"),
            SourceColumn(name="timestamp", type="integer"),
        ),
    )
    movies = SourceSpec(
        format="delimited",
        delimiter=delimiter,
        header=is_csv,
        quote=is_csv,
        # The files of ml-1m are Latin-1.
        encoding="utf-8" if is_csv else "latin-1",
        missing=("", "(no genres listed)"),
        columns=(
            SourceColumn(name="movieId", type="integer"),
            SourceColumn(name="title", type="text"),
            SourceColumn(name="genres", type="text", separator="|"),
        ),
    )
    return ratings, movies


def _users() -> SourceSpec:
    return SourceSpec(
        format="delimited",
        delimiter="::",
        columns=(
            SourceColumn(name="userId", type="integer"),
            SourceColumn(name="gender", type="text"),
            SourceColumn(name="age", type="integer"),
            SourceColumn(name="occupation", type="integer"),
            SourceColumn(name="zip", type="text"),
        ),
    )


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
    """Prepare reviews, JSON lines: does a user like a product, given the products reviewed before?

    The side table "meta" is the file of products.

    Args:
        layout: Release of the reviews, which decides the names of the fields; that of 2014 has those of "2018".
        liked_from: Ratings from this on have the label 1.
        min_count: Values that occur less often in the training part share an id.
        history: Maximum number of products that were reviewed last.
        valid: Share of the reviews, the latest ones, that becomes the split "valid"; 0 for none.
    """
    if layout not in _FIELDS:
        raise ConfigError("amazon: layout", f"got {layout!r}, expected one of '2018', '2023'")
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
