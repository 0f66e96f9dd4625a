"""``terarec evaluate``: how good a trained model is on a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.command import comma_separated
from terarec.cli.shared_options import AllowImport, DeviceOption, GroupOption, MetricsOption, SlicesOption
from terarec.cli.show import Show
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.models.two_tower import TwoTower
    from terarec.spec import DatasetSpec, TrainingSpec, TwoTowerSpec


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What ``terarec evaluate`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    data: Annotated[Path, typer.Option(help="A prepared data set, or HugeCTR's files.")]
    split: Annotated[str, typer.Option(help="Which part of the data set.")] = "valid"
    metrics: MetricsOption = None
    group: GroupOption = None
    slices: SlicesOption = None
    k: Annotated[
        str | None, typer.Option("--k", metavar="10,50,...", help="Lengths of the lists of items, for two_tower.")
    ] = None
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    allow_import: AllowImport = None


def evaluate(options: EvaluateOptions, show: Show) -> None:
    """Compute metrics of a trained model on a data set."""
    from terarec.data import open_reader, read_spec
    from terarec.kernels import memory
    from terarec.models import TwoTower
    from terarec.models.artifact import load_model
    from terarec.nn.objectives import build_objective
    from terarec.spec import TwoTowerSpec
    from terarec.train.devices import describe_device, resolve_device
    from terarec.train.evaluation import Evaluator
    from terarec.train.run_dir import RunDirectory, check_columns, check_run

    check_run(options.run)
    device = resolve_device(options.device or "auto")
    model, spec, trained_on, step = load_model(
        options.run, options.checkpoint, device=device, allow_import=options.allow_import or ()
    )
    training, described = _training(options, spec.training), read_spec(options.data)
    reader = open_reader(options.data, options.split, batch_size=training.batch_size, threads=training.reader_threads)
    check_columns(described, options.data, trained_on, RunDirectory(options.run).dataset)
    labels = [label.name for label in trained_on.labels]
    evaluator = Evaluator.of(training, build_objective(spec.objective), labels)
    if options.k is not None and not isinstance(model, TwoTower):
        raise ConfigError(f"--k: has no meaning for a model of the kind {spec.model.kind}, expected two_tower")
    total = described.num_rows(options.split)
    with show.progress("evaluating", "samples") as progress:
        found = evaluator.evaluate(model, reader, progress=lambda done: progress(done, total))
    figures: dict[str, Any] = {"run": str(options.run), "data": str(options.data), "split": options.split}
    figures |= {"step": step, "device": describe_device(device), **found.figures()}
    if isinstance(model, TwoTower) and isinstance(spec.model, TwoTowerSpec):
        figures["retrieval"] = _retrieval(model, spec.model, training, described, options, show)
    figures |= {"best_auc": described.best_auc, "peak_memory_bytes": memory.peak_bytes()}
    show.figures(f"{options.run} on {options.data}", figures)
    show.figures("retrieval", figures.get("retrieval", {}))
    show.table("labels", _rows("label", figures.get("labels", {})))
    for column, by_value in figures.get("slices", {}).items():
        show.table(f"slices of {column}", _slice_rows(by_value))
    show.json(figures)


def _training(options: EvaluateOptions, training: TrainingSpec) -> TrainingSpec:
    """The run's settings with the metrics that the options name."""
    given = {
        "metrics": comma_separated([options.metrics]) if options.metrics is not None else None,
        "group": options.group,
        "slices": comma_separated([options.slices]) if options.slices is not None else None,
    }
    return dataclasses.replace(training, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _retrieval(
    model: TwoTower,
    spec: TwoTowerSpec,
    training: TrainingSpec,
    described: DatasetSpec,
    options: EvaluateOptions,
    show: Show,
) -> dict[str, Any]:
    """Metrics of the items that the model finds among all items of the data set."""
    from terarec.data import open_reader
    from terarec.train.retrieval import evaluate_towers, user_column

    splits = [options.split, *(["train"] if "train" in described.splits and options.split != "train" else [])]
    readers = [
        open_reader(options.data, split, batch_size=training.batch_size, threads=training.reader_threads)
        for split in splits
    ]
    total = sum(described.num_rows(split) for split in splits)
    with show.progress("reading users and items", "samples") as progress:
        found = evaluate_towers(
            model,
            readers[0],
            readers[1] if len(readers) > 1 else (),
            user=user_column(spec, described, training.group),
            k=None if options.k is None else _lengths(options.k),
            precision=training.precision,
            progress=lambda done: progress(done, total),
        )
    counts = {name: getattr(found, name) for name in ("users", "items", "relevant", "relevant_seen")}
    return {**counts, **found.values}


def _lengths(text: str) -> list[int]:
    words = comma_separated([text])
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--k: got {text!r}, expected numbers of items such as 10,50,100")
    return [int(word) for word in words]


def _rows(name: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row of a table for each of `found`, whose rows and metrics are JSON data."""
    return [{name: key, "rows": held["rows"], **held["metrics"]} for key, held in found.items()]


def _slice_rows(by_value: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [{"value": str(held["value"]), "rows": held["rows"], **held["metrics"]} for held in by_value["values"]]
    other = by_value["other"]
    if other is not None:
        rows.append({"value": f"{other['distinct_values']} others", "rows": other["rows"], **other["metrics"]})
    return rows
