# SPDX-License-Identifier: Apache-2.0
"""Runs that repeat a published result, and their data of the form in which a user's last items are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from terarec.apps.recipes import find_recipe_files, load_recipe, load_recipe_data
from terarec.apps.recipes.ratings import prepare_ratings, read_text
from terarec.errors import FormatError
from terarec.etl import prepare
from terarec.etl.workflow import Workflow
from terarec.formats import write_dataset
from terarec.formats.dataset import DATASET_FILE
from terarec.formats.parquet import ParquetShardWriter
from terarec.io.directories import atomic_dir
from terarec.models.pairs import PairModel
from terarec.models.sequences import SequenceModel
from terarec.ragged import Ragged, offsets_of
from terarec.spec import CategoricalColumn, DatasetSpec, LabelColumn, ShardSpec
from terarec.spec.recipe import RatingDataSpec, RecipeSpec, SequenceDataSpec
from terarec.train.retrieval import Popularity, evaluate_towers
from terarec.train.run import Run
from terarec.train.seeds import SeedResult, SeedsReport, fit_seeds
from terarec.train.sequence_ranking import evaluate_popularity, evaluate_sequences
from terarec.train.trainer import Callback

ITEM, HISTORY, LABEL = "item", "history", "next"
"""Columns of a sample: an item, the items before it, and the label, which is 1."""

_FEWEST_ITEMS = 3
_LAST_ITEMS = {"train": 3, "valid": 2, "test": 1}
"""Split -> how many items from the end of a sequence its sample's item is."""

Integers = NDArray[np.int64]


def prepare_sequences(file: Path, out: Path) -> None:
    """Write the data set of a file of sequences, atomically.

    A sample of the train split has the last item but two and those before it; the history of the validation ends
    there, and that of the test one item later. A user with three items, and so without a history to train on, has an
    empty one.

    Args:
        file: A line a user: the user's number, and at least three numbers of items, which are 1 or higher, in the order
            of time. Plain or compressed.
        out: Directory to write.

    Raises:
        FormatError: A line of another form, with its number.
    """
    sequences = _read(file)
    longest = max(len(items) for items in sequences)
    rows = 1 + max(int(items.max()) for items in sequences)
    spec = DatasetSpec(
        name=file.name.partition(".")[0],
        storage="parquet",
        labels=(LabelColumn(name=LABEL),),
        dense=(),
        categorical=(
            CategoricalColumn(name=ITEM, rows=rows),
            # A list has room for two keys at least.
            CategoricalColumn(name=HISTORY, rows=rows, hotness=max(2, longest - 1)),
        ),
    )
    with atomic_dir(out) as partial:
        splits = {}
        for split, last in _LAST_ITEMS.items():
            name = f"{split}/part-00000.parquet"
            writer = ParquetShardWriter(partial / name, spec)
            items = np.array([items[-last] for items in sequences], dtype=np.int64)
            histories = [items[:-last] for items in sequences]
            lists = Ragged(np.concatenate(histories), offsets_of(np.array([len(items) for items in histories])))
            count = len(sequences)
            writer.write(np.ones((count, 1), np.float32), np.empty((count, 0), np.float32), [items, lists])
            writer.close()
            splits[split] = (ShardSpec(file=name, rows=count),)
        write_dataset(replace(spec, splits=splits), partial, location=out)


def _read(file: Path) -> Sequence[Integers]:
    sequences = []
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) <= _FEWEST_ITEMS or not all(word.isascii() and word.isdigit() for word in words):
            got = line if len(line) <= 60 else f"{line[:60]}..."
            raise FormatError(file, f"line {number}", f"got {got!r}, expected a user and at least 3 items, all numbers")
        items = np.array([int(word) for word in words[1:]], dtype=np.int64)
        if items.min() < 1:
            raise FormatError(file, f"line {number}", "got the item 0, expected numbers from 1")
        sequences.append(items)
    if not sequences:
        raise FormatError(file, "has no lines, expected one for each user")
    return sequences


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
    # A data set appears under its name when it is complete; all models of the recipe share it.
    if not (prepared / DATASET_FILE).is_file():
        files = find_recipe_files(described, directory)
        if isinstance(described, SequenceDataSpec):
            prepare_sequences(files[0], prepared)
        elif isinstance(described, RatingDataSpec):
            prepare_ratings(files[0], prepared, test=described.test)
        else:
            prepare(Workflow.of(described.workflow), files, prepared)
    # The only setting that belongs to the machine; all others are those of the publication.
    training = dataclasses.replace(recipe.run.training, threads=threads)
    run = dataclasses.replace(recipe.run, data=str(prepared), training=training)
    measure = {SequenceDataSpec.kind: rank_items, RatingDataSpec.kind: rank_items_of_users}.get(described.kind)
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


def rank_items(model: nn.Module, run: Run, split: str) -> dict[str, float]:
    """Return the hit rate and NDCG of a sequence model among all items, and those of the most popular items."""
    assert isinstance(model, SequenceModel), "recipes of sequences have sequence models"
    ranked = evaluate_sequences(model, run.reader(split))
    popular = evaluate_popularity(
        run.reader(split), run.reader("train"), item=model.item_key, history=model.history, num_items=model.num_items
    )
    return {**_figures("", ranked.values), **_figures("popularity_", popular.values)}


def rank_items_of_users(model: nn.Module, run: Run, split: str) -> dict[str, float]:
    """Return metrics of the items that a model ranks first for each user, and those of the most popular items.

    Items of the user's train split are not ranked.
    """
    assert isinstance(model, PairModel), "recipes of ratings have models of users and items"
    popular = Popularity(model.item_key, run.reader("train"))
    found = {
        prefix: evaluate_towers(
            one, run.reader(split), run.reader("train"), user=model.user_key, k=(5, 10), metrics=tuple(_NAMES)
        )
        for prefix, one in (("", model), ("popularity_", popular))
    }
    return {name: value for prefix, one in found.items() for name, value in _figures(prefix, one.values).items()}


_NAMES = {"hit_rate": "hr", "ndcg": "ndcg", "precision": "precision"}
"""Metric -> its name in a recipe's figures."""


def _figures(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {
        f"{prefix}{_NAMES[metric]}@{k}": value
        for name, value in values.items()
        for metric, _, k in [name.partition("@")]
        if metric in _NAMES
    }
