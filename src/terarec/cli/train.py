# SPDX-License-Identifier: Apache-2.0
"""Commands that make a RUN: ``terarec init-config``, ``train`` and ``reproduce``."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.failures import failure_of
from terarec.cli.options import (
    DEVICES,
    AllowImport,
    Force,
    Setting,
    Settings,
    ShareOption,
    TiersOption,
    check_unset,
    pairs,
    spec_option,
)
from terarec.config import load_run
from terarec.config.files import RUN_FILE, with_graph
from terarec.config.overrides import override, parse_assignments
from terarec.errors import ConfigError, TerarecError
from terarec.kernels.environment import is_launched, launch
from terarec.reports.text import Show, metric_text
from terarec.spec import BinarySpec, DLRMSpec, GraphModelSpec, RunSpec, Tiers, TrainingSpec, to_data
from terarec.spec.model import ModelSpec
from terarec.spec.registry import Registry
from terarec.spec.schedule import has_open_end

if TYPE_CHECKING:
    from terarec.config.starting_run import ColumnRelations
    from terarec.etl.workflow import ValueNames
    from terarec.train.run import Run
    from terarec.train.seeds import SeedResult
    from terarec.train.stopping import FitReport
    from terarec.train.trainer import Callback


_LOG = logging.getLogger("terarec.cli")
_MODELS = Registry("MODEL", ((spec.kind, spec) for spec in typing.get_args(ModelSpec)))


@dataclass(frozen=True, kw_only=True)
class InitConfigOptions:
    """Options of ``terarec init-config``."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Kind of model: {', '.join(_MODELS)}.")]
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A prepared data set, or HugeCTR's files.")]
    out: Annotated[Path, typer.Option(help="Output file, JSON.")] = Path(RUN_FILE)
    factory: Annotated[str | None, spec_option("factory", RunSpec, "model.factory", metavar="package.module:name")] = (
        None
    )
    share: ShareOption = None
    force: Force = False
    allow_import: AllowImport = None


def init_config(options: InitConfigOptions, show: Show) -> None:
    """Run ``terarec init-config``."""
    from terarec.config.files import commented_json
    from terarec.config.starting_run import starting_run
    from terarec.data import read_spec
    from terarec.io.files import check_new_file, write_bytes

    model = _MODELS.find(options.model)
    if options.factory is not None and options.model != "python":
        raise ConfigError("--factory", f"has no meaning for {options.model}, expected the model python")
    check_new_file(options.out, replace=options.force)
    dataset = read_spec(options.data)
    # A relative path counts from the folder of the file, so that both may be moved together.
    data = os.path.relpath(options.data, options.out.parent)
    # A model that names columns needs to know which of them belong together.
    names_columns = bool(_needed_fields(model)) and options.model != "python"
    relations = _relations(options.data, options.allow_import) if names_columns else None
    starting = starting_run(model, dataset, data, factory=options.factory, relations=relations)
    run = override(starting.run, shared_changes(options.share))
    if options.share:
        from terarec.models.columns import check_shared  # loads torch

        check_shared(options.model, run.model.tables, dataset)  # type: ignore[union-attr]  # `override` has set it
    write_bytes(options.out, commented_json(run, starting.remarks).encode())
    for path in starting.open_fields:
        show.line(f"{path}: {starting.remarks[path]}")
    figures = {"out": str(options.out), "model": options.model, "data": str(options.data)}
    show.result(f"Wrote {options.out}", {**figures, "open_fields": list(starting.open_fields)})


def _relations(data: Path, allow_import: Sequence[str] | None) -> ColumnRelations:
    from terarec.apps.relations import DeterminedColumns, shared_vocabularies
    from terarec.config.starting_run import ColumnRelations
    from terarec.formats.dataset import DATASET_FILE

    if not (data / DATASET_FILE).is_file():  # HugeCTR's files have no workflow
        return ColumnRelations()
    columns = DeterminedColumns(data, allow_import=allow_import or ())
    return ColumnRelations(vocabularies=shared_vocabularies(columns.workflow), determined_by=columns.by)


SETTINGS: Mapping[str, Setting] = {
    "model": Setting(path="model.kind", summary="Kind of model."),
    "epochs": Setting(path="training.epochs"),
    "batch_size": Setting(path="training.batch_size"),
    "width": Setting(path="model.width"),
    "bottom": Setting(path="model.bottom"),
    "top": Setting(path="model.top"),
    "hidden": Setting(path="model.hidden"),
    "activation": Setting(path="model.activation"),
    "batch_norm": Setting(path="model.batch_norm"),
    "dropout": Setting(path="model.dropout"),
    "dense_init": Setting(path="model.init"),
    "pooling": Setting(path="model.pooling"),
    "table_init": Setting(path="model.tables.initializer"),
    "init_scale": Setting(path="model.tables.init_scale"),
    "tables": Setting(path="model.tables.kind"),
    "dense_optimizer": Setting(path="dense_optimizer.kind"),
    "dense_lr": Setting(path="dense_optimizer.lr", summary="Learning rate of the layers."),
    "sparse_optimizer": Setting(path="sparse_optimizer.kind"),
    "sparse_lr": Setting(path="sparse_optimizer.lr", summary="Learning rate of the tables."),
    "objective": Setting(path="objective.kind"),
    "label_weights": Setting(path="objective.label_weights", metavar="X,X,..."),
    "positive_weight": Setting(path="objective.positive_weight", metavar="NUMBER|auto"),
    "schedule": Setting(path="training.schedule.kind"),
    "device": Setting(path="training.device", metavar=DEVICES),
    "precision": Setting(path="training.precision"),
    "loss_scale": Setting(path="training.loss_scale", metavar="NUMBER|dynamic"),
    "compile": Setting(path="training.compile"),
    "passes": Setting(path="training.passes"),
    "accumulate": Setting(path="training.accumulate"),
    "clip_norm": Setting(path="training.clip_norm"),
    "metrics": Setting(path="training.metrics"),
    "group": Setting(path="training.group", metavar="COLUMN"),
    "slices": Setting(path="training.slices"),
    "monitor": Setting(path="training.monitor", metavar="METRIC"),
    "seed": Setting(path="training.seed"),
    "threads": Setting(path="training.threads"),
    "rank_timeout": Setting(path="training.rank_timeout", metavar="SECONDS"),
    "patience": Setting(path="training.patience"),
}
"""Options of ``terarec train`` that are fields of `RunSpec`."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of ``terarec train``; None leaves a setting to the configuration file, or to its default."""

    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.json", help="A run description; options override its fields.")
    ] = None
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.json", help="The run description, as an option.")
    ] = None
    out: Annotated[Path, typer.Option(help="Output RUN directory: checkpoints, metrics, report.html.")]
    data: Annotated[Path | None, spec_option("data", RunSpec, "data")] = None
    settings: Annotated[Mapping[str, str], Settings(RunSpec, SETTINGS)] = field(default_factory=dict)
    tiers: TiersOption = None
    share: ShareOption = None
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of runs, with the seeds S, S + 1, ...: RUN/seed-S, ...")
    ] = None
    init_from: Annotated[Path | None, spec_option("init_from", RunSpec, "init_from", metavar="RUN")] = None
    reset_optimizer: Annotated[bool, spec_option("reset_optimizer", RunSpec, "reset_optimizer", is_plain=True)] = False
    extend_chain: Annotated[bool, spec_option("extend_chain", RunSpec, "extend_chain", is_plain=True)] = False
    no_tensorboard: Annotated[
        bool,
        typer.Option("--no-tensorboard", help="Write no events to RUN/tensorboard where TensorBoard is installed."),
    ] = False
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Log to MLflow: the URI of a server, or a directory.")
    ] = None
    allow_import: AllowImport = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in RUN.")] = False
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json",
            help="Placements of the tables on the processes that torchrun starts; by their sizes if unset.",
        ),
    ] = None
    share_device: Annotated[
        bool,
        typer.Option(
            "--share-device", help="Let processes that torchrun starts share GPUs; they exchange through host memory."
        ),
    ] = False
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Any field, e.g. training.max_steps=100; repeatable."),
    ] = None


def run_spec(options: TrainOptions) -> RunSpec:
    """Return the run that `options` describe.

    Without a configuration file the options change the description of the run to resume, ``RUN/run.json``, or of the
    one that ``--init-from`` names.
    The graph that ``--set model.file`` names is read, from the working directory on.
    ``--width`` alone also widens the last layer of DLRM's bottom MLP, which must be as wide as the embedding.

    Raises:
        ConfigError: No data set named, or a field that is unknown, mistyped or out of range.
        DataNotFoundError: No such configuration file.
    """
    # From the weakest to the strongest: the description, options, --set.
    base = _base(options)
    changes = dict(options.settings)
    if options.data is not None:
        # Typed paths count from the working directory, those of a description from its file.
        changes["data"] = str(options.data.absolute())
    if options.init_from is not None:
        changes["init_from"] = str(options.init_from.absolute())
    if options.reset_optimizer:
        changes["reset_optimizer"] = "true"
    if options.extend_chain:
        changes["extend_chain"] = "true"
    if options.tiers is not None:
        changes |= tier_changes(base, Tiers.parse(options.tiers))
    changes |= shared_changes(options.share)
    changes |= parse_assignments(options.assignments or ())
    if {"objective.label_weights", "objective.positive_weight"} & set(changes) and base.objective is None:
        changes.setdefault("objective.kind", BinarySpec.kind)
    if "objective.positive_weight" in changes and isinstance(base.objective, BinarySpec):
        # Those that the run to resume or to start from had counted.
        base = dataclasses.replace(base, objective=dataclasses.replace(base.objective, class_weights=()))
    if "training.schedule.t_max" in changes and has_open_end(base.training.schedule):
        changes.setdefault("training.schedule.ends_with_run", "false")
    _check_model(base, changes, options.allow_import)
    changed = with_graph(override(base, _with_bottom_as_wide(base, changes)), Path.cwd())
    if options.init_from is not None and not (options.config or options.config_file):
        return _without_patience(changed, changes)
    return changed


def _check_model(base: RunSpec, changes: Mapping[str, str], allow_import: Sequence[str] | None) -> None:
    """Raise unless the fields that the chosen kind of model needs are set; the error has them for the data."""
    from terarec.config.starting_run import starting_run
    from terarec.data import read_spec

    kind = changes.get("model.kind", base.model.kind)
    if kind == base.model.kind or kind not in _MODELS:  # the latter is rejected with all kinds
        return
    model = _MODELS.find(kind)
    if model is GraphModelSpec:
        if not any(path.startswith(("model.file", "model.graph")) for path in changes):
            raise ConfigError("model", f"got {kind} without a graph, expected --set model.file=GRAPH.json")
        return
    missing = [name for name in _needed_fields(model) if f"model.{name}" not in changes]
    if not missing:
        return
    data = Path(changes.get("data", base.data))
    dataset = read_spec(data)
    try:
        relations = _relations(data, allow_import)
    except TerarecError:  # of a workflow that names functions: they are not what is wrong here
        relations = None
    starting = starting_run(model, dataset, str(data), relations=relations)
    values = {name: to_data(getattr(starting.run.model, name)) for name in missing}
    words = [f"model.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    settings = " ".join(f"--set {shlex.quote(word)}" for word in words)
    columns = [f"{column.name} (lists)" if column.hotness > 1 else column.name for column in dataset.categorical]
    raise ConfigError(
        "model",
        f"got {kind} without {' and '.join(missing)}, expected {settings}, or the file that "
        f"'terarec init-config {kind} {data}' writes (columns of the data: {', '.join(columns)})",
    )


def _needed_fields(model: type[ModelSpec]) -> list[str]:
    """Return the fields without a default."""
    return [
        item.name for item in dataclasses.fields(model) if item.default is item.default_factory is dataclasses.MISSING
    ]


def _without_patience(run: RunSpec, changes: Mapping[str, str]) -> RunSpec:
    """Return `run` without the patience of the run that it begins from, where its data have nothing to evaluate on."""
    from terarec.data import read_spec

    if run.training.patience is None or "training.patience" in changes:
        return run
    data = read_spec(Path(run.data))
    split = run.training.eval_split
    if (
        split is None
        or (split in data.splits and data.num_rows(split))
        or (split not in data.splits and split != "valid")
    ):
        return run
    _LOG.warning("no patience, as %s has no samples of split %r to evaluate on", run.data, split)
    return dataclasses.replace(run, training=dataclasses.replace(run.training, patience=None))


def _base(options: TrainOptions) -> RunSpec:
    """Return the run to which the flags are applied."""
    if options.config is not None and options.config_file is not None:
        raise ConfigError(
            "--config", f"got {options.config_file} and CONFIG.json {options.config}, expected one of them"
        )
    config = options.config or options.config_file
    if config is not None:
        return load_run(config)
    # The description that the run was started with, so that ``--resume`` needs no further option.
    described = (options.out if options.seeds is None else _first_seed(options.out)) / RUN_FILE
    if options.resume and described.is_file():
        return load_run(described)
    if options.init_from is not None:
        # A RUN, or a checkpoint in RUN/checkpoints.
        for run in (options.init_from, *options.init_from.absolute().parents[1:2]):
            if (run / RUN_FILE).is_file():
                former = load_run(run / RUN_FILE)
                return dataclasses.replace(former, init_from=None, reset_optimizer=False, extend_chain=False)
    if options.data is None:
        raise ConfigError(
            "nothing to train on",
            "got neither CONFIG.json nor --data, expected one of them, "
            f"or --resume and a run in {options.out}, or --init-from and another run",
        )
    return RunSpec(data=str(options.data))


def shared_changes(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the field to set for ``--share OWNER=COLUMN``; none without the option."""
    if not texts:
        return {}
    owners: dict[str, str] = {}
    for owner, column in pairs("--share", texts, "OWNER=COLUMN such as item=history"):
        if owners.setdefault(column, owner) != owner:
            raise ConfigError("--share", f"got {owners[column]!r} and {owner!r} for {column!r}, expected one of them")
    return {"model.tables.shared": json.dumps(owners)}


def tier_changes(base: RunSpec, tiers: Tiers) -> dict[str, str]:
    """Return the fields to set for `tiers`, in place of those of `base`."""
    path = "model.tables.tiers"
    has_some = getattr(getattr(base.model, "tables", None), "tiers", None) is not None
    # The tiers of the description are not mixed with these: host=2GiB alone would keep another's file.
    changes = {path: "none"} if has_some else {}
    if tiers.file is not None:
        tiers = dataclasses.replace(tiers, file=str(Path(tiers.file).absolute()))
    fields = {name: getattr(tiers, name) for name in ("device", "host", "file")}
    return changes | {f"{path}.{name}": value for name, value in fields.items() if value is not None}


def _first_seed(out: Path) -> Path:
    """Return the run of the lowest seed below `out`, whose seed is the first one; `out` itself if there is none."""
    # Other entries, such as a summary of the user, are passed over.
    runs = [run for run in out.glob("seed-*") if run.name.removeprefix("seed-").isdecimal()]
    return min(runs, key=lambda run: int(run.name.removeprefix("seed-")), default=out)


def _with_bottom_as_wide(base: RunSpec, changes: dict[str, str]) -> dict[str, str]:
    # Otherwise --width alone would be an error for the most common model.
    kind = changes.get("model.kind", base.model.kind)
    if kind != DLRMSpec.kind or "model.width" not in changes or "model.bottom" in changes:
        return changes
    model = base.model if isinstance(base.model, DLRMSpec) else DLRMSpec()
    return {**changes, "model.bottom": "-".join(map(str, [*model.bottom[:-1], changes["model.width"]]))}


def train(options: TrainOptions, show: Show) -> None:
    """Run ``terarec train``."""
    spec = run_spec(options)
    if options.seeds is not None:
        if is_launched():
            raise ConfigError("--seeds", "got it under torchrun, expected one process")
        check_unset({"--plan": options.plan is not None, "--share-device": options.share_device}, "with --seeds")
        _train_seeds(spec, options, options.seeds, show)
        return
    from terarec.dist import join, load_plan
    from terarec.train.devices import select_device
    from terarec.train.run import build

    plan = None if options.plan is None else load_plan(options.plan)
    # Ranks that were started with different settings are an error before the first step.
    settings = {"run": to_data(spec), "out": str(options.out), "resume": options.resume}
    device = select_device(spec.training.device, launch(), is_shared=options.share_device)
    ranks = join(settings, timeout=spec.training.rank_timeout, device=device, shares_device=options.share_device)
    try:
        with ranks.telling():
            run = build(
                spec,
                options.out,
                # One bar and one log for all ranks.
                callbacks=_callbacks(spec, options, show, options.out) if ranks.is_first else [],
                allow_import=options.allow_import or (),
                ranks=ranks,
                plan=plan,
                names=_names(spec, options),
            )
            _fit(run, options, show)
    finally:
        ranks.close()


def _fit(run: Run, options: TrainOptions, show: Show) -> None:
    # Every rank trains; one reports.
    if not run.ranks.is_first:
        run.fit(resume=options.resume)
        return
    if options.resume and not run.directory.has_checkpoint:
        show.line(f"{options.out}: no checkpoint to resume from, starting from the first step")
    report = run.fit(resume=options.resume, log=show.line)
    untrained = run.trainer.evaluator.untrained
    if untrained:
        show.line(f"{', '.join(untrained)}: label of weight 0, left out of metrics over all labels")
    show.result(f"Trained {options.out}", _figures(run, report, _draw(options.out, show)))


def _train_seeds(spec: RunSpec, options: TrainOptions, count: int, show: Show) -> None:
    from terarec.data import read_spec
    from terarec.train.report import REPORT_PAGE
    from terarec.train.seeds import fit_seeds

    split = spec.training.eval_split
    if split is None:
        raise ConfigError("--seeds", "training.eval_split is none, expected a split whose metrics are compared")
    read_spec(Path(spec.data)).num_rows(split)  # rejects a missing split before the first training

    def done(result: SeedResult) -> None:
        show_seed(result, show)
        if not (result.out / REPORT_PAGE).is_file():
            _draw(result.out, show)

    report = fit_seeds(
        spec,
        options.out,
        count,
        split,
        callbacks=lambda directory: _callbacks(spec, options, show, directory),
        resume=options.resume,
        allow_import=options.allow_import or (),
        on_result=done,
        names=_names(spec, options),
    )
    figures = {"out": str(options.out), "model": spec.model.kind, "split": split, **report.to_json()}
    show.result(f"Trained {count} seeds in {options.out}", figures)


def _names(spec: RunSpec, options: TrainOptions) -> ValueNames:
    """Return the names of the values in slices."""
    from terarec.etl.workflow import ValueNames

    return ValueNames(Path(spec.data), allow_import=options.allow_import or ())


def _callbacks(spec: RunSpec, options: TrainOptions, show: Show, directory: Path) -> list[Callback]:
    """Return the progress bar and the loggers of the run in `directory`."""
    from terarec.train.loggers import MLflowLogger, ProgressBar, TensorBoardLogger, has_tensorboard
    from terarec.train.run_dir import RunDirectory

    callbacks: list[Callback] = [ProgressBar(show.progress_console)]
    if has_tensorboard() and not options.no_tensorboard:
        callbacks.append(TensorBoardLogger(RunDirectory(directory).tensorboard, spec.training.eval_split or "valid"))
    if options.mlflow is not None:
        # Seeds of one directory get names that belong together.
        parts = directory.absolute().parts[-2:] if options.seeds is not None else directory.absolute().parts[-1:]
        callbacks.append(MLflowLogger(options.mlflow, spec, "/".join(parts)))
    return callbacks


def show_seed(result: SeedResult, show: Show) -> None:
    """Show the metrics of a finished seed in one line."""
    metrics = ", ".join(f"{name} {metric_text(value, 6)}" for name, value in result.metrics.items())
    show.line(f"seed {result.seed}: {metrics} in {result.seconds:,.1f} s")


def _draw(out: Path, show: Show) -> Path | None:
    """Write the report and return its path; if this fails, print the reason and return None."""
    from terarec.train.report import write_report

    try:
        return write_report(out)
    # Any error: the training is complete with its checkpoints, and a missing plot should not fail the command.
    except Exception as error:
        show.line(f"no report: {failure_of(error).message}")
        return None


def _figures(run: Run, report: FitReport, page: Path | None) -> dict[str, Any]:
    last = {} if report.evaluation is None else report.evaluation.results.named_values()
    return {
        "out": str(run.directory.path),
        "model": run.spec.model.kind,
        "device": report.device,
        "init_from": str(run.initial) if run.initial is not None else None,
        # There for every run, though those of a regression or without evaluation are unknown.
        "auc": None,
        "logloss": None,
        # Those of the checkpoint that serving loads, which is not the last one after early stopping.
        **report.metrics,
        "served_step": report.served_step,
        "last": last,
        "highest_auc": report.highest_auc,
        "best_auc": run.dataset.best_auc,
        "best_step": report.best_step,
        "stopped_early": report.stopped_early,
        "loss": report.loss,
        "steps": report.steps,
        "samples": report.samples,
        "seconds": report.seconds,
        "samples_per_second": report.samples_per_second,
        "peak_memory_bytes": report.peak_memory_bytes,
        "tier_hit_rate": None if report.tiers is None else report.tiers.hit_rate,
        "tier_bytes_read": None if report.tiers is None else report.tiers.bytes_read,
        "tier_bytes_written": None if report.tiers is None else report.tiers.bytes_written,
        "checkpoint": str(report.checkpoint) if report.checkpoint is not None else None,
        "report": str(page) if page is not None else None,
    }


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of ``terarec reproduce``."""

    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of the data, such as frappe_x1.")]
    model: Annotated[str, typer.Option(help="Name of the model, such as deepfm.")]
    data: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the public files, plain or compressed.")]
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs, with the seeds 0, 1, ...")] = 1
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Output directory; ./RECIPE by default.")] = None
    threads: Annotated[int | None, spec_option("threads", TrainingSpec, "threads")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished runs, and resume an interrupted one.")] = False


def reproduce(options: ReproduceOptions, show: Show) -> None:
    """Run ``terarec reproduce``."""
    from terarec.apps.recipes.reproduce import TEST_SPLIT
    from terarec.apps.recipes.reproduce import reproduce as run_recipe
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
        on_result=lambda result: show_seed(result, show),
    )
    seeds, published = report.seeds, report.recipe.published
    figures: dict[str, Any] = {
        "recipe": options.recipe,
        "model": options.model,
        "out": str(out),
        "split": TEST_SPLIT,
        **seeds.to_json(),
        **{f"published_{name}": value for name, value in published.metrics.items()},
        "published": published.source,
    }
    show.result(f"{options.model} on {options.recipe}", figures)
