"""``terarec generate``: synthetic raw logs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What ``terarec generate criteo`` takes."""

    rows: Annotated[int, typer.Option(min=1, help="Rows in all.")]
    days: Annotated[int, typer.Option(min=1, help="Files to share the rows among.")] = 1
    out: Annotated[Path, typer.Option(help="Directory to make: day_0.tsv, day_1.tsv, ...")]
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0


def criteo(options: GenerateOptions, show: Show) -> None:
    """Write logs in the Criteo layout: a label, 13 integers and 26 hexadecimal categories a line."""
    from terarec.data.synthetic import criteo as source

    with show.progress("generating", "rows") as progress:
        report = source.generate(
            options.out, rows=options.rows, days=options.days, seed=options.seed, progress=progress
        )
    show.result(f"Generated {options.out}", {"out": str(options.out), **dataclasses.asdict(report)})
