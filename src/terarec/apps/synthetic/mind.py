# SPDX-License-Identifier: Apache-2.0
"""Pages of a news site in the files of Microsoft's MIND, drawn from a planted model of clicks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.apps.synthetic import draws, raw_log
from terarec.apps.synthetic.draws import Tastes, chance
from terarec.apps.synthetic.raw_log import GenerateReport, LogText, Progress, blocks, check_count, drawn, write_log
from terarec.ragged import offsets_of

CATEGORIES = {
    "sports": ("football_nfl", "golf", "soccer"),
    "news": ("newsus", "newspolitics", "newsworld"),
    "finance": ("markets", "finance-real-estate", "personalfinance"),
    "foodanddrink": ("recipes", "restaurantsandnews", "tipsandtricks"),
    "travel": ("traveltips", "travelnews", "traveltripideas"),
    "health": ("wellness", "nutrition", "weightloss"),
    "autos": ("autosnews", "autosclassics", "autosreview"),
    "music": ("musicnews", "music-gallery", "celebrity"),
}
SPLITS = ("train", "valid")
_FIRST_SECOND = 1_573_257_600  # 2019-11-09 00:00 UTC
_TRAIN_SECONDS, _VALID_SECONDS = 6 * 86_400, 86_400
_VALID_SHARE = 0.2
_FEWEST_SHOWN, _MOST_SHOWN = 4, 8
_FEWEST_READ, _MOST_READ = 3, 25
_NEW_SHARE = 0.02
"""Share of the users who have read nothing."""
_READ_FAVOURITES = 0.8
"""Share of what was read that is of a favourite category."""
_CLICKED_SHARE = 0.25

_BLOCK_ROWS = 16_384
_PILOT_ROWS = 16_384
_SHOWN, _READ, _MOMENT, _LABEL, _SUBCATEGORY, _NEW = range(6)
_READ_ENCOUNTERS = 1 << 40
"""Encounters from here on are of histories, those before of pages."""


def generate(out: Path, *, rows: int, seed: int = 0, progress: Progress | None = None) -> GenerateReport:
    """Write ``behaviors.tsv`` and ``news.tsv`` in ``out/train`` and ``out/valid``, and ``out/generated.json``.

    The last fifth of the pages are of a later day and go to "valid". Both ``news.tsv`` hold all articles. A sample of
    the best AUC is an article on a page, four to eight of them; its label is whether it was clicked on. That depends
    on the article and on whether its category is one of the user's two favourites, which the history shows.

    `rows` are the pages, lines of both ``behaviors.tsv``; other arguments and errors are those of `raw_log.write_log`.
    """
    check_count("rows", rows, 2)
    return write_log(out, _pieces(rows, seed), rows=rows, seed=seed, progress=progress)


@dataclass(frozen=True, slots=True)
class _Site:
    """Articles, users and click model of the pages."""

    tastes: Tastes
    bias: float

    @classmethod
    def plan(cls, rows: int, seed: int) -> _Site:
        tastes = Tastes(
            seed=seed,
            num_users=max(rows // 15, 10),
            num_items=min(max(rows // 25, 200), 100_000),
            num_groups=len(CATEGORIES),
        )
        return cls(tastes, tastes.planted_bias(_PILOT_ROWS, _CLICKED_SHARE, tastes.logits))

    def histories(self, users: NDArray[np.int64]) -> pa.Array:
        """Return the articles that each of `users` has read, separated by spaces."""
        seed = self.tastes.seed
        count = _FEWEST_READ + draws.choices(seed, _READ, users, _MOST_READ + 1 - _FEWEST_READ)
        count[draws.traits(seed, _NEW, users) < _NEW_SHARE] = 0
        readers = np.repeat(users, count)
        offsets = offsets_of(count)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], count)
        # By user and place, so that a user has the same history on every page.
        read = self.tastes.draw_items(readers, _READ_ENCOUNTERS + readers * _MOST_READ + place, _READ_FAVOURITES)
        return raw_log.lists_joined(_names(read), offsets)

    def piece(self, split: str, start: int, stop: int, seconds: NDArray[np.int64]) -> LogText:
        """Return pages `start` to `stop`, shown at `seconds`."""
        seed, pages = self.tastes.seed, np.arange(start, stop)
        users = self.tastes.draw_users(pages)
        count = _FEWEST_SHOWN + draws.choices(seed, _SHOWN, pages, _MOST_SHOWN + 1 - _FEWEST_SHOWN)
        offsets = offsets_of(count)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], count)
        # A unique number for each article on each page, independent of the articles on earlier pages.
        encounters = np.repeat(pages, count) * _MOST_SHOWN + place
        readers = np.repeat(users, count)
        shown = self.tastes.draw_items(readers, encounters)
        chances = chance(self.bias + self.tastes.logits(readers, shown))
        clicked, packed = drawn(chances, draws.traits(seed, _LABEL, encounters))
        impressions = raw_log.concatenated(_names(shown), "-", clicked * 1)
        columns = [
            pages + 1,
            raw_log.concatenated("U", users),
            _timestamps(_FIRST_SECOND + seconds),
            self.histories(users),
            raw_log.lists_joined(impressions, offsets),
        ]
        return LogText(f"{split}/behaviors.tsv", raw_log.joined(columns, "\t"), stop - start, packed)

    def news(self, split: str, start: int, stop: int) -> LogText:
        """Return articles `start` to `stop`."""
        articles = np.arange(start, stop)
        groups = self.tastes.groups(articles)
        part = draws.choices(self.tastes.seed, _SUBCATEGORY, articles, 3)
        subcategories = [name for names in CATEGORIES.values() for name in names]
        topic = raw_log.choose(subcategories, 3 * groups + part)
        columns = [
            _names(articles),
            raw_log.choose(list(CATEGORIES), groups),
            topic,
            raw_log.concatenated("What is new in ", topic),
            'It is called "news" for a reason',
            raw_log.concatenated("https://news.example/", _names(articles)),
            "[]",
            "[]",
        ]
        return LogText(f"{split}/news.tsv", raw_log.joined(columns, "\t"))


def _pieces(rows: int, seed: int) -> Iterator[LogText]:
    site = _Site.plan(rows, seed)
    train = rows - max(int(rows * _VALID_SHARE), 1)
    bounds = {"train": (0, train, 0, _TRAIN_SECONDS), "valid": (train, rows, _TRAIN_SECONDS, _VALID_SECONDS)}
    for split in SPLITS:
        first, last, opens, lasts = bounds[split]
        for start, stop in blocks(last, _BLOCK_ROWS, first):
            moments = draws.choices(seed, _MOMENT, np.arange(start, stop), lasts)  # pages are in no order, as in MIND
            yield site.piece(split, start, stop, opens + moments)
    for split in SPLITS:
        for block in blocks(site.tastes.num_items, _BLOCK_ROWS):
            yield site.news(split, *block)


def _names(articles: NDArray[np.int64]) -> pa.Array:
    return raw_log.concatenated("N", articles)


def _timestamps(seconds: NDArray[np.int64]) -> pa.Array:
    """Format times like ``11/9/2019 9:05:58 AM``: MIND writes day and hour without a leading zero."""
    return pc.replace_substring_regex(raw_log.clock(seconds, "%m/%d/%Y %I:%M:%S %p"), r"([/ ])0", r"\1")
