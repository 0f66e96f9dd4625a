# SPDX-License-Identifier: Apache-2.0
"""``terarec reproduce`` prepares, trains every seed by the recipe, and reports the published figures, too."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from terarec.apps.recipes import load_recipe, reproduce
from terarec.errors import DataNotFoundError
from tests.apps.recipes.frappe import write_planted
from tests.apps.recipes.sequences import write_planted_sequences
from tests.cli.conftest import figures, rejected
from tests.cli.test_docs import unnamed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planted(tmp_path_factory.mktemp("reproduce") / "files")


@pytest.fixture(scope="module")
def out(files: Path) -> Path:
    return files.parent / "out"


def ask(files: Path, *more: object) -> list[object]:
    return ["reproduce", "frappe_x1", "--model", "dnn", "--data", files, *more]


@pytest.fixture(scope="module")
def reported(files: Path, out: Path) -> dict[str, Any]:
    return figures(*ask(files, "--seeds", 2, "--out", out))


def test_the_figures_are_the_means_of_the_test_split(reported: dict[str, Any], out: Path):
    assert [run["seed"] for run in reported["runs"]] == [0, 1]
    for run in reported["runs"]:
        scored = figures("evaluate", out / "dnn" / f"seed-{run['seed']}", "--data", out / "data", "--split", "test")
        assert (run["auc"], run["logloss"]) == pytest.approx((scored["auc"], scored["logloss"]))
        assert scored["rows"] == 300
    for metric in ("auc", "logloss"):
        values = [run[metric] for run in reported["runs"]]
        assert reported[metric] == pytest.approx(statistics.fmean(values))
        assert reported[f"{metric}_deviation"] == pytest.approx(statistics.stdev(values))
    assert reported["seconds"] == pytest.approx(sum(run["seconds"] for run in reported["runs"]))


def test_the_published_figures_are_reported_too(reported: dict[str, Any]):
    published = load_recipe("frappe_x1", "dnn").published
    assert (reported["published_auc"], reported["published_logloss"]) == (published.auc, published.logloss)
    assert reported["published"] == published.source


def test_every_figure_is_on_the_page(reported: dict[str, Any]):
    assert unnamed(reported, "reproduce") == set()
    assert unnamed(reported["runs"][0], "reproduce") == set()


def test_existing_content_is_kept_unless_it_is_resumed(reported: dict[str, Any], files: Path, out: Path):
    rejected(*ask(files, "--seeds", 2, "--out", out), where=out / "dnn" / "seed-0", problem="--resume")
    again = figures(*ask(files, "--seeds", 2, "--out", out, "--resume"))
    assert again == reported


def test_data_of_other_files_are_not_taken_for_these(reported: dict[str, Any], out: Path, tmp_path: Path):
    """A second model was trained on the data that the directory had, whatever --data named."""
    other = write_planted(tmp_path / "files", rows=40)
    rejected(*ask(other, "--out", out, "--resume"), where=out, problem="data of other files than those in")


def test_further_seeds_join_finished_ones_in_the_directory_of_the_data(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    ask_lr = ["reproduce", "frappe_x1", "--model", "lr", "--data", files]
    one = figures(*ask_lr, "--threads", 1)
    assert (one["auc"], one["auc_deviation"]) == (one["runs"][0]["auc"], None)
    assert (tmp_path / "frappe_x1" / "lr" / "seed-0" / "run.json").is_file()
    two = figures(*ask_lr, "--seeds", 2, "--resume")
    assert two["runs"][0] == one["runs"][0]
    assert len(two["runs"]) == two["seeds"] == 2


def test_a_missing_file_and_an_unknown_model_are_one_line(files: Path, tmp_path: Path):
    rejected(*ask(tmp_path), error=DataNotFoundError, where=tmp_path, problem="train.csv")
    typed = ["reproduce", "frappe_x1", "--model", "depfm", "--data", files]
    rejected(*typed, where="recipe for frappe_x1", problem="did you mean 'deepfm'?")


@pytest.mark.slow
def test_sequences_are_ranked_beside_the_most_popular_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    directory = write_planted_sequences(tmp_path / "files")
    recipe = load_recipe("amazon_beauty", "sasrec")
    short = dataclasses.replace(recipe.run.training, epochs=30, batch_size=32)
    run = dataclasses.replace(recipe.run, training=short)
    monkeypatch.setattr(reproduce, "load_recipe", lambda *_: dataclasses.replace(recipe, run=run))
    reported = figures("reproduce", "amazon_beauty", "--model", "sasrec", "--data", directory)
    # One item follows; after all others but those of the history, popularity has it in ten of the twelve places.
    assert reported["ndcg@5"] > 0.5 > reported["popularity_ndcg@5"]
    assert (reported["published_hr@10"], reported["published_ndcg@10"]) == (0.0605, 0.0318)
    assert unnamed(reported, "reproduce") == set()
    assert unnamed(reported["runs"][0], "reproduce") == set()
    scored = figures(
        "evaluate",
        tmp_path / "amazon_beauty/sasrec/seed-0",
        "--data",
        tmp_path / "amazon_beauty/data",
        "--split",
        "test",
    )
    assert scored["retrieval"]["hit_rate@10"] == pytest.approx(reported["hr@10"])
    assert scored["popularity"]["hit_rate@10"] == pytest.approx(reported["popularity_hr@10"])
    assert unnamed(scored, "evaluate") == set()
