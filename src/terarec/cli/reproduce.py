"""``terarec reproduce``: a published result, from the files of its data to its figures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.show import Show
from terarec.spec import RecipeSpec

if TYPE_CHECKING:
    from terarec.train.seeds import SeedsReport


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What ``terarec reproduce`` takes."""

    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of the data, such as frappe_x1.")]
    model: Annotated[str, typer.Option(help="A model that has a recipe, such as deepfm.")]
    data: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the files of the data.")]
    seeds: Annotated[int, typer.Option(min=1, help="How many models are trained, with the seeds from 0 on.")] = 1
    out: Annotated[
        Path | None, typer.Option(help="Directory for the data set and the runs; none is kept without it.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the compute.")] = None


def reproduce(options: ReproduceOptions, show: Show) -> None:
    """Train by the settings of a published result, and compare the figures."""
    from terarec.recipes.reproduce import reproduce as run_recipe
    from terarec.train.progress import ProgressBar

    with _directory(options.out) as out:
        found = run_recipe(
            options.recipe,
            options.model,
            options.data,
            out,
            seeds=options.seeds,
            threads=options.threads,
            resume=options.resume,
            callbacks=lambda: [ProgressBar(show.progress_console)],
        )
    runs = _runs(found.seeds)
    show.table(f"{options.model} on {options.recipe}", runs)
    figures = _figures(options, found.recipe, found.seeds)
    show.result(f"Reproduced {options.model} on {options.recipe}", {**figures, "runs": runs})


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="terarec-reproduce-") as folder:
        yield Path(folder)


def _figures(options: ReproduceOptions, recipe: RecipeSpec, report: SeedsReport) -> dict[str, Any]:
    published = recipe.published
    several = len(report.results) > 1
    return {
        "recipe": options.recipe,
        "model": options.model,
        "seeds": len(report.results),
        "auc": report.mean("auc"),
        "auc_deviation": report.deviation("auc") if several else None,
        "published_auc": published.auc,
        "published_mean_auc": published.mean_auc,
        "logloss": report.mean("logloss"),
        "logloss_deviation": report.deviation("logloss") if several else None,
        "published_logloss": published.logloss,
        "published_mean_logloss": published.mean_logloss,
        "published": published.source,
        "seconds": sum(result.seconds for result in report.results),
        "out": None if options.out is None else str(options.out),
    }


def _runs(report: SeedsReport) -> list[dict[str, Any]]:
    return [
        {
            "seed": result.seed,
            "auc": result.metrics["auc"],
            "logloss": result.metrics["logloss"],
            "steps": result.steps,
            "seconds": result.seconds,
        }
        for result in report.results
    ]
