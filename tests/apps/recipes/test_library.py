# SPDX-License-Identifier: Apache-2.0
"""Recipes are read by name, and the files of their data found."""

import gzip
from pathlib import Path

import pytest

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data, recipe_names
from terarec.errors import ConfigError, DataNotFoundError
from terarec.etl.workflow import Workflow
from terarec.spec.recipe import RecipeDataSpec, SequenceDataSpec
from tests.errors import at

NAMES = [(data, model) for data, models in recipe_names().items() for model in models]


@pytest.mark.parametrize(("data", "model"), NAMES)
def test_every_recipe_is_a_whole_run_of_the_model_it_is_named_after(data: str, model: str):
    recipe = load_recipe(data, model)
    assert recipe.run.data == data
    # "sasrec_tuned" is one of several runs of a model.
    assert model in (recipe.run.model.kind, f"{recipe.run.model.kind}_tuned", f"{recipe.run.model.kind}_softmax")


@pytest.mark.parametrize("data", recipe_names())
def test_the_preparation_makes_the_splits_that_a_run_needs(data: str):
    spec = load_recipe_data(data)
    if isinstance(spec, SequenceDataSpec):  # whose preparation is no workflow: test_leave_one_out.py
        assert set(spec.published) == set(recipe_names()[data])
    if isinstance(spec, RecipeDataSpec):  # those of ratings: test_ratings.py
        Workflow.of(spec.workflow)
        assert spec.workflow.name == data


@pytest.mark.parametrize(
    ("data", "model", "meant"), [("frape_x1", "deepfm", "frappe_x1"), ("frappe_x1", "depfm", "deepfm")]
)
def test_a_misspelt_name_is_reported_with_the_nearest_one(data: str, model: str, meant: str):
    with pytest.raises(
        ConfigError,
        check=at(
            "recipes" if meant == data.replace("frape", "frappe") and model == "deepfm" else f"recipe for {data}",
            f"did you mean '{meant}'",
        ),
    ):
        load_recipe(data, model)


def write(directory: Path, *names: str) -> list[Path]:
    paths = [directory / name for name in names]
    for path in paths:
        path.write_bytes(gzip.compress(b"label\n") if path.suffix == ".gz" else b"label\n")
    return paths


def test_files_come_in_the_order_of_the_splits_plain_or_compressed(tmp_path: Path):
    train, valid, test = write(tmp_path, "train.csv", "valid.csv.gz", "test.csv")
    assert find_recipe_files(load_recipe_data("frappe_x1"), tmp_path) == (train, valid, test)


def test_a_pattern_gives_its_files_by_their_numbers(tmp_path: Path):
    names = [f"day_{day}" if day % 3 else f"day_{day}.gz" for day in range(24)]
    # The copy of a day, and what is no day, are none.
    write(tmp_path, "day_1.gz", "day_2.gz.part", "day_fea_count.npz", *sorted(names))
    spec = load_recipe_data("criteo_1tb")
    assert [path.name for path in find_recipe_files(spec, tmp_path)] == names
    (tmp_path / "day_5").unlink()
    with pytest.raises(DataNotFoundError, check=at(tmp_path, "has 23 files day_* or day_*.tsv, expected 24")):
        find_recipe_files(spec, tmp_path)


def test_the_published_training_file_goes_before_the_rebuilt_one(tmp_path: Path):
    spec = load_recipe_data("frappe_x1")
    rebuilt, _, _ = write(tmp_path, "train_rebuilt.csv.gz", "valid.csv", "test.csv")
    assert find_recipe_files(spec, tmp_path)[0] == rebuilt
    (published,) = write(tmp_path, "train.csv")
    assert find_recipe_files(spec, tmp_path)[0] == published


def test_a_missing_file_is_reported_with_the_names_it_may_have(tmp_path: Path):
    spec = load_recipe_data("frappe_x1")
    write(tmp_path, "train.csv", "test.csv")
    with pytest.raises(DataNotFoundError, check=at(tmp_path)):
        find_recipe_files(spec, tmp_path)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/nowhere")):
        find_recipe_files(spec, tmp_path / "nowhere")
