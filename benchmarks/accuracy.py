# SPDX-License-Identifier: Apache-2.0
"""Train the recipes of a data set with several seeds, by the command ``terarec reproduce``.

Run ``python benchmarks/accuracy.py frappe_x1 DIR``, where DIR has the files that the recipes need. Afterwards
``python benchmarks/accuracy_page.py`` writes docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import Row, append_rows

from terarec.apps.recipes import load_recipe, recipe_names
from terarec.spec.recipe import PublishedRanking

TERAREC = Path(sys.executable).with_name("terarec")


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Row):
    """The test AUC of one seed, and the other results of the run."""

    data: str
    model: str
    seed: int
    logloss: float
    published_logloss: float
    steps: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RankingRow(Row):
    """The hit rate of one seed among the first 10 of all items, and the other results of the run."""

    data: str
    model: str
    seed: int
    ndcg: float
    published_ndcg: float | None
    popularity: float
    steps: int
    seconds: float | None
    precision: float | None = None
    published_precision: float | None = None
    recall: float | None = None


def run_recipe(data: str, model: str, directory: Path, out: Path, seeds: int) -> list[dict[str, Any]]:
    """Train a recipe's model with the seeds from 0 on; return the figures of each. Finished runs in `out` are kept."""
    command = [TERAREC, "reproduce", data, "--model", model, "--data", directory, "--seeds", seeds, "--out", out]
    arguments = [*map(str, command), "--resume", "--json"]
    output = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    runs: list[dict[str, Any]] = json.loads(output)["runs"]
    return runs


def ranking_row(data: str, model: str, run: Mapping[str, Any], *, is_timed: bool = True) -> dict[str, Any]:
    """Return the fields of a `RankingRow` of a run."""
    published = load_recipe(data, model).published
    assert isinstance(published, PublishedRanking)
    return {
        **_common(data, model, run),
        "metric": "test HR@10",
        "value": run["hr@10"],
        "peer": "" if published.hit_rate is None else "published",
        "peer_value": published.hit_rate,
        "ndcg": run["ndcg@10"],
        "published_ndcg": published.ndcg,
        "popularity": run["popularity_hr@10"],
        "seconds": run["seconds"] if is_timed else None,
        "precision": run.get("precision@10"),
        "published_precision": published.precision,
        "recall": run.get("recall@10"),
    }


def _common(data: str, model: str, run: Mapping[str, Any]) -> dict[str, Any]:
    case = f"{data}, {model}, seed {run['seed']}"
    return {"case": case, "unit": "", "data": data, "model": model, "seed": run["seed"], "steps": run["steps"]}


def rows_of(data: str, model: str, runs: Iterable[Mapping[str, Any]], *, is_timed: bool = True) -> Iterator[Row]:
    """Return a row for each run of `run_recipe`, or of several labels one for each label."""
    published = load_recipe(data, model).published
    for run in runs:
        if isinstance(published, PublishedRanking):
            yield RankingRow(**ranking_row(data, model, run, is_timed=is_timed))
            continue
        areas = published.label_auc or {"": published.auc}
        for label, area in areas.items():
            suffix = f"/{label}" if label else ""
            yield AccuracyRow(
                metric=f"test AUC{suffix}",
                value=run[f"auc{suffix}"],
                peer="published",
                peer_value=area,
                logloss=run[f"logloss{suffix}"],
                published_logloss=published.logloss,
                seconds=run["seconds"] if is_timed else None,
                **_common(data, model, run),
            )


def main() -> None:
    names = recipe_names()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=names, help="name of the data set")
    parser.add_argument("directory", type=Path, help="directory of its files")
    parser.add_argument("--model", nargs="+", help="models to train (default: all that have a recipe)")
    parser.add_argument("--seeds", type=int, default=3, help="number of models trained by each recipe")
    parser.add_argument("--out", type=Path, help="directory of the runs; finished runs are reused")
    parser.add_argument("--untimed", action="store_true", help="leave times blank: the machine has other work")
    parser.add_argument("--dry", action="store_true", help="print the figures without appending them to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        for model in options.model or names[options.data]:
            runs = run_recipe(options.data, model, options.directory, out, options.seeds)
            rows = rows_of(options.data, model, runs, is_timed=not options.untimed)
            is_ranking = isinstance(load_recipe(options.data, model).published, PublishedRanking)
            append_rows("accuracy_ranking" if is_ranking else "accuracy", rows, dry=options.dry)


if __name__ == "__main__":
    main()
