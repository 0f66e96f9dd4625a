"""Commands that make a RUN: ``terarec init-config``, ``train`` and ``reproduce``."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.failures import failure_of
from terarec.cli.options import DEVICES, AllowImport, Force, Setting, Settings, TiersOption, spec_option
from terarec.config import RUN_FILE, load_run, override, parse_assignments, with_graph
from terarec.errors import ConfigError
from terarec.kernels.environment import is_launched
from terarec.reports.text import Show
from terarec.spec import (
    DLRMSpec,
    ModelSpec,
    RunSpec,
    Tiers,
    TrainingSpec,
    to_data,
)
from terarec.spec.registry import Registry

if TYPE_CHECKING:
    from terarec.train.run import Run
    from terarec.train.seeds import SeedResult
    from terarec.train.stopping import FitReport
    from terarec.train.trainer import Callback


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
    force: Force = False


def init_config(options: InitConfigOptions, show: Show) -> None:
    """Run ``terarec init-config``."""
    from terarec.config import commented_json, starting_run
    from terarec.data import read_spec
    from terarec.io import check_new_file, write_bytes

    model = _MODELS.find(options.model)
    if options.factory is not None and options.model != "python":
        raise ConfigError("--factory", f"has no meaning for {options.model}, expected the model python")
    check_new_file(options.out, replace=options.force)
    dataset = read_spec(options.data)
    # A relative path counts from the folder of the file, so that both may be moved together.
    data = os.path.relpath(options.data, options.out.parent)
    found = starting_run(model, dataset, data, factory=options.factory)
    write_bytes(options.out, commented_json(found.run, found.remarks).encode())
    for path in found.open_fields:
        show.line(f"{path}: {found.remarks[path]}")
    figures = {"out": str(options.out), "model": options.model, "data": str(options.data)}
    show.result(f"Wrote {options.out}", {**figures, "open_fields": list(found.open_fields)})


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
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of runs, with the seeds S, S + 1, ...: RUN/seed-S, ...")
    ] = None
    init_from: Annotated[Path | None, spec_option("init_from", RunSpec, "init_from", metavar="RUN")] = None
    reset_optimizer: Annotated[bool, spec_option("reset_optimizer", RunSpec, "reset_optimizer", is_plain=True)] = False
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
    if options.tiers is not None:
        changes |= tier_changes(base, Tiers.parse(options.tiers))
    changes |= parse_assignments(options.assignments or ())
    return with_graph(override(base, _with_bottom_as_wide(base, changes)), Path.cwd())


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
                return dataclasses.replace(load_run(run / RUN_FILE), init_from=None, reset_optimizer=False)
    if options.data is None:
        raise ConfigError(
            "nothing to train on",
            "got neither CONFIG.json nor --data, expected one of them, "
            f"or --resume and a run in {options.out}, or --init-from and another run",
        )
    return RunSpec(data=str(options.data))


def tier_changes(base: RunSpec, tiers: Tiers) -> dict[str, str]:
    """Return the fields to set for `tiers`, in place of those of `base`."""
    path = "model.tables.tiers"
    has_some = getattr(getattr(base.model, "tables", None), "tiers", None) is not None
    # The tiers of the description are not mixed with these: host=2GiB alone would keep another's file.
    changes = {path: "none"} if has_some else {}
    if tiers.file is not None:
        tiers = dataclasses.replace(tiers, file=str(Path(tiers.file).absolute()))
    given = {name: getattr(tiers, name) for name in ("device", "host", "file")}
    return changes | {f"{path}.{name}": value for name, value in given.items() if value is not None}


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
        _train_seeds(spec, options, options.seeds, show)
        return
    from terarec.dist import join, load_plan
    from terarec.train.run import build

    plan = None if options.plan is None else load_plan(options.plan)
    # Ranks that were started with different settings are an error before the first step.
    ranks = join({"run": to_data(spec), "out": str(options.out), "resume": options.resume})
    # One bar and one log for all ranks.
    callbacks = _callbacks(spec, options, show, options.out) if ranks.is_first else []
    run = build(
        spec,
        options.out,
        callbacks=callbacks,
        allow_import=options.allow_import or (),
        ranks=ranks,
        plan=plan,
    )
    try:
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
    )
    figures = {"out": str(options.out), "model": spec.model.kind, "split": split, **report.to_json()}
    show.result(f"Trained {count} seeds in {options.out}", figures)


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
    found = ", ".join(f"{name} {value:.6f}" for name, value in result.metrics.items())
    show.line(f"seed {result.seed}: {found} in {result.seconds:,.1f} s")


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
    evaluation = report.evaluation
    return {
        "out": str(run.directory.path),
        "model": run.spec.model.kind,
        "device": report.device,
        "init_from": str(run.initial) if run.initial is not None else None,
        # There for every run, though those of a regression or without evaluation are unknown.
        "auc": None,
        "logloss": None,
        **(evaluation.results.overall.values if evaluation is not None else {}),
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
        on_result=lambda result: show_seed(result, show),
    )
    seeds, published = report.seeds, report.recipe.published
    figures: dict[str, Any] = {
        "recipe": options.recipe,
        "model": options.model,
        "out": str(out),
        "split": TEST_SPLIT,
        **seeds.to_json(),
        "published_auc": published.auc,
        "published_logloss": published.logloss,
        "published_mean_auc": published.mean_auc,
        "published_mean_logloss": published.mean_logloss,
        "published": published.source,
    }
    show.result(f"{options.model} on {options.recipe}", figures)
