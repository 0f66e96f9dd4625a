"""``terarec reproduce`` on small files in the format of a recipe's data."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from terarec.recipes import load_recipe, load_recipe_data
from tests.cli.conftest import figures, refused, terarec

ROWS = {"train": 400, "valid": 150, "test": 200}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose label depends on the user and the item."""
    folder = tmp_path_factory.mktemp("frappe")
    columns = [column.name for column in load_recipe_data("frappe_x1").workflow.source.columns]
    rng = np.random.default_rng(0)
    for split, rows in ROWS.items():
        values = rng.integers(0, 8, (rows, len(columns) - 1))
        odds = 1 / (1 + np.exp(-(values[:, 0] + values[:, 1] - 7.0)))
        labels = (rng.random(rows) < odds).astype(int)
        lines = [",".join(map(str, [label, *row])) for label, row in zip(labels, values, strict=True)]
        (folder / f"{split}.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    return folder


def test_the_figures_are_the_means_of_the_seeds_beside_the_published_ones(directory: Path, tmp_path: Path) -> None:
    found = figures("reproduce", "frappe_x1", "--model", "lr", "--data", directory, "--out", tmp_path, "--seeds", 2)
    published = load_recipe("frappe_x1", "lr").published
    assert (found["published_auc"], found["published_logloss"]) == (published.auc, published.logloss)
    runs = found["seeds"]
    assert [run["seed"] for run in runs] == [0, 1]
    for name in ("auc", "logloss"):
        values = [run[name] for run in runs]
        assert found[name] == pytest.approx(statistics.fmean(values))
        assert found[f"{name}_deviation"] == pytest.approx(statistics.stdev(values))
    assert found["seconds"] == pytest.approx(sum(run["seconds"] for run in runs))
    for run in runs:
        evaluated = figures("evaluate", run["out"], "--data", tmp_path / "data", "--split", "test")
        assert (evaluated["rows"], evaluated["auc"]) == (ROWS["test"], pytest.approx(run["auc"]))
        assert evaluated["logloss"] == pytest.approx(run["logloss"])


def test_further_seeds_join_the_finished_ones_with_resume(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["reproduce", "frappe_x1", "--model", "fm", "--data", directory]
    one = figures(*arguments, "--threads", 1)
    assert math.isclose(one["auc"], one["seeds"][0]["auc"])
    assert one["auc_deviation"] is None
    assert (tmp_path / "frappe_x1" / "fm" / "seed-0" / "run.json").is_file()
    assert "--resume" in refused(*arguments, "--seeds", 2, code=2)
    two = figures(*arguments, "--seeds", 2, "--resume")
    assert two["seeds"][0] == one["seeds"][0]
    assert len(two["seeds"]) == 2


def test_an_unknown_recipe_and_missing_files_are_refused(directory: Path, tmp_path: Path) -> None:
    assert "did you mean 'deepfm'" in refused(
        "reproduce", "frappe_x1", "--model", "deepfn", "--data", directory, code=2
    )
    arguments = ["reproduce", "frappe_x1", "--model", "lr", "--data", tmp_path, "--out", tmp_path / "out"]
    assert "train.csv" in refused(*arguments, code=1)
    assert not (tmp_path / "out").exists()
    ended = terarec("reproduce", "frappe_x1", "--model", "lr", "--data", directory, "--out", tmp_path / "out")
    assert "seed 0: auc" in ended.out
