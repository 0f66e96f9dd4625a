"""``terarec evaluate``: how good a trained model is on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.shared_options import AllowImport
from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What ``terarec evaluate`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    data: Annotated[Path, typer.Option(help="A prepared data set.")]
    split: Annotated[str, typer.Option(help="Which part of the data set.")] = "valid"
    checkpoint: CheckpointOption = None
    allow_import: AllowImport = None


def evaluate(options: EvaluateOptions, show: Show) -> None:
    """Score a data set with a trained model: AUC and logloss."""
    from terarec.data import open_reader, read_spec
    from terarec.kernels import memory
    from terarec.models.artifact import load_model
    from terarec.nn.objectives import build_objective
    from terarec.spec import BinarySpec
    from terarec.train.columns import check_columns
    from terarec.train.evaluation import Evaluator
    from terarec.train.run_dir import RunDirectory, check_run

    check_run(options.run)
    model, spec, trained_on, step = load_model(options.run, options.checkpoint, allow_import=options.allow_import or ())
    training, described = spec.training, read_spec(options.data)
    check_columns(described, options.data, trained_on, RunDirectory(options.run).dataset)
    reader = open_reader(options.data, options.split, batch_size=training.batch_size, threads=training.reader_threads)
    evaluator = Evaluator(
        build_objective(spec.objective or BinarySpec()),
        metrics=training.metrics,
        labels=[label.name for label in trained_on.labels],
        group=training.group,
        slices=training.slices,
        precision=training.precision,
    )
    total = described.num_rows(options.split)
    with show.progress("evaluating", "samples") as progress:
        found = evaluator.evaluate(model, reader, progress=lambda done: progress(done, total))
    figures = {"run": str(options.run), "data": str(options.data), "split": options.split, "step": step}
    known = {"best_auc": described.best_auc, "peak_memory_bytes": memory.peak_bytes()}
    show.result(f"{options.run} on {options.data}", {**figures, **found.figures(), **known})
