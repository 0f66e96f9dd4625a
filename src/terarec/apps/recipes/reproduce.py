# SPDX-License-Identifier: Apache-2.0
"""Runs that repeat a published result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data
from terarec.etl import prepare
from terarec.etl.workflow import Workflow
from terarec.formats.dataset import DATASET_FILE
from terarec.spec.run import RecipeSpec
from terarec.train.seeds import SeedResult, SeedsReport, fit_seeds
from terarec.train.trainer import Callback

TEST_SPLIT = "test"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceReport:
    """Results of `reproduce`.

    Attributes:
        recipe: Settings and published figures.
        seeds: The trained runs, evaluated on the test split.
    """

    recipe: RecipeSpec
    seeds: SeedsReport


def reproduce(
    data: str,
    model: str,
    directory: Path,
    out: Path,
    *,
    seeds: int = 1,
    threads: int | None = None,
    resume: bool = False,
    callbacks: Callable[[Path], Sequence[Callback]] | None = None,
    on_result: Callable[[SeedResult], None] | None = None,
) -> ReproduceReport:
    """Prepare public data and train a model on them with the settings of a published result.

    Args:
        data: Name of the data, such as "frappe_x1".
        model: Name of the model, such as "deepfm".
        directory: Directory of the public files.
        out: Directory to write: ``data`` is the prepared data set, which all models share, ``<model>/seed-<n>`` a RUN.
        seeds: Number of runs, with the seeds 0, 1, ...
        threads: CPU threads of the compute; None leaves torch's setting.
        resume: Whether finished runs are kept and an interrupted one continues.
        callbacks: Function from the directory of a run to its callbacks; None for none.
        on_result: Function called after each run.

    Raises:
        ConfigError: No such recipe, or `out` holds runs and `resume` is false.
        DataNotFoundError: A public file is missing.
    """
    recipe, described = load_recipe(data, model), load_recipe_data(data)
    prepared = out / "data"
    # A data set appears as a whole, so that one that is there is complete; all models of the data share it.
    # A data set appears under its name when it is complete; all models of the recipe share it.
    if not (prepared / DATASET_FILE).is_file():
        files = find_recipe_files(described, directory)
        prepare(Workflow.of(described.workflow), files, prepared)
    # The only setting that belongs to the machine; all others are those of the publication.
    training = dataclasses.replace(recipe.run.training, threads=threads)
    run = dataclasses.replace(recipe.run, data=str(prepared), training=training)
    results = fit_seeds(run, out / model, seeds, TEST_SPLIT, callbacks=callbacks, resume=resume, on_result=on_result)
    return ReproduceReport(recipe=recipe, seeds=results)
