"""``terarec generate``: synthetic raw logs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terarec.cli.show import Show

if TYPE_CHECKING:
    from terarec.data.synthetic import GenerateReport


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What every ``terarec generate`` takes."""

    rows: Annotated[int, typer.Option(min=1, help="Rows in all.")]
    out: Annotated[Path, typer.Option(help="Directory to make.")]
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0


@dataclass(frozen=True, kw_only=True)
class GenerateCriteoOptions(GenerateOptions):
    """What ``terarec generate criteo`` takes."""

    days: Annotated[int, typer.Option(min=1, help="Files day_0.tsv, day_1.tsv, ... to share the rows among.")] = 1


@dataclass(frozen=True, kw_only=True)
class GenerateMovielensOptions(GenerateOptions):
    """What ``terarec generate movielens`` takes."""

    layout: Annotated[Literal["latest", "1m"], typer.Option(help="CSV files, or those of MovieLens 1M.")] = "latest"


@dataclass(frozen=True, kw_only=True)
class GenerateAmazonOptions(GenerateOptions):
    """What ``terarec generate amazon`` takes."""

    layout: Annotated[Literal["2018", "2023"], typer.Option(help="Release of the reviews.")] = "2018"


def criteo(options: GenerateCriteoOptions, show: Show) -> None:
    """Write logs in the Criteo layout: a label, 13 integers and 26 hexadecimal categories a line."""
    from terarec.data.synthetic import criteo as source

    with show.progress("generating", "rows") as progress:
        report = source.generate(
            options.out, rows=options.rows, days=options.days, seed=options.seed, progress=progress
        )
    show.result(f"Generated {options.out}", {"days": options.days, **_figures(options, report)})


def avazu(options: GenerateOptions, show: Show) -> None:
    """Write clicks on mobile advertisements in Avazu's layout: train.csv."""
    from terarec.data.synthetic import avazu as source

    with show.progress("generating", "rows") as progress:
        report = source.generate(options.out, rows=options.rows, seed=options.seed, progress=progress)
    show.result(f"Generated {options.out}", _figures(options, report))


def rees46(options: GenerateOptions, show: Show) -> None:
    """Write a shop's views, carts and purchases in REES46's layout: 2019-Oct.csv."""
    from terarec.data.synthetic import rees46 as source

    with show.progress("generating", "events") as progress:
        report = source.generate(options.out, rows=options.rows, seed=options.seed, progress=progress)
    show.result(f"Generated {options.out}", _figures(options, report))


def mind(options: GenerateOptions, show: Show) -> None:
    """Write pages of a news site in MIND's layout: behaviors.tsv and news.tsv for training and validation."""
    from terarec.data.synthetic import mind as source

    with show.progress("generating", "pages") as progress:
        report = source.generate(options.out, rows=options.rows, seed=options.seed, progress=progress)
    show.result(f"Generated {options.out}", _figures(options, report))


def movielens(options: GenerateMovielensOptions, show: Show) -> None:
    """Write ratings of films in MovieLens' layouts: ratings.csv and movies.csv."""
    from terarec.data.synthetic import movielens as source

    with show.progress("generating", "ratings") as progress:
        report = source.generate(
            options.out, rows=options.rows, layout=options.layout, seed=options.seed, progress=progress
        )
    show.result(f"Generated {options.out}", _figures(options, report))


def adult(options: GenerateOptions, show: Show) -> None:
    """Write people as in UCI's Adult: adult.data and adult.test."""
    from terarec.data.synthetic import adult as source

    with show.progress("generating", "people") as progress:
        report = source.generate(options.out, rows=options.rows, seed=options.seed, progress=progress)
    show.result(f"Generated {options.out}", _figures(options, report))


def amazon(options: GenerateAmazonOptions, show: Show) -> None:
    """Write reviews in the layouts of the Amazon review data: JSON lines of reviews and of products."""
    from terarec.data.synthetic import amazon as source

    with show.progress("generating", "reviews") as progress:
        report = source.generate(
            options.out, rows=options.rows, layout=options.layout, seed=options.seed, progress=progress
        )
    show.result(f"Generated {options.out}", _figures(options, report))


def _figures(options: GenerateOptions, report: GenerateReport) -> dict[str, object]:
    return {"out": str(options.out), **dataclasses.asdict(report)}
