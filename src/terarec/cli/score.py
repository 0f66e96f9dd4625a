# SPDX-License-Identifier: Apache-2.0
"""``terarec evaluate``, ``calibrate`` and ``predict``: metrics, calibration and scores of a trained RUN."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.options import (
    AllowImport,
    CheckpointOption,
    DeviceOption,
    Force,
    NumbersOption,
    SpecFields,
    changed,
    check_unset,
    comma_separated,
    spec_option,
)
from terarec.errors import ConfigError
from terarec.reports.text import Show
from terarec.spec import Numbers, PrepareOptions, ServingSpec, TrainingSpec
from terarec.spec.calibration import CalibrationMethod
from terarec.spec.checks import is_count
from terarec.spec.dataset import MISSING_KEY

if TYPE_CHECKING:
    import torch

    from terarec.data import BatchReader
    from terarec.etl.engine.phases import Progress
    from terarec.etl.workflow import ValueNames
    from terarec.metrics.ranking import RetrievalResults
    from terarec.models.next_items import NextItemModel
    from terarec.models.pairs import PairModel
    from terarec.models.sequences import SequenceModel
    from terarec.models.two_tower import TwoTower
    from terarec.serve import InferenceSession
    from terarec.spec import DatasetSpec, TwoTowerSpec
    from terarec.spec.retrieval import PairSpec


def _run_option(name: str, meaning: str, metavar: str | None = None) -> Any:
    """Declare an option for a field of the run's `TrainingSpec`, whose value it replaces."""
    return spec_option(name, TrainingSpec, name, metavar=metavar, summary=f"{meaning}; the run's if unset.")


IdsOption = Annotated[
    bool, typer.Option("--ids", help="Write ids of the data set, not the raw values that they stand for.")
]


def _names(ids: bool, data: Path, allow_import: Sequence[str] | None) -> ValueNames | None:
    """Return the names of the values of a data set, unless `ids` are to be written."""
    from terarec.etl.workflow import ValueNames

    return None if ids else ValueNames(data, allow_import=allow_import or ())


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of ``terarec evaluate``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN directory of a trained model.")]
    data: Annotated[Path, typer.Option(help="A prepared data set, or HugeCTR's files.")]
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "valid"
    metrics: Annotated[str | None, _run_option("metrics", "Metrics by name, such as auc or ndcg@10")] = None
    group: Annotated[
        str | None, _run_option("group", "Column by which gauc and ranking metrics group samples", "COLUMN")
    ] = None
    slices: Annotated[str | None, _run_option("slices", "Columns for whose values metrics are computed, too")] = None
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="10,50,...",
            help="Lengths of the lists of retrieved items; if unset, 10,50,100, and 5,10 for histories.",
        ),
    ] = None
    ids: IdsOption = False
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    numbers: NumbersOption
    allow_import: AllowImport = None


def evaluate(options: EvaluateOptions, show: Show) -> None:
    """Run ``terarec evaluate``."""
    from terarec.data import read_spec
    from terarec.kernels import memory
    from terarec.models import TwoTower
    from terarec.models.artifact import load_model
    from terarec.models.narrow import narrow
    from terarec.models.next_items import NextItemModel
    from terarec.models.pairs import PairModel
    from terarec.models.sequences import SequenceModel
    from terarec.models.trained_columns import check_columns
    from terarec.nn.objectives import build_objective
    from terarec.spec import TwoTowerSpec
    from terarec.spec.retrieval import PairSpec
    from terarec.train.devices import describe_device, resolve_device
    from terarec.train.evaluation import Evaluator
    from terarec.train.run_dir import RunDirectory, check_run

    check_run(options.run)
    device = resolve_device(options.device or "auto")
    model, spec, trained_on, state = load_model(
        options.run, options.checkpoint, device=device, allow_import=options.allow_import or ()
    )
    training, described = _training(options, spec.training), read_spec(options.data)
    reader = _open(options.data, options.split, training)
    check_columns(described, options.data, trained_on, RunDirectory(options.run).dataset)
    labels = [label.name for label in trained_on.labels]
    names = _names(options.ids, options.data, options.allow_import)
    evaluator = Evaluator.of(training, build_objective(spec.objective, trained_on), labels, names=names)
    # The class of the model and not the kind of its spec, as these metrics call its towers.
    if options.k is not None and not isinstance(model, TwoTower | PairModel | SequenceModel | NextItemModel):
        raise ConfigError(
            "--k",
            f"has no meaning for a model of the kind {spec.model.kind}, expected one that retrieves items, such as "
            "two_tower",
        )
    total = described.num_rows(options.split)
    numbers, changes = options.numbers, dict[str, Any]()
    # First as trained: narrowing may change the model itself.
    if numbers != Numbers():
        with show.progress("evaluating as trained", "samples") as progress:
            before = evaluator.evaluate(model, reader, progress=lambda done: progress(done, total))
        model = narrow(model, numbers)
        training = dataclasses.replace(training, precision=numbers.products(spec))
        evaluator = Evaluator.of(training, build_objective(spec.objective, trained_on), labels, names=names)
        reader = _open(options.data, options.split, training)
    with show.progress("evaluating", "samples") as progress:
        evaluation = evaluator.evaluate(model, reader, progress=lambda done: progress(done, total))
    if numbers != Numbers():
        changes = {f"{name}_change": evaluation.value(name) - before.value(name) for name in evaluator.metrics}
    figures: dict[str, Any] = {"run": str(options.run), "data": str(options.data), "split": options.split}
    figures |= {"step": state.step, "device": describe_device(device), **evaluation.to_json(), **changes}
    # NaN, unlike None, is shown: a metric without a value should not look as if it had not been computed.
    figures |= evaluation.results.overall.values
    if isinstance(model, TwoTower | PairModel) and isinstance(spec.model, TwoTowerSpec | PairSpec):
        figures |= _retrieval(model, spec.model, training, described, options, show)
    if isinstance(model, SequenceModel | NextItemModel):
        figures |= _next_items(model, training, described, options, show)
    figures |= {"best_auc": described.best_auc, "peak_memory_bytes": memory.peak_bytes()}
    show.figures(f"{options.run} on {options.data}", figures)
    for name in ("retrieval", "popularity"):
        show.figures(name, figures.get(name, {}))
    if evaluation.untrained:
        show.line(f"{', '.join(evaluation.untrained)}: label of weight 0, left out of metrics over all labels")
    show.table("labels", _rows("label", figures.get("labels", {})))
    for column, by_value in figures.get("slices", {}).items():
        show.table(f"slices of {column}", _slice_rows(by_value))
    show.json(figures)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of ``terarec calibrate``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN directory of a trained model of binary labels.")]
    data: Annotated[Path, typer.Option(help="A prepared data set, or HugeCTR's files.")]
    split: Annotated[str, typer.Option(help="Split that the run was not trained on.")] = "valid"
    method: Annotated[
        CalibrationMethod,
        typer.Option(help='"temperature" for a divisor of the logits; "isotonic" for a rising function (needs SciPy).'),
    ] = "temperature"
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    allow_import: AllowImport = None


def calibrate(options: CalibrateOptions, show: Show) -> None:
    """Run ``terarec calibrate``."""
    from terarec.config import load_run
    from terarec.config.files import RUN_FILE
    from terarec.data import read_spec
    from terarec.formats import read_dataset
    from terarec.models.trained_columns import check_columns
    from terarec.train.calibrating import calibrate_run
    from terarec.train.devices import resolve_device
    from terarec.train.run_dir import RunDirectory, check_run

    check_run(options.run)
    training, trained_on = load_run(options.run / RUN_FILE).training, RunDirectory(options.run).dataset
    check_columns(read_spec(options.data), options.data, read_dataset(trained_on), trained_on)
    report = calibrate_run(
        options.run,
        _open(options.data, options.split, training),
        options.method,
        checkpoint=options.checkpoint,
        device=resolve_device(options.device or "auto"),
        allow_import=options.allow_import or (),
    )
    figures: dict[str, Any] = {"run": str(options.run), "data": str(options.data), "split": options.split}
    figures |= {"method": options.method, "step": report.step, **report.after}
    figures |= {f"{name}_before": value for name, value in report.before.items()}
    show.result(f"{options.run} is calibrated", figures)


def _open(data: Path, split: str, training: TrainingSpec) -> BatchReader:
    """Open a split of data by the settings of a run."""
    from terarec.data import open_reader

    return open_reader(data, split, batch_size=training.batch_size, threads=training.reader_threads)


def _training(options: EvaluateOptions, training: TrainingSpec) -> TrainingSpec:
    """Return the run's settings with the metrics that the options name."""
    settings = {
        "metrics": comma_separated([options.metrics]) if options.metrics is not None else None,
        "group": options.group,
        "slices": comma_separated([options.slices]) if options.slices is not None else None,
    }
    return dataclasses.replace(training, **{name: value for name, value in settings.items() if value is not None})  # type: ignore[arg-type]


def _retrieval(
    model: TwoTower | PairModel,
    spec: TwoTowerSpec | PairSpec,
    training: TrainingSpec,
    described: DatasetSpec,
    options: EvaluateOptions,
    show: Show,
) -> dict[str, Any]:
    """Compute metrics of the items that the model finds among all items, and of the most popular ones beside them."""
    from terarec.train.retrieval import Popularity, evaluate_towers, user_column

    reader = partial(_open, options.data, training=training)
    # Items of the train split are candidates, too, and what users have seen is not recommended again.
    further = "train" in described.splits and options.split != "train"
    rank = partial(
        evaluate_towers,
        user=user_column(spec, described, training.group),
        k=None if options.k is None else _lengths(options.k),
        first_item=_first_item(options, model.item_key, described, MISSING_KEY + 1),
    )
    total = sum(described.num_rows(split) for split in (options.split, *(["train"] if further else [])))
    with show.progress("reading users and items", "samples") as progress:
        evaluation = rank(
            model,
            reader(options.split),
            reader("train") if further else (),
            precision=training.precision,
            progress=lambda done: progress(done, total),
        )
    figures = {"retrieval": {**_counts(evaluation), **evaluation.values}}
    if further and evaluation.users:
        popular = Popularity.of_positives(model.item_key, reader("train"))
        figures["popularity"] = dict(rank(popular, reader(options.split), reader("train")).values)
    return figures


def _next_items(
    model: SequenceModel | NextItemModel,
    training: TrainingSpec,
    described: DatasetSpec,
    options: EvaluateOptions,
    show: Show,
) -> dict[str, Any]:
    """Compute metrics of the items that a sequence model ranks first, and of the most popular ones beside them."""
    from terarec.train.retrieval import Popularity
    from terarec.train.sequence_ranking import evaluate_sequences

    reader = partial(_open, options.data, training=training)
    k = None if options.k is None else _lengths(options.k)
    first_item = _first_item(options, model.item_key, described, model.first_item)
    total = described.num_rows(options.split)
    with show.progress("ranking items", "samples") as progress:
        ranked = evaluate_sequences(
            model,
            reader(options.split),
            k=k,
            first_item=first_item,
            precision=training.precision,
            progress=lambda done: progress(done, total),
        )
    figures = {"retrieval": {**_counts(ranked), **ranked.values}}
    if "train" in described.splits:
        popular = Popularity.of_sequences(model, reader("train"))
        figures["popularity"] = dict(
            evaluate_sequences(popular, reader(options.split), k=k, first_item=first_item).values
        )
    return figures


def _first_item(options: EvaluateOptions, column: str, described: DatasetSpec, lowest: int) -> int:
    """Return the lowest key of one item, at least `lowest`: ids of rare and unseen values stand for many."""
    from terarec.etl.workflow import workflow_of
    from terarec.etl.workflow.datasets import IdValues

    if described.workflow is not None:
        ids = IdValues(workflow_of(options.data, allow_import=options.allow_import or ()), column)
        if ids.num_reserved:
            return ids.num_reserved
    # Given ids are values from `first_id` on, and all keys are, which may be negative.
    has_ids = any(one.name == column and one.rows is not None for one in described.categorical)
    return max(lowest, described.first_id(column)) if has_ids else lowest


def _counts(results: RetrievalResults) -> dict[str, int]:
    return {
        name: getattr(results, name) for name in ("users", "items", "relevant", "relevant_seen", "relevant_unknown")
    }


def _lengths(text: str) -> list[int]:
    words = comma_separated([text])
    if not words or not all(is_count(word) and int(word) for word in words):
        raise ConfigError("--k", f"got {text!r}, expected numbers of items such as 10,50,100")
    return [int(word) for word in words]


def _rows(name: str, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row of a table for each of `metrics`, whose rows and metrics are JSON data."""
    return [{name: key, "rows": entry["rows"], **entry["metrics"]} for key, entry in metrics.items()]


def _slice_rows(by_value: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [{"value": str(entry["value"]), "rows": entry["rows"], **entry["metrics"]} for entry in by_value["values"]]
    # Values that are too rare for a row of their own.
    other = by_value["other"]
    if other is not None:
        rows.append({"value": f"{other['distinct_values']} others", "rows": other["rows"], **other["metrics"]})
    return rows


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of ``terarec predict``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN directory of a trained model.")]
    raw: Annotated[
        list[str] | None,
        typer.Argument(metavar="RAW...", help="Raw files to score, directories, patterns or URLs; instead of --data."),
    ] = None
    out: Annotated[Path, typer.Option(help="File to write, a line per sample in order: .parquet, .csv or .jsonl.")]
    data: Annotated[Path | None, typer.Option(help="A prepared data set.")] = None
    split: Annotated[str | None, typer.Option(help="Split of the data set; valid if unset.")] = None
    checkpoint: CheckpointOption = None
    keep: Annotated[
        str,
        typer.Option(metavar="A,B,...", help="Columns of the raw files, or of the data set, to write with the scores."),
    ] = ""
    ids: IdsOption = False
    reading: Annotated[PrepareOptions, SpecFields("bad_input", "threads", "earlier_rows", "late_rows")]
    device: DeviceOption = None
    serving: Annotated[ServingSpec, SpecFields("executor")]
    numbers: NumbersOption
    force: Force = False
    allow_import: AllowImport = None


def predict(options: PredictOptions, show: Show) -> None:
    """Run ``terarec predict``."""
    if (options.data is None) == (not options.raw):
        choice = "both" if options.raw else "neither"
        raise ConfigError("RAW, --data", f"got {choice}, expected raw files or a prepared data set")
    if options.data is not None:
        _predict_dataset(options, options.data, show)
    else:
        _predict_raw(options, options.raw or [], show)


def _predict_dataset(options: PredictOptions, data: Path, show: Show) -> None:
    from terarec.data import read_spec
    from terarec.io.files import check_new_file
    from terarec.serve.executor_file import EXECUTORS_FILE
    from terarec.train.devices import resolve_device
    from terarec.train.predict import NamedColumns
    from terarec.train.predict import predict as score
    from terarec.train.run_dir import check_run

    of_raw_files = changed(options.reading, "bad_input", "threads", "earlier_rows", "late_rows")
    check_unset(of_raw_files, "for a data set")
    check_new_file(options.out, replace=options.force)  # before a large model is loaded
    check_run(options.run)
    split = options.split or "valid"
    total = read_spec(data).num_rows(split)
    device = resolve_device(options.device or "auto")
    has_choice = options.serving.executor == "auto" and (options.run / EXECUTORS_FILE).is_file()
    # A session is opened for other executors and numbers alone: it copies a batch to a GPU only when it is due, and
    # loads the workflow of the run, whose functions would have to be allowed.
    is_plain = options.numbers == Numbers() and options.serving.executor in ("auto", "eager") and not has_choice
    session = None if is_plain else _session(options, device)
    columns, names = comma_separated([options.keep]), _names(options.ids, data, options.allow_import)
    with show.progress("predicting", "samples") as progress:
        report = score(
            options.run,
            data,
            split,
            options.out,
            checkpoint=options.checkpoint if session is None else session,
            keep=columns if names is None else NamedColumns(columns=columns, names=names),
            replace=options.force,
            device=device,
            allow_import=options.allow_import or (),
            progress=lambda done: progress(done, total),
        )
    _show(options, {"split": split, **dataclasses.asdict(report)}, show)


def _predict_raw(options: PredictOptions, raw: list[str], show: Show) -> None:
    from terarec.formats.table_file import check_suffix
    from terarec.io.files import check_new_file
    from terarec.serve import score_files
    from terarec.train.devices import resolve_device
    from terarec.train.run_dir import check_run

    check_unset({"--split": options.split is not None, "--ids": options.ids}, "for raw files")
    check_new_file(options.out, replace=options.force)  # before a large model is loaded
    check_suffix(options.out)
    check_run(options.run)
    session = _session(options, resolve_device(options.device or "auto"))
    with show.progress("scoring", "MiB") as advance:

        def report_progress(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, rate=rate)

        report = score_files(
            session,
            raw,
            options.out,
            keep=comma_separated([options.keep]),
            options=options.reading,
            replace=options.force,
            progress=report_progress,
        )
    # At the end: the progress bar would be drawn over lines in between.
    for line in report.first_bad_input:
        show.line(line)
    _show(options, dataclasses.asdict(report), show)


def _session(options: PredictOptions, device: torch.device) -> InferenceSession:
    from terarec.serve import InferenceSession

    return InferenceSession.open(
        options.run,
        options.checkpoint,
        device=device,
        allow_import=options.allow_import or (),
        executor=options.serving.executor,
        numbers=options.numbers,
    )


def _show(options: PredictOptions, figures: dict[str, Any], show: Show) -> None:
    from terarec.kernels import memory

    shown = {"out": str(options.out), **figures, "peak_memory_bytes": memory.peak_bytes()}
    show.result(f"Scores in {options.out}", shown)
