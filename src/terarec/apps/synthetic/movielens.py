# SPDX-License-Identifier: Apache-2.0
"""Ratings of films in GroupLens' layouts, drawn from a planted model of preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.draws import Tastes, chance
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, check_choice, drawn, write_log

Layout = Literal["latest", "1m"]

GENRES = (
    *("Drama", "Comedy", "Thriller", "Romance", "Action", "Horror", "Documentary", "Crime", "Adventure"),
    *("Sci-Fi", "Children", "Animation", "Mystery", "Fantasy", "War", "Western", "Musical", "Film-Noir"),
)
_FEWEST_RATINGS, _MEAN_FURTHER = 20, 30.0
"""Ratings of a user: this minimum, and further ones of exponential distribution."""
_LIKED_SHARE = 0.5
_SECOND_GENRE_SHARE, _UNSORTED_SHARE = 0.6, 0.05
"""Shares of the films with a second genre, and with none listed."""
_FIRST_SECOND = 1_000_000_000
_YEARS, _STAY = 15 * 365 * 86_400, 90 * 86_400
"""Seconds within which users come, and within which each gives ratings."""

_BLOCK_ROWS = 32_768
_PILOT_ROWS = 32_768
_AGES = ("1", "18", "25", "35", "45", "50", "56")
_OCCUPATIONS, _ZIP_CODES = 21, 3_000
_COUNT, _COMES, _MOMENT, _LABEL, _STARS, _GENRE, _HAS_GENRE, _YEAR, _GENDER, _AGE, _OCCUPATION, _ZIP = range(12)


def generate(
    out: Path, *, rows: int, layout: Layout = "latest", seed: int = 0, progress: Progress | None = None
) -> GenerateReport:
    """Write the ratings, the films and ``generated.json`` into `out`.

    ``latest``: ``ratings.csv`` and ``movies.csv`` as in ml-latest, ml-25m and ml-32m, with header lines and half stars.
    ``1m``: ``ratings.dat``, ``movies.dat`` and ``users.dat`` as in ml-1m, ``::`` between the fields, films in Latin-1.
    Ratings are in order of users. Gender, age, occupation and zip code say nothing about what a user likes.
    The label of a sample is whether the rating is at least 4; that depends on the film and on whether one of its
    genres is a favourite of the user's.

    `rows` are the ratings, and `layout` is one of those above; other arguments and errors are those of
    `raw_log.write_log`.
    """
    check_choice("layout", layout, get_args(Layout))
    pieces = _pieces(rows, layout, seed)
    return write_log(out, pieces, rows=rows, seed=seed, options={"layout": layout}, progress=progress)


@dataclass(frozen=True, slots=True)
class _Films:
    """Films, users and click model of the ratings."""

    tastes: Tastes
    bias: float

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Films:
        tastes = Tastes(
            seed=seed,
            num_users=int(rows // (_FEWEST_RATINGS + _MEAN_FURTHER)) + 20,
            num_items=min(max(rows // 200, 200), 60_000),
            num_groups=len(GENRES),
        )
        return cls(tastes, tastes.planted_bias(_PILOT_ROWS, _LIKED_SHARE, cls(tastes, 0.0).logits))

    def genres(self, films: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and second genre of each of `films`; -1 for none."""
        first = self.tastes.groups(films)
        further = 1 + draws.choices(self.tastes.seed, _GENRE, films, len(GENRES) - 1)
        kind = draws.traits(self.tastes.seed, _HAS_GENRE, films)
        second = np.where(kind < _SECOND_GENRE_SHARE, (first + further) % len(GENRES), -1)
        return np.where(kind > 1.0 - _UNSORTED_SHARE, -1, first), second

    def logits(self, users: NDArray[np.int64], films: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits of P(rating >= 4)."""
        first, second = self.genres(films)
        fits = self.tastes.fits(users, first) | self.tastes.fits(users, second)
        return self.bias + self.tastes.logits(users, films, fits)


def _pieces(rows: int, layout: Layout, seed: int) -> Iterator[LogText]:
    films = _Films.plan(rows, seed)
    ratings, movies = ("ratings.csv", "movies.csv") if layout == "latest" else ("ratings.dat", "movies.dat")
    if layout == "latest":
        yield LogText(ratings, b"userId,movieId,rating,timestamp\n")
        yield LogText(movies, b"movieId,title,genres\n")
    done = user = 0
    while done < rows:
        users = np.arange(user, user + _BLOCK_ROWS // _FEWEST_RATINGS)
        user += len(users)
        further = -_MEAN_FURTHER * np.log1p(-draws.traits(seed, _COUNT, users))
        # The last user may be cut short, since the log has exactly `rows` ratings.
        raters = np.repeat(users, _FEWEST_RATINGS + further.astype(np.int64))[: rows - done]
        yield _ratings(films, ratings, layout, raters, done)
        if layout == "1m":
            yield _users(seed, np.unique(raters))
        done += len(raters)
    for block in blocks(films.tastes.num_items, _BLOCK_ROWS):
        yield _movies(films, movies, layout, np.arange(*block))


def _ratings(films: _Films, file: str, layout: Layout, users: NDArray[np.int64], start: int) -> LogText:
    """Return the ratings of `users`, numbered from `start` on; each user's are in order of films."""
    seed, encounters = films.tastes.seed, np.arange(start, start + len(users))
    seen = films.tastes.draw_items(users, encounters)
    # The newer files of GroupLens list the ratings of a user in the order of the films, not of time.
    order = np.lexsort((seen, users))
    encounters, seen = encounters[order], seen[order]
    liked, packed = drawn(chance(films.logits(users, seen)), draws.traits(seed, _LABEL, encounters))
    place = draws.traits(seed, _STARS, encounters)
    if layout == "latest":
        stars = raw_log.decimals(np.where(liked, 8 + (place * 3).astype(int), 1 + (place * 7).astype(int)) / 2, 1)
    else:
        stars = pa.array(np.where(liked, 4 + (place * 2).astype(int), 1 + (place * 3).astype(int)))
    comes = draws.choices(seed, _COMES, users, _YEARS)
    seconds = _FIRST_SECOND + comes + draws.choices(seed, _MOMENT, encounters, _STAY)
    text = raw_log.joined([users + 1, seen + 1, stars, seconds], _separator(layout))
    return LogText(file, text, len(users), packed)


def _users(seed: int, numbers: NDArray[np.int64]) -> LogText:
    def drawn_of(trait: int, count: int) -> NDArray[np.int64]:
        return draws.choices(seed, trait, numbers, count)

    genders = raw_log.choose(["F", "M"], drawn_of(_GENDER, 2))
    ages = raw_log.choose(_AGES, drawn_of(_AGE, len(_AGES)))
    codes = pc.utf8_lpad(pa.array(drawn_of(_ZIP, _ZIP_CODES) * 31).cast(pa.string()), 5, "0")
    columns = [numbers + 1, genders, ages, drawn_of(_OCCUPATION, _OCCUPATIONS), codes]
    return LogText("users.dat", raw_log.joined(columns, _separator("1m")))


def _movies(films: _Films, file: str, layout: Layout, numbers: NDArray[np.int64]) -> LogText:
    first, second = films.genres(numbers)
    names = raw_log.choose([*GENRES, "(no genres listed)"], first)
    further = raw_log.choose([*(f"|{genre}" for genre in GENRES), ""], np.where(first < 0, -1, second))
    years = 1930 + draws.choices(films.tastes.seed, _YEAR, numbers, 90)
    has_comma = numbers % 4 == 0
    # A comma needs quotes in CSV; the letter has another byte in Latin-1 than in UTF-8.
    special = "Film, The " if layout == "latest" else "L'\u00e9toile "
    titles = raw_log.concatenated(raw_log.choose(["Film ", special], has_comma * 1), numbers, " (", years, ")")
    if layout == "latest":
        quote = raw_log.choose(["", '"'], has_comma * 1)
        titles = raw_log.concatenated(quote, titles, quote)
    genres = raw_log.concatenated(names, further)
    text = raw_log.joined([numbers + 1, titles, genres], _separator(layout))
    # ml-1m is the one set in Latin-1: its workflow has to name the encoding.
    return LogText(file, text if layout == "latest" else text.decode().encode("latin-1"))


def _separator(layout: Layout) -> str:
    return "," if layout == "latest" else "::"
