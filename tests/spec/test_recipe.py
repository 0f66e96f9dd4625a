# SPDX-License-Identifier: Apache-2.0
"""A recipe is rejected where it could not be run."""

from typing import Any

import pytest

from terarec.apps.recipes import load_recipe, load_recipe_data
from terarec.errors import ConfigError
from terarec.spec import from_data, to_data
from terarec.spec.recipe import RecipeDataSpec, RecipeSpec, SequenceDataSpec

PUBLISHED = {"kind": "binary", "auc": 0.98, "logloss": 0.15, "source": "https://example.org/result"}


def recipe(published: dict[str, Any] | None = None, **run: Any) -> RecipeSpec:
    data = {"published": {**PUBLISHED, **(published or {})}, "run": {"data": "frappe_x1", **run}}
    return from_data(RecipeSpec, data)


def test_it_survives_the_codec():
    for spec in (
        load_recipe("frappe_x1", "deepfm"),
        load_recipe_data("frappe_x1"),
        load_recipe("amazon_beauty", "sasrec"),
        load_recipe_data("amazon_beauty"),
        load_recipe("ml_100k", "ncf"),
        load_recipe_data("ml_100k"),
    ):
        assert from_data(type(spec), to_data(spec)) == spec


@pytest.mark.parametrize(
    ("published", "path"),
    [
        ({"auc": 1.5}, "published.auc"),
        ({"logloss": -0.1}, "published.logloss"),
        ({"source": "BARS"}, "published.source"),
        ({"mean_auc": 0.98}, "published"),
        ({"label_auc": {"click": 0.6}}, "published"),
        ({"mean_auc": 2.0, "mean_logloss": 0.1}, "published.mean_auc"),
    ],
)
def test_a_wrong_published_figure_is_reported_with_its_path(published: dict[str, Any], path: str):
    with pytest.raises(ConfigError) as error:
        recipe(published)
    assert str(error.value).startswith(f"$.{path}: ")


@pytest.mark.parametrize(
    ("published", "path"),
    [
        ({"hit_rate": 1.5}, "published.hit_rate"),
        ({"ndcg": -0.1}, "published.ndcg"),
        ({"source": "x"}, "published.source"),
        ({"ndcg": None}, "published"),
        ({"precision": 2.0}, "published.precision"),
    ],
)
def test_a_wrong_published_ranking_is_reported_with_its_path(published: dict[str, Any], path: str):
    ranking = {"kind": "ranking", "hit_rate": 0.06, "ndcg": 0.03, "source": "https://example.org", **published}
    with pytest.raises(ConfigError) as error:
        from_data(RecipeSpec, {"published": ranking, "run": {"data": "amazon_beauty"}})
    assert str(error.value).startswith(f"$.{path}: ")


def test_a_file_of_sequences_has_a_name():
    with pytest.raises(ConfigError, match="names"):
        SequenceDataSpec(source="https://example.org", names=(), published={})


@pytest.mark.parametrize(
    ("run", "path"), [({"data": "some/folder"}, "run.data"), ({"init_from": "run"}, "run.init_from")]
)
def test_a_run_that_names_paths_is_rejected(run: dict[str, Any], path: str):
    with pytest.raises(ConfigError) as error:
        recipe(**run)
    assert str(error.value).startswith(f"$.{path}: ")


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("files", {"train": ["a.csv"], "valid": ["b.csv"]}, "files"),
        ("files", {"train": ["a.csv"], "valid": ["b.csv"], "test": []}, "files.test"),
        ("source", "here", "source"),
    ],
)
def test_data_without_the_files_of_all_splits_are_rejected(field: str, value: object, path: str):
    data = to_data(load_recipe_data("frappe_x1")) | {field: value}
    with pytest.raises(ConfigError) as error:
        from_data(RecipeDataSpec, data)
    assert str(error.value).startswith(f"$.{path}: ")


def test_a_preparation_by_another_split_is_rejected():
    data = to_data(load_recipe_data("frappe_x1"))
    data["workflow"]["split"] = {"kind": "by_hash"}
    with pytest.raises(ConfigError) as error:
        from_data(RecipeDataSpec, data)
    assert str(error.value).startswith("$.workflow.split: ")
