# SPDX-License-Identifier: Apache-2.0
"""Recipes whose files the user has: on files of the published layouts each prepares, trains and is measured."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from terarec.apps.recipes import load_recipe, recipe_names, reproduce
from terarec.apps.synthetic import avazu, criteo
from terarec.spec.recipe import PublishedResult

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
}
RECIPES = [(data, model) for data in LAYOUTS for model in recipe_names()[data]]
IN_EVERY_RUN = [("criteo_1tb", "dlrm"), ("ali_ccp", "mmoe"), ("ml_1m", "hstu")]


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
    short = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, training=training))
    monkeypatch.setattr(reproduce, "load_recipe", lambda *_: short)
    report = reproduce.reproduce(data, model, tmp_path / "files", tmp_path / "out")
    figures = report.seeds.results[0].metrics
    published = {name.removeprefix("mean_") for name, value in recipe.published.metrics.items() if value is not None}
    assert published <= figures.keys()
    assert all(0.0 <= figures[name] <= 1.0 for name in published - {"logloss"})
    if isinstance(recipe.published, PublishedResult) and recipe.published.label_auc:
        assert {*recipe.published.label_auc} == {"click", "purchase"}
