# SPDX-License-Identifier: Apache-2.0
"""Runs that repeat a published result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data
from terarec.apps.recipes.data_sets import USER, prepare_rated_sequences, prepare_ratings, prepare_sequences
from terarec.errors import ConfigError, FormatError
from terarec.etl import prepare
from terarec.etl.workflow import Workflow
from terarec.formats.dataset import DATASET_FILE
from terarec.io.files import write_json
from terarec.io.opening import read_bytes, sha256_of
from terarec.metrics.ranking import RetrievalResults
from terarec.models.next_items import MultVAE
from terarec.models.pairs import PairModel
from terarec.models.sequences import SequenceModel
from terarec.spec import MultVAESpec
from terarec.spec.codec import parse_json
from terarec.spec.recipe import RatedSequenceDataSpec, RatingDataSpec, RecipeSpec, SequenceDataSpec
from terarec.train.retrieval import Popularity, evaluate_towers
from terarec.train.run import Run
from terarec.train.seeds import SeedResult, SeedsReport, fit_seeds
from terarec.train.sequence_ranking import evaluate_sequences
from terarec.train.trainer import Callback

TEST_SPLIT = "test"
DATA_FOLDERS = ("data", "histories")
"""Prepared data, which models of a recipe share; the second are ratings with those of the same user."""
SOURCE_FILE = "source.json"
"""Names of the files of the prepared data, and their SHA-256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceReport:
    """Results of `reproduce`."""

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
        out: Directory to write: ``data`` is the prepared data set, which all models share, or ``histories`` that of
            ratings for models that read a user's items, and ``<model>/seed-<n>`` a RUN.
        seeds: Number of runs, with the seeds 0, 1, ...
        threads: CPU threads of the compute; None leaves torch's setting.
        resume: Whether finished runs are kept and an interrupted one continues.
        callbacks: Function from the directory of a run to its callbacks; None for none.
        on_result: Function called after each run.

    Raises:
        ConfigError: No such recipe, `out` holds runs and `resume` is false, or data of other files.
        DataNotFoundError: A public file is missing.
        FormatError: A public file is damaged.
    """
    recipe, described = load_recipe(data, model), load_recipe_data(data)
    histories = isinstance(described, RatingDataSpec) and isinstance(recipe.run.model, MultVAESpec)
    prepared, files = out / DATA_FOLDERS[histories], find_recipe_files(described, directory)
    digests = {file.name: sha256_of(file) for file in files}
    # A data set appears under its name when it is complete; all models of the recipe share it.
    if any((out / folder / DATASET_FILE).is_file() for folder in DATA_FOLDERS):
        _check_source(out, digests, directory)
    if not (prepared / DATASET_FILE).is_file():
        # Before the data, which would be those of any files after a kill in between.
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SOURCE_FILE, digests)
        if isinstance(described, SequenceDataSpec):
            prepare_sequences(files[0], prepared)
        elif isinstance(described, RatingDataSpec):
            prepare_ratings(files[0], prepared, test=described.test, histories=histories)
        elif isinstance(described, RatedSequenceDataSpec):
            prepare_rated_sequences(files[0], prepared, max_length=described.max_length)
        else:
            prepare(Workflow.of(described.workflow), files, prepared)
    # The only setting that belongs to the machine; all others are those of the publication.
    training = dataclasses.replace(recipe.run.training, threads=threads)
    run = dataclasses.replace(recipe.run, data=str(prepared), training=training)
    measure = _MEASURES.get(described.kind)
    results = fit_seeds(
        run,
        out / model,
        seeds,
        TEST_SPLIT,
        callbacks=callbacks,
        resume=resume,
        on_result=on_result,
        measure=measure,
    )
    return ReproduceReport(recipe=recipe, seeds=results)


def _check_source(out: Path, digests: Mapping[str, str], directory: Path) -> None:
    """Raise unless the data set in `out` was made of files with these checksums."""
    source = out / SOURCE_FILE
    try:
        kept = parse_json(read_bytes(source)) if source.is_file() else digests
    except ValueError as error:
        raise FormatError(source, f"damaged ({error}), expected names of files with their SHA-256") from None
    if kept != digests:
        raise ConfigError(out, f"holds data of other files than those in {directory}, expected another directory")


def rank_items(model: nn.Module, run: Run, split: str) -> dict[str, float]:
    """Return the hit rate and NDCG of a sequence model among all items, and those of the most popular items."""
    assert isinstance(model, SequenceModel), "recipes of sequences have sequence models"
    ranked = evaluate_sequences(model, run.reader(split), metrics=_OF_SEQUENCES)
    popular = evaluate_sequences(
        Popularity.of_sequences(model, run.reader("train")), run.reader(split), metrics=_OF_SEQUENCES
    )
    return _figures(ranked, popular)


def rank_items_of_users(model: nn.Module, run: Run, split: str) -> dict[str, float]:
    """Return metrics of the items that a model ranks first for each user, and those of the most popular items.

    Items of the user's train split are not ranked.
    """
    reader, names = run.reader, tuple(_NAMES)
    if isinstance(model, MultVAE):
        counted = Popularity.of_sequences(model, reader("train"))
        ranked, popular = (
            evaluate_sequences(one, reader(split), user=USER, k=_LENGTHS, metrics=names) for one in (model, counted)
        )
    else:
        assert isinstance(model, PairModel), "recipes of ratings have models of users and items, or Mult-VAE"
        counted = Popularity.of_positives(model.item_key, reader("train"))
        ranked, popular = (
            evaluate_towers(one, reader(split), reader("train"), user=USER, k=_LENGTHS, metrics=names)
            for one in (model, counted)
        )
    return _figures(ranked, popular)


_MEASURES = {
    SequenceDataSpec.kind: rank_items,
    RatedSequenceDataSpec.kind: rank_items,
    RatingDataSpec.kind: rank_items_of_users,
}
"""Kind of data -> the measure of its models; others have the metrics of their runs."""

_NAMES = {"hit_rate": "hr", "ndcg": "ndcg", "precision": "precision", "recall": "recall"}
"""Metric -> its name in a recipe's figures."""
_OF_SEQUENCES = ("hit_rate", "ndcg")  # of one relevant item, whose recall is the hit rate
_LENGTHS = (5, 10)


def _figures(ranked: RetrievalResults, popular: RetrievalResults) -> dict[str, float]:
    return {
        f"{prefix}{_NAMES[metric]}@{k}": value
        for prefix, results in (("", ranked), ("popularity_", popular))
        for name, value in results.values.items()
        for metric, _, k in [name.partition("@")]
    }
