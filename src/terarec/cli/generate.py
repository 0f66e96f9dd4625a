"""``terarec generate``: synthetic raw logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terarec.cli.show import Show

if TYPE_CHECKING:
    from terarec.data.synthetic import GenerateReport


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of every ``terarec generate``."""

    rows: Annotated[int, typer.Option(min=1, help="Rows in all.")]
    out: Annotated[Path, typer.Option(help="Directory to make.")]
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0


@dataclass(frozen=True, kw_only=True)
class GenerateCriteoOptions(GenerateOptions):
    """Options of ``terarec generate criteo``."""

    days: Annotated[int, typer.Option(min=1, help="Files day_0.tsv, day_1.tsv, ... to share the rows among.")] = 1


@dataclass(frozen=True, kw_only=True)
class GenerateMovielensOptions(GenerateOptions):
    """Options of ``terarec generate movielens``."""

    layout: Annotated[Literal["latest", "1m"], typer.Option(help="CSV files, or those of MovieLens 1M.")] = "latest"


@dataclass(frozen=True, kw_only=True)
class GenerateAmazonOptions(GenerateOptions):
    """Options of ``terarec generate amazon``."""

    layout: Annotated[Literal["2018", "2023"], typer.Option(help="Release of the reviews.")] = "2018"


def criteo(options: GenerateCriteoOptions, show: Show) -> None:
    """Run ``terarec generate criteo``."""
    from terarec.data.synthetic import criteo as source

    _generate(source.generate, "rows", options, show)


def avazu(options: GenerateOptions, show: Show) -> None:
    """Run ``terarec generate avazu``."""
    from terarec.data.synthetic import avazu as source

    _generate(source.generate, "rows", options, show)


def rees46(options: GenerateOptions, show: Show) -> None:
    """Run ``terarec generate rees46``."""
    from terarec.data.synthetic import rees46 as source

    _generate(source.generate, "events", options, show)


def mind(options: GenerateOptions, show: Show) -> None:
    """Run ``terarec generate mind``."""
    from terarec.data.synthetic import mind as source

    _generate(source.generate, "pages", options, show)


def movielens(options: GenerateMovielensOptions, show: Show) -> None:
    """Run ``terarec generate movielens``."""
    from terarec.data.synthetic import movielens as source

    _generate(source.generate, "ratings", options, show)


def adult(options: GenerateOptions, show: Show) -> None:
    """Run ``terarec generate adult``."""
    from terarec.data.synthetic import adult as source

    _generate(source.generate, "people", options, show)


def amazon(options: GenerateAmazonOptions, show: Show) -> None:
    """Run ``terarec generate amazon``."""
    from terarec.data.synthetic import amazon as source

    _generate(source.generate, "reviews", options, show)


def _generate(generate: Callable[..., GenerateReport], unit: str, options: GenerateOptions, show: Show) -> None:
    arguments = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    out = arguments.pop("out")
    with show.progress("generating", unit) as progress:
        report = generate(out, **arguments, progress=progress)
    known = {"days": arguments["days"]} if "days" in arguments else {}
    show.result(f"Generated {out}", {**known, "out": str(out), **dataclasses.asdict(report)})
