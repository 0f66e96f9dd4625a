"""MovieLens, GroupLens' ratings of films."""

from __future__ import annotations

from typing import Literal

from terarec.errors import ConfigError
from terarec.etl.ready.row_steps import row_step
from terarec.spec import (
    Categorify,
    History,
    JoinTable,
    LabelSpec,
    ListSlice,
    LogOp,
    Normalize,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByTime,
    WorkflowSpec,
)

_MOST_GENRES = 10

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

    The side table "movies" is ``movies.csv`` or ``movies.dat``.

    Args:
        layout: "latest" for CSV files with a header line (ml-latest, ml-25m, ml-32m); "1m" for those of ml-1m,
            which have ``::`` between the fields.
        liked_from: ratings from this on have the label 1.
        min_count: values that occur less often in the training part share an id.
        history: the films rated last, at most so many.
        split: by default the latest tenth.
    """
    if layout not in ("latest", "1m"):
        raise ConfigError(f"movielens: layout: got {layout!r}, expected one of 'latest', '1m'")
    ratings, movies = _sources(is_csv=layout == "latest")
    return WorkflowSpec(
        name="movielens",
        source=ratings,
        tables={"movies": movies},
        steps=(
            History(
                columns=("movieId",), outputs=("past_movies",), group="userId", order="timestamp", max_length=history
            ),
            row_step("length", "past_movies", "past_count"),
            LogOp(columns=("past_count",)),
            Normalize(columns=("past_count",)),
            JoinTable(table="movies", on="movieId", columns=("genres",)),
            ListSlice(columns=("genres",), stop=_MOST_GENRES),
            Categorify(columns=("movieId", "past_movies"), min_count=min_count, joint=True),
            Categorify(columns=("userId", "genres"), min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="liked", column="rating", at_least=liked_from),),
        dense=("past_count",),
        categorical=("userId", "movieId", "genres", "past_movies"),
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
