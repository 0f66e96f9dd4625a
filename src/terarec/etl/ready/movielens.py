"""MovieLens, GroupLens' ratings of films."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ops import Categorify, History, JoinTable, ListSlice, LogOp, Normalize
from terarec.etl.ready.row_steps import row_step
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByTime, WorkflowSpec

_MOST_GENRES = 10
_OF_USER = ("gender", "age", "occupation", "zip")

_SPLIT = SplitByTime(column="timestamp", valid=0.1)


def movielens(
    *,
    layout: Literal["latest", "1m"] = "latest",
    liked_from: float = 4.0,
    min_count: int = 2,
    history: int = 50,
    split: Split | None = _SPLIT,
) -> WorkflowSpec:
    """Prepares the ratings: does a user like a film, after those that he rated before?

    The side table "movies" is ``movies.csv`` or ``movies.dat``; that of ml-1m has a table "users", too, ``users.dat``.

    Args:
        layout: "latest" for CSV files with a header line (ml-latest, ml-25m, ml-32m); "1m" for those of ml-1m,
            which have ``::`` between the fields, and tell of users.
        liked_from: ratings from this on have the label 1.
        min_count: values that occur less often in the training part share an id.
        history: the films rated last, at most so many.
        split: by default the latest tenth.
    """
    if layout not in ("latest", "1m"):
        raise ConfigError(f"movielens: layout: got {layout!r}, expected one of 'latest', '1m'")
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
    """The ratings, and the films."""
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
