# SPDX-License-Identifier: Apache-2.0
"""Recipes whose files the user has: on files of the published layouts each prepares, trains and is measured."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from terarec.apps.recipes import load_recipe, load_recipe_data, recipe_names, reproduce
from terarec.apps.synthetic import avazu, criteo
from terarec.formats import read_dataset
from terarec.spec import HSTURankerSpec, SplitByTime
from terarec.spec.recipe import PublishedResult, RecipeDataSpec
from tests.etl.engine.contents import read_split

ALI_CCP = (
    *("101", "121", "122", "124", "125", "126", "127", "128", "129", "205", "206", "207", "210", "216"),
    *("508", "509", "702", "853", "301", "109_14", "110_14", "127_14", "150_14"),
    *("D109_14", "D110_14", "D127_14", "D150_14", "D508", "D509", "D702", "D853"),
)
CRITEO = (*(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27)))


def write_days(directory: Path) -> None:
    criteo.generate(directory, rows=2400, days=24, seed=1)


def write_hours(directory: Path) -> None:
    avazu.generate(directory / "log", rows=3000, seed=1)
    head, *lines = (directory / "log" / "train.csv").read_text().splitlines()
    for name, part in (("train", lines[:2000]), ("valid", lines[2000:2500]), ("test", lines[2500:])):
        (directory / f"{name}.csv").write_text("\n".join([head, *part]) + "\n")


def write_table(names: dict[str, str], labels: tuple[str, ...], columns: tuple[str, ...]) -> Callable[[Path], None]:
    """Return what writes CSV files of integers: split -> name of its file."""

    def write(directory: Path) -> None:
        random = np.random.default_rng(0)
        for split, name in names.items():
            count = 1000 if split == "train" else 300
            values = random.integers(0, 5, (count, len(columns)))
            truth = (values[:, 0, None] + random.normal(0, 1, (count, len(labels))) > 2).astype(int)
            lines = [",".join((*labels, *columns)), *(",".join(map(str, row)) for row in np.c_[truth, values])]
            (directory / name).write_text("\n".join(lines) + "\n")

    return write


def write_ratings(name: str, separator: str) -> Callable[[Path], None]:
    """Return what writes sequences in which item k is followed by item k % 25 + 1."""

    def write(directory: Path) -> None:
        random = np.random.default_rng(0)
        starts, lengths = random.integers(0, 25, 150), random.integers(5, 20, 150)
        rows = [
            (user + 1, (start + place) % 25 + 1, 5, 978_300_000 + 60 * place)
            for user, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for place in range(length)
        ]
        (directory / name).write_text("".join(separator.join(map(str, row)) + "\n" for row in rows))

    return write


KUAIRAND = (
    *("user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "is_comment"),
    *("is_forward", "is_hate", "long_view", "play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time"),
    *("is_profile_enter", "is_rand", "tab"),
)
PERIODS = {"4_08_to_4_21": range(8, 22), "4_22_to_5_08": range(22, 39)}
"""Part of the names of KuaiRand's files -> its days, from April 1."""


def write_videos(directory: Path) -> None:
    """KuaiRand-27K's files: two of each period, of other users."""
    random = np.random.default_rng(0)
    for period, days in PERIODS.items():
        for part in (1, 2):
            users, moments = random.integers(0, 20, 300) + 20 * part, np.sort(random.integers(0, 86_400_000, 300))
            of_days = np.sort(random.choice(days, 300))
            values = {name: random.integers(0, 2, 300) for name in KUAIRAND}
            values |= {"user_id": users, "video_id": random.integers(0, 50, 300)}
            values["date"] = np.where(of_days > 30, 20220500 + of_days - 30, 20220400 + of_days)
            values["time_ms"] = 1_648_742_400_000 + 86_400_000 * (of_days - 1) + moments
            rows = zip(*(values[name].tolist() for name in KUAIRAND), strict=True)
            lines = [",".join(KUAIRAND), *(",".join(map(str, row)) for row in rows)]
            (directory / f"log_standard_{period}_27k_part{part}.csv").write_text("\n".join(lines) + "\n")
    (directory / "log_random_4_22_to_5_08_27k.csv").write_text(",".join(KUAIRAND) + "\n")


def write_tracks(directory: Path) -> None:
    """Yambda's file: users one after the other, each in the order of time; only listens have a played ratio."""
    random, count = np.random.default_rng(0), 1000
    kinds = np.array(["listen", "like", "dislike", "unlike", "undislike"])
    events = kinds[np.where(random.random(count) < 0.9, 0, random.integers(1, 5, count))]
    no_listen = events != "listen"
    times = (random.choice([100, 250, 290, 296, 298, 299, 300], count) * 17_280 + random.integers(0, 16_000, count)) * 5
    columns = {
        "uid": pa.array(np.repeat(np.arange(1, 101) * 100, 10), pa.uint32()),
        "timestamp": pa.array(np.sort(times.reshape(100, 10)).ravel(), pa.uint32()),
        "item_id": pa.array(random.integers(1, 60, count), pa.uint32()),
        "is_organic": pa.array(random.integers(0, 2, count), pa.uint8()),
        "played_ratio_pct": pa.array(random.integers(0, 120, count), pa.uint16(), mask=no_listen),
        "track_length_seconds": pa.array(random.integers(60, 300, count), pa.uint32(), mask=no_listen),
        "event_type": pa.array(events).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), directory / "multi_event.parquet")


SPLITS = {"train": "train.csv", "valid": "valid.csv", "test": "test.csv"}
LAYOUTS: dict[str, Callable[[Path], None]] = {
    "criteo_1tb": write_days,
    "criteo_1tb_15": write_days,
    "criteo_x1": write_table(SPLITS, ("label",), CRITEO),
    "avazu_x4": write_hours,
    "ali_ccp": write_table(
        {"train": "ali_ccp_train.csv", "valid": "ali_ccp_val.csv", "test": "ali_ccp_test.csv"},
        ("click", "purchase"),
        ALI_CCP,
    ),
    "ml_1m": write_ratings("ratings.dat", "::"),
    "ml_20m": write_ratings("ratings.csv", ","),
    "kuairand": write_videos,
    "yambda_50m": write_tracks,
    "yambda_5b": write_tracks,
}
SEQUENCES = {"kuairand": ("user_id", "time_ms"), "yambda_50m": ("uid", "timestamp"), "yambda_5b": ("uid", "timestamp")}
"""Data -> the columns of user and time."""
RECIPES = [(data, model) for data in LAYOUTS for model in recipe_names()[data]]
IN_EVERY_RUN = [("criteo_1tb", "dlrm"), ("ali_ccp", "mmoe"), ("ml_1m", "hstu"), ("yambda_50m", "hstu_ranker")]


@pytest.mark.parametrize(
    ("data", "model"),
    [pytest.param(*one, marks=() if one in IN_EVERY_RUN else pytest.mark.slow) for one in RECIPES],
)
def test_a_recipe_is_prepared_trained_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, model: str
) -> None:
    (tmp_path / "files").mkdir()
    LAYOUTS[data](tmp_path / "files")
    recipe = load_recipe(data, model)
    # Its own length and widths are for data thousands of times as large.
    training = dataclasses.replace(recipe.run.training, max_steps=2, batch_size=256, schedule=None, patience=None)
    model_spec = recipe.run.model
    if isinstance(model_spec, HSTURankerSpec):
        model_spec = dataclasses.replace(model_spec, width=16)
    short = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, training=training, model=model_spec))
    monkeypatch.setattr(reproduce, "load_recipe", lambda *_: short)
    report = reproduce.reproduce(data, model, tmp_path / "files", tmp_path / "out")
    figures = report.seeds.results[0].metrics
    published = {name.removeprefix("mean_") for name, value in recipe.published.metrics.items() if value is not None}
    assert published <= figures.keys()
    assert all(0.0 <= figures[name] <= 1.0 for name in published - {"logloss"})
    if isinstance(recipe.published, PublishedResult) and recipe.published.label_auc:
        assert recipe.published.label_auc.keys() <= {"click", "purchase", "is_click"}
    assert published or data == "yambda_50m"
    if data in SEQUENCES:
        check_histories(tmp_path, data)


def check_histories(directory: Path, data: str) -> None:
    """Each sample has the times of its user's earlier rows, and an item and an action for each of them."""
    paths = sorted((directory / "files").glob("*standard*.csv")) or [directory / "files" / "multi_event.parquet"]
    read = [pq.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path) for path in paths]
    rows = pa.concat_tables(read)
    if "event_type" in rows.column_names:
        rows = rows.filter(pc.equal(rows["event_type"].cast(pa.string()), "listen"))
    users, times = (rows[name].to_numpy().astype(np.int64) for name in SEQUENCES[data])
    described = load_recipe_data(data)
    assert isinstance(described, RecipeDataSpec)
    split = described.workflow.split
    assert isinstance(split, SplitByTime)
    days = rows[split.column].to_numpy()
    in_split = {
        "train": (days >= split.train_from) & (days < (split.valid_from or split.test_from)),
        "test": days >= split.test_from,
    }
    names = [column.name for column in read_dataset(directory / "out" / "data").categorical]
    for name, chosen in in_split.items():
        expected = [
            (int(time), sorted(times[(users == user) & (times < time)].tolist()))
            for user, time in zip(users[chosen], times[chosen], strict=True)
        ]
        keys = dict(zip(names, read_split(directory / "out" / "data", name).keys, strict=True))
        past = keys["times"]
        lists = [past.values[a:b].tolist() for a, b in itertools.pairwise(past.offsets.tolist())]
        now = np.asarray(keys[SEQUENCES[data][1]]).tolist()
        assert sorted(zip(now, lists, strict=True)) == sorted(expected)
        assert 0 < len(now) < len(times)
        for beside in ("actions", "videos" if "videos" in keys else "items"):
            assert keys[beside].offsets.tolist() == past.offsets.tolist()
            assert keys[beside].values.min() > 0
