"""``terarec prepare criteo``: raw Criteo logs -> data set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoOptions:
    """What ``terarec prepare criteo`` takes."""

    raw: Annotated[list[Path], typer.Argument(metavar="RAW...", help="Raw files, in order of time.")]
    out: Annotated[Path, typer.Option(help="Directory of the data set to make.")]
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 15
    storage: Annotated[str, typer.Option("--format", metavar="parquet|raw", help="Format of the shards.")] = "parquet"
    valid_fraction: Annotated[
        float | None, typer.Option(help="Share of the rows, from the end, for the valid split.")
    ] = None
    valid_last_day: Annotated[bool, typer.Option("--valid-last-day", help="The last file is the valid split.")] = False
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that parse and encode.")] = None


def prepare_criteo(options: PrepareCriteoOptions, show: Show) -> None:
    """Criteo logs: logarithms of integers, ids of categories by frequency."""
    from terarec.etl.criteo import CriteoOptions, prepare

    asked = CriteoOptions(
        min_count=options.min_count,
        storage=options.storage,  # type: ignore[arg-type]  # the spec checks the word
        valid_fraction=options.valid_fraction,
        valid_last_day=options.valid_last_day,
        threads=options.threads,
    )
    with show.progress("preparing", "MiB") as progress:
        report = prepare(options.raw, options.out, asked, lambda done, total: progress(done >> 20, total >> 20))
    show.result(f"Prepared {options.out}", {"out": str(options.out), **dataclasses.asdict(report)})
