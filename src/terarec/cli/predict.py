"""``terarec predict``: a score for every sample."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What ``terarec predict`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    data: Annotated[Path, typer.Option(help="A prepared data set.")]
    out: Annotated[Path, typer.Option(help="Parquet file to write, a row per sample in input order.")]
    split: Annotated[str, typer.Option(help="Which part of the data set.")] = "valid"
    checkpoint: CheckpointOption = None


def predict(options: PredictOptions, show: Show) -> None:
    """Write the scores of a data set to a Parquet file."""
    from terarec.formats import read_dataset
    from terarec.kernels import memory
    from terarec.train.predict import predict as score

    total = read_dataset(options.data).num_rows(options.split)
    with show.progress("predicting", "samples") as progress:
        report = score(
            options.run,
            options.data,
            options.split,
            options.out,
            checkpoint=options.checkpoint,
            progress=lambda done: progress(done, total),
        )
    figures = {"out": str(options.out), "split": options.split, **dataclasses.asdict(report)}
    show.result(f"Scores in {options.out}", {**figures, "peak_memory_bytes": memory.peak_bytes()})
