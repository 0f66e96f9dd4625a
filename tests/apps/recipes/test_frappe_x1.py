# SPDX-License-Identifier: Apache-2.0
"""The recipes of Frappe_x1 say what BARS published, and prepare its files into the rows that BARS counted."""

from pathlib import Path

import pytest

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data, recipe_names
from terarec.data import Reader
from terarec.etl import prepare
from terarec.etl.workflow import Workflow
from terarec.models import build_model
from terarec.spec import AdamSpec, CategoricalColumn, DatasetSpec, LabelColumn, PlateauSchedule
from tests.apps.recipes.frappe import FRAPPE, needs_frappe

# The AUC and logloss of https://github.com/reczoo/BARS/blob/main/docs/CTR/leaderboard/frappe_x1.csv; the weight of L2
# on the tables in the logs that it links.
LEADERBOARD = {
    "lr": (0.9356, 0.3076, 1e-5),
    "fm": (0.9671, 0.2065, 5e-6),
    "dnn": (0.9833, 0.1622, 0.05),
    "wide_deep": (0.9841, 0.1490, 0.1),
    "deepfm": (0.9842, 0.1482, 0.05),
    "dcn": (0.9839, 0.1527, 0.05),
    "dcn_v2": (0.9845, 0.1491, 0.05),
    "xdeepfm": (0.9845, 0.1466, 0.1),
    "dlrm": (0.9840, 0.1444, 0.1),
    "autoint": (0.9848, 0.1490, 0.1),
}
# Weights outside the tables, from the total in each log: less 5,389 rows of 10 and, with linear terms, of 1. The log of
# DNN counts its network twice; it is that of DLRM here.
DENSE_WEIGHTS = {
    "lr": 1,
    "fm": 1,
    "dnn": 364_001,
    "wide_deep": 364_001,
    "deepfm": 364_001,
    "dcn": 364_701,
    "dcn_v2": 404_501,
    "xdeepfm": 370_530,
    "dlrm": 364_001,
    "autoint": 568_290,
}
ROWS = {"train": 202_027, "valid": 57_722, "test": 28_860}
POSITIVES = {"train": 67_604, "valid": 19_063, "test": 9_536}


def test_there_is_a_recipe_for_each_model_of_the_table():
    assert set(recipe_names()["frappe_x1"]) == set(LEADERBOARD)


@pytest.mark.parametrize("model", LEADERBOARD)
def test_a_recipe_has_the_published_figures_and_settings(model: str):
    recipe = load_recipe("frappe_x1", model)
    auc, logloss, l2 = LEADERBOARD[model]
    assert recipe.published.auc == pytest.approx(auc, abs=5.1e-5)
    assert recipe.published.logloss == pytest.approx(logloss, abs=5.1e-5)
    rule = recipe.run.sparse_optimizer
    assert rule.rows is not None
    assert (rule.kind, rule.lr, rule.rows.mode, rule.rows.l2) == ("adam", 1e-3, "global", l2)
    assert recipe.run.dense_optimizer == AdamSpec(lr=1e-3)
    training = recipe.run.training
    assert (training.batch_size, training.patience, training.clip_norm) == (4096, 2, 10.0)
    assert training.schedule == PlateauSchedule(factor=0.1, patience=0, threshold=1e-6, min_lr=1e-6)


@pytest.mark.parametrize("model", LEADERBOARD)
def test_a_recipe_builds_a_model_of_the_published_size(model: str):
    workflow = load_recipe_data("frappe_x1").workflow
    dataset = DatasetSpec(
        name=workflow.name,
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(),
        categorical=tuple(CategoricalColumn(name=name, rows=3) for name in workflow.categorical),
    )
    built = build_model(load_recipe("frappe_x1", model).run.model, dataset)
    # Ours has a bias among the linear terms next to an MLP, too.
    further = model in ("wide_deep", "deepfm", "xdeepfm")
    assert sum(weight.numel() for weight in built.parameters()) == DENSE_WEIGHTS[model] + further


@needs_frappe
def test_the_files_become_the_rows_that_the_published_logs_count(tmp_path: Path):
    spec = load_recipe_data("frappe_x1")
    prepare(Workflow.of(spec.workflow), find_recipe_files(spec, FRAPPE), tmp_path / "data")
    for split, rows in ROWS.items():
        labels = [batch.label for batch in Reader(tmp_path / "data", split, batch_size=1 << 16)]
        assert sum(len(label) for label in labels) == rows
        assert sum(label.sum().item() for label in labels) == POSITIVES[split]
