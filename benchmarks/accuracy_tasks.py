# SPDX-License-Identifier: Apache-2.0
"""Train models whose figures have no publication: two tasks on Adult, and histories with a planted preference.

``adult``: income above $50,000 and "never married" of the census data in examples/data, by MMoE and PLE, and by models
of one task each. The columns of the marital status and of the relationship, which tells it, are no inputs. A tenth of
the training file is for validation; a figure is of the published test file, the peer is the model of one task that is
best there, of several widths, dropouts and rates. Those of MMoE and PLE were chosen by the validation.

``histories``: generated samples of a product and the products before it, whose best AUC is known, by DIN, DIEN and BST,
and by a model that pools the history; the peer is the best AUC, and ``gain`` the part of what is between it and 0.5.

Afterwards ``python benchmarks/accuracy_page.py`` writes docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from record import Row, append_rows
from torch import nn

from terarec.etl import prepare
from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.metrics.auc import AUC
from terarec.ragged import Ragged
from terarec.spec import (
    AdamSpec,
    BSTSpec,
    CategoricalColumn,
    DatasetSpec,
    DIENSpec,
    DINSpec,
    DNNSpec,
    LabelColumn,
    LabelSpec,
    MMoESpec,
    PLESpec,
    RunSpec,
    ShardSpec,
    SplitByFiles,
    TargetHistory,
    TrainingSpec,
)
from terarec.spec.dataset import FIRST_ID
from terarec.spec.model import ModelSpec
from terarec.train.run import Run
from terarec.train.seeds import SeedsReport, fit_seeds

Integers = NDArray[np.int64]

ADULT = Path(__file__).resolve().parents[1] / "examples" / "data" / "adult"
TASKS = {
    "income": LabelSpec(name="income", positives=(">50K", ">50K.")),
    "never_married": LabelSpec(name="never_married", column="marital_status", positives=("Never-married",)),
}
_TELLING = ("marital_status", "relationship")
SEVERAL: Mapping[str, ModelSpec] = {
    "mmoe": MMoESpec(experts=4, hidden=(64,), tower=(32,), dropout=0.3),
    "ple": PLESpec(label_experts=2, shared_experts=2, layers=1, hidden=(64,), tower=(32,), dropout=0.3),
}
ALONE: Mapping[str, tuple[ModelSpec, float]] = {
    "dnn": (DNNSpec(hidden=(64, 32), dropout=0.1), 0.001),
    "dnn, dropout 0.3": (DNNSpec(hidden=(64, 32), dropout=0.3), 0.001),
    "dnn, dropout 0.3, half the rate": (DNNSpec(hidden=(64, 32), dropout=0.3), 0.0005),
    "dnn, 128-64, dropout 0.3": (DNNSpec(hidden=(128, 64), dropout=0.3), 0.001),
    "dnn, 128-64, dropout 0.5": (DNNSpec(hidden=(128, 64), dropout=0.5), 0.001),
}
PRODUCTS, CATEGORIES, LONGEST = 200, 20, 20
HISTORY = (
    TargetHistory(target="product", history="past_products"),
    TargetHistory(target="category", history="past_categories"),
)
HISTORIES: Mapping[str, ModelSpec] = {
    "dnn": DNNSpec(hidden=(64, 32), pooling="mean"),
    "din": DINSpec(sequences=HISTORY, hidden=(64, 32)),
    "dien": DIENSpec(sequences=HISTORY, hidden=(64, 32), max_length=LONGEST),
    "bst": BSTSpec(sequences=HISTORY, hidden=(64, 32), max_length=LONGEST, dropout=0.1),
}


@dataclass(frozen=True, kw_only=True)
class TaskRow(Row):
    """The AUC of one label of one seed, and its part of what can be gained where the best one is known."""

    data: str
    model: str
    label: str
    seed: int
    gain: float | None
    steps: int
    seconds: float


def adult_rows(folder: Path, seeds: int) -> Iterator[TaskRow]:
    """Yield a row for each model, label and seed; those of one task come first."""
    workflow = PRESETS["adult"]()
    workflow = replace(
        workflow,
        split=SplitByFiles(valid=0, test=1, valid_fraction=0.1),
        categorical=tuple(name for name in workflow.categorical if name not in _TELLING),
        steps=tuple(step if not hasattr(step, "min_count") else _without_telling(step) for step in workflow.steps),
    )
    files = [ADULT / "adult.data.gz", ADULT / "adult.test.gz"]
    for name, labels in {**{name: (task,) for name, task in TASKS.items()}, "both": tuple(TASKS.values())}.items():
        prepare(Workflow.of(replace(workflow, labels=labels)), files, folder / name)
    training = TrainingSpec(batch_size=512, epochs=40, patience=4, threads=1)
    best: dict[str, float] = {}
    for label in TASKS:
        for number, (model, (spec, rate)) in enumerate(ALONE.items()):
            report = _fit(spec, folder / label, folder / f"{label}-{number}", training, seeds, "test", rate)
            best[label] = max(best.get(label, 0.0), report.mean("auc"))
            yield from _rows("adult", model, label, "auc", report)
    for model, spec in SEVERAL.items():
        report = _fit(spec, folder / "both", folder / model, training, seeds, "test", 0.001)
        for label in TASKS:
            yield from _rows("adult", model, label, f"auc/{label}", report, "best of one task", best[label])


def _without_telling(step: object) -> object:
    return replace(step, columns=tuple(name for name in step.columns if name not in _TELLING))  # type: ignore[type-var,attr-defined]


def history_rows(folder: Path, seeds: int, models: Collection[str] = HISTORIES) -> Iterator[TaskRow]:
    """Yield a row for each model and seed."""
    best = write_histories(folder / "data")
    training = TrainingSpec(batch_size=256, epochs=6, threads=1)
    for model in models:
        spec = HISTORIES[model]
        report = _fit(spec, folder / "data", folder / model, training, seeds, "valid", 0.003)
        yield from _rows("histories", model, "liked", "auc", report, "best AUC", best)


def write_histories(out: Path, *, train: int = 100_000, valid: int = 20_000) -> float:
    """Write a data set of users who like a product the more, the more of its category they have; return its best AUC.

    As in the Amazon data with which DIN and DIEN were published, a sample is a product and its category, and up to 20
    products and categories before them. A product of category c is liked with the logit 1.2 log(1 + n) - 1.7 + q, with
    n products of c in the history and a quality q of the product. Users have three favourite categories, of which three
    quarters of their products are, and a half of the products that they judge. The best AUC is that of the logits
    themselves.
    """
    random = np.random.default_rng(5)
    category = random.integers(0, CATEGORIES, PRODUCTS)
    by_category = category.argsort(kind="stable")
    starts = np.searchsorted(category[by_category], np.arange(CATEGORIES + 1))
    quality = random.normal(0, 0.5, PRODUCTS)
    columns = tuple(
        CategoricalColumn(name=name, rows=FIRST_ID + rows, hotness=hotness, given=False)
        for name, rows, hotness in (
            ("product", PRODUCTS, 1),
            ("category", CATEGORIES, 1),
            ("past_products", PRODUCTS, LONGEST),
            ("past_categories", CATEGORIES, LONGEST),
        )
    )
    spec = DatasetSpec(
        name="histories", storage="parquet", labels=(LabelColumn(name="liked"),), dense=(), categorical=columns
    )
    splits, best = {}, 0.0
    for split, rows in (("train", train), ("valid", valid)):
        lengths = random.integers(1, LONGEST + 1, rows)
        owners = np.repeat(np.arange(rows), lengths)
        favourites = random.integers(0, CATEGORIES, (rows, 3))

        past, product = (
            _products(random, favourites[users], share, by_category, starts)
            for users, share in ((owners, 0.75), (np.arange(rows), 0.5))
        )
        same = np.bincount(owners, category[past] == category[product][owners], rows)
        logits = 1.2 * np.log1p(same) - 1.7 + quality[product]
        label = (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        best = AUC().update(logits, label).compute()
        file = f"{split}/part-00000.parquet"
        writer = ParquetShardWriter(out / file, spec)
        offsets = np.concatenate([[0], lengths.cumsum()])
        histories = (Ragged(ids, offsets) for ids in (past + FIRST_ID, category[past] + FIRST_ID))
        keys = [product + FIRST_ID, category[product] + FIRST_ID, *histories]
        writer.write(label[:, None], np.empty((rows, 0), np.float32), keys)
        writer.close()
        splits[split] = (ShardSpec(file=file, rows=rows),)
    write_dataset(replace(spec, splits=splits, best_auc=best), out)
    return best


def _products(
    random: np.random.Generator, favourites: Integers, share: float, by_category: Integers, starts: Integers
) -> Integers:
    """Draw a product for each row of favourite categories [n, 3]: the `share` of one of these, else of all."""
    count = len(favourites)
    own = favourites[np.arange(count), random.integers(0, 3, count)]
    places = starts[own] + (random.random(count) * (starts[own + 1] - starts[own])).astype(np.int64)
    return np.where(random.random(count) < share, by_category[places], random.integers(0, PRODUCTS, count))


def _fit(
    spec: ModelSpec, data: Path, out: Path, training: TrainingSpec, seeds: int, split: str, lr: float
) -> SeedsReport:
    rate = AdamSpec(lr=lr)
    run = RunSpec(data=str(data), model=spec, training=training, dense_optimizer=rate, sparse_optimizer=rate)
    return fit_seeds(run, out, seeds, split, measure=_of_labels)


def _of_labels(model: nn.Module, run: Run, split: str) -> dict[str, float]:
    """Return the AUC, and that of each label."""
    overall = run.trainer.evaluator.evaluate(model, run.reader(split)).results.overall
    return {"auc": overall.values["auc"], **{f"auc/{name}": of.values["auc"] for name, of in overall.labels.items()}}


def _rows(
    data: str, model: str, label: str, metric: str, report: SeedsReport, peer: str = "", best: float | None = None
) -> Iterator[TaskRow]:
    for result in report.results:
        auc = result.metrics[metric]
        yield TaskRow(
            case=f"{data}, {model}, {label}, seed {result.seed}",
            metric="AUC",
            value=auc,
            unit="",
            peer=peer,
            peer_value=best,
            data=data,
            model=model,
            label=label,
            seed=result.seed,
            gain=(auc - 0.5) / (best - 0.5) if best is not None and data == "histories" else None,
            steps=result.steps,
            seconds=result.seconds,
        )


DATA = {"adult": adult_rows, "histories": history_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=list(DATA), choices=DATA, help="data to train on (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of models of each kind")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    for name in options.data:
        with tempfile.TemporaryDirectory() as folder:
            append_rows("accuracy_tasks", DATA[name](Path(folder), options.seeds), dry=options.dry)


if __name__ == "__main__":
    main()
