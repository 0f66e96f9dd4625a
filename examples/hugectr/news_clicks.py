"""Writes what a news site logs, in the files of Microsoft's MIND, with a known rule for what is clicked on."""

from pathlib import Path

import numpy as np

from terarec.metrics import AUC

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
NEWS = 400
USERS = 1_000
FIRST_SECOND = np.datetime64("2019-11-11T05:00:00")


def write_clicks(directory: Path, impressions: dict[str, int], seed: int = 0) -> dict[str, float]:
    """Write ``news.tsv``, and for each split ``<split>/behaviors.tsv``.

    Each reader has two favourite categories, from which comes most of what he has read. He clicks on what is of them,
    and on what is popular.

    Args:
        directory: where to write; made if it is not there.
        impressions: split -> number of pages shown, with four to eight articles each.
        seed: the same seed gives the same files.

    Returns:
        Split -> the AUC of the true chances: no model can beat it but by chance.
    """
    rng = np.random.default_rng(seed)
    category = rng.integers(0, len(CATEGORIES), NEWS)
    directory.mkdir(parents=True, exist_ok=True)
    _write_news(directory / "news.tsv", category, rng.integers(0, 3, NEWS))
    popularity = rng.normal(size=NEWS)
    favourites = np.array([rng.choice(len(CATEGORIES), 2, replace=False) for _ in range(USERS)])
    histories = [_history(own, category, rng) for own in favourites]
    best = {}
    for split, pages in impressions.items():
        user, shown = rng.integers(0, USERS, pages), rng.integers(0, NEWS, (pages, 8))
        fits = (category[shown][:, :, None] == favourites[user][:, None, :]).any(2)
        chance = 1 / (1 + np.exp(-(popularity[shown] + 3.0 * fits - 1.8)))
        clicked = rng.random(chance.shape) < chance
        count = rng.integers(4, 9, pages)
        path = directory / split / "behaviors.tsv"
        path.parent.mkdir(exist_ok=True)
        _write_behaviors(path, user, [histories[number] for number in user], shown, clicked, count)
        is_shown = np.arange(8) < count[:, None]
        best[split] = AUC().update(chance[is_shown].astype(np.float32), clicked[is_shown].astype(np.float32)).compute()
    return best


def _history(favourites: np.ndarray, category: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What a reader has read: 3 to 25 articles, 8 of 10 of his favourite categories."""
    length = rng.integers(3, 26)
    own = rng.choice(np.flatnonzero(np.isin(category, favourites)), length)
    return np.where(rng.random(length) < 0.8, own, rng.integers(0, NEWS, length))


def _write_news(path: Path, category: np.ndarray, part: np.ndarray) -> None:
    names = list(CATEGORIES)
    with path.open("w") as file:
        for number, (group, subgroup) in enumerate(zip(category, part, strict=True)):
            topic, subtopic = names[group], CATEGORIES[names[group]][subgroup]
            address = f"https://news.example/{number}"
            file.write(f"N{number}\t{topic}\t{subtopic}\tOn {subtopic}\tWhat is new\t{address}\t[]\t[]\n")


def _write_behaviors(
    path: Path, user: np.ndarray, past: list[np.ndarray], shown: np.ndarray, clicked: np.ndarray, count: np.ndarray
) -> None:
    times = (FIRST_SECOND + 7 * np.arange(len(user))).tolist()
    with path.open("w") as file:
        for number, time in enumerate(times):
            history = " ".join(f"N{article}" for article in past[number])
            pairs = zip(shown[number, : count[number]], clicked[number, : count[number]], strict=True)
            page = " ".join(f"N{article}-{int(click)}" for article, click in pairs)
            said = f"{time:%m/%d/%Y %I:%M:%S %p}"
            file.write(f"{number + 1}\tU{user[number]}\t{said}\t{history}\t{page}\n")
