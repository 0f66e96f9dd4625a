"""``terarec reproduce``: a published result from its recipe and the public data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terarec.cli.show import Show
from terarec.cli.train import tell_seed


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What ``terarec reproduce`` takes."""

    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of the data, such as frappe_x1.")]
    model: Annotated[str, typer.Option(help="Name of the model, such as deepfm.")]
    data: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the public files.")]
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs, with the seeds 0, 1, ...")] = 1
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory to write; ./RECIPE by default.")] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the training.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished runs, and go on with an interrupted one.")] = (
        False
    )


def reproduce(options: ReproduceOptions, show: Show) -> None:
    """Repeat a published result by its recipe and public data."""
    from terarec.recipes.reproduce import TEST_SPLIT
    from terarec.recipes.reproduce import reproduce as run_recipe
    from terarec.train.loggers import ProgressBar

    out = options.out or Path(options.recipe)

    report = run_recipe(
        options.recipe,
        options.model,
        options.data,
        out,
        seeds=options.seeds,
        threads=options.threads,
        resume=options.resume,
        callbacks=lambda _: (ProgressBar(show.progress_console),),
        on_result=lambda result: tell_seed(result, show),
    )
    seeds, published = report.seeds, report.recipe.published
    figures: dict[str, Any] = {
        "recipe": options.recipe,
        "model": options.model,
        "out": str(out),
        "split": TEST_SPLIT,
        **seeds.figures(),
        "published_auc": published.auc,
        "published_logloss": published.logloss,
        "published_mean_auc": published.mean_auc,
        "published_mean_logloss": published.mean_logloss,
        "published": published.source,
    }
    show.result(f"{options.model} on {options.recipe}", figures)
