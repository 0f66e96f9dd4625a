"""Options of ``terarec train`` -> `RunSpec`: a file, the run to resume or the defaults, then flags, then ``--set``."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terarec.cli.shared_options import AllowImport, DeviceOption, GroupOption, MetricsOption, SlicesOption
from terarec.config import load_run, override, parse_assignments, with_graph
from terarec.errors import ConfigError
from terarec.spec import (
    Activation,
    ColumnPooling,
    DenseInit,
    DenseOptimizerSpec,
    DLRMSpec,
    Initializer,
    ModelSpec,
    ObjectiveSpec,
    RunSpec,
    ScheduleSpec,
    SparseOptimizerSpec,
    TablesSpec,
)


def _kinds(union: Any) -> str:
    return "|".join(spec.kind for spec in typing.get_args(union))


def _choices(words: Any) -> str:
    return "|".join(typing.get_args(words))


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What ``terarec train`` takes; None leaves a setting to the configuration file, or to its default."""

    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.json", help="A run description; flags go on top.")
    ] = None
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG.json", help="The same as an option.")
    ] = None
    out: Annotated[Path, typer.Option(help="RUN directory to write: checkpoints, metrics, report.html.")]
    data: Annotated[Path | None, typer.Option(help="A prepared data set.")] = None
    model: Annotated[str | None, typer.Option(metavar=_kinds(ModelSpec), help="Kind of model.")] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the train split.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step.")] = None
    width: Annotated[int | None, typer.Option(help="Length of every embedding vector.")] = None
    bottom: Annotated[str | None, typer.Option(metavar="512-256-16", help="Layers of the bottom MLP (dlrm).")] = None
    top: Annotated[str | None, typer.Option(metavar="512-256", help="Hidden layers of the top MLP (dlrm).")] = None
    hidden: Annotated[
        str | None, typer.Option(metavar="256-128", help="Hidden layers (all models with an MLP but dlrm).")
    ] = None
    activation: Annotated[
        str | None, typer.Option(metavar=_choices(Activation), help="What follows each hidden layer.")
    ] = None
    batch_norm: Annotated[
        bool | None, typer.Option("--batch-norm/--no-batch-norm", help="Batch normalization of the hidden layers.")
    ] = None
    dropout: Annotated[float | None, typer.Option(help="Probability of zeroing a hidden unit in training.")] = None
    dense_init: Annotated[
        str | None, typer.Option(metavar=_choices(DenseInit), help="First weights of the layers.")
    ] = None
    table_init: Annotated[
        str | None, typer.Option(metavar=_choices(Initializer), help="First weights of the tables.")
    ] = None
    init_scale: Annotated[
        float | None, typer.Option(help="Their half-width (uniform) or standard deviation (normal).")
    ] = None
    pooling: Annotated[
        str | None, typer.Option(metavar=_choices(ColumnPooling), help="How the vectors of a list become one.")
    ] = None
    tables: Annotated[
        str | None, typer.Option(metavar=_kinds(TablesSpec), help="Tables sized by the data set, or by the keys seen.")
    ] = None
    dense_optimizer: Annotated[
        str | None, typer.Option(metavar=_kinds(DenseOptimizerSpec), help="Optimizer of the layers.")
    ] = None
    dense_lr: Annotated[float | None, typer.Option(help="Its learning rate.")] = None
    sparse_optimizer: Annotated[
        str | None, typer.Option(metavar=_kinds(SparseOptimizerSpec), help="Optimizer of the tables.")
    ] = None
    sparse_lr: Annotated[float | None, typer.Option(help="Its learning rate.")] = None
    objective: Annotated[str | None, typer.Option(metavar=_kinds(ObjectiveSpec), help="What training minimises.")] = (
        None
    )
    schedule: Annotated[
        str | None, typer.Option(metavar=_kinds(ScheduleSpec), help="Learning rates over the steps.")
    ] = None
    device: DeviceOption = None
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp16", help="Precision of the layers.")] = None
    loss_scale: Annotated[
        str | None, typer.Option(metavar="NUMBER|dynamic", help="Factor of the loss in the backward pass, for fp16.")
    ] = None
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the layers with torch.compile.")
    ] = None
    accumulate: Annotated[int | None, typer.Option(help="Batches whose gradients make one step.")] = None
    clip_norm: Annotated[float | None, typer.Option(help="Bound of the L2 norm of all gradients together.")] = None
    metrics: MetricsOption = None
    group: GroupOption = None
    slices: SlicesOption = None
    monitor: Annotated[str | None, typer.Option(metavar="METRIC", help="Metric that tells the best evaluation.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of first weights, data order and dropout.")] = None
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train so many runs, with the seeds S, S + 1, ...: RUN/seed-S, ...")
    ] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads of the compute.")] = None
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations in a row without an improvement.")
    ] = None
    init_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Start from the weights of another run or checkpoint."),
    ] = None
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="With --init-from: leave its optimizer states.")
    ] = False
    no_tensorboard: Annotated[
        bool, typer.Option("--no-tensorboard", help="Write no events of TensorBoard where that is installed.")
    ] = False
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Log to MLflow: the URI of a server, or a directory.")
    ] = None
    allow_import: AllowImport = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in RUN.")] = False
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Any field, e.g. training.max_steps=100.")
    ] = None


_FLAGS = {
    "model": "model.kind",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "width": "model.width",
    "bottom": "model.bottom",
    "top": "model.top",
    "hidden": "model.hidden",
    "activation": "model.activation",
    "batch_norm": "model.batch_norm",
    "dropout": "model.dropout",
    "dense_init": "model.init",
    "pooling": "model.pooling",
    "table_init": "model.tables.initializer",
    "init_scale": "model.tables.init_scale",
    "tables": "model.tables.kind",
    "dense_optimizer": "dense_optimizer.kind",
    "dense_lr": "dense_optimizer.lr",
    "sparse_optimizer": "sparse_optimizer.kind",
    "sparse_lr": "sparse_optimizer.lr",
    "objective": "objective.kind",
    "schedule": "training.schedule.kind",
    "device": "training.device",
    "precision": "training.precision",
    "loss_scale": "training.loss_scale",
    "compile": "training.compile",
    "accumulate": "training.accumulate",
    "clip_norm": "training.clip_norm",
    "metrics": "training.metrics",
    "group": "training.group",
    "slices": "training.slices",
    "monitor": "training.monitor",
    "seed": "training.seed",
    "threads": "training.threads",
    "patience": "training.patience",
}
"""Option -> the field of `RunSpec` that it sets."""

_RUN_FILE = "run.json"  # as in terarec.models.artifact, which would load torch for a name


def run_spec(options: TrainOptions) -> RunSpec:
    """The run that `options` describe.

    Without a configuration file the options change the description of the run to resume, ``RUN/run.json``, or of the
    one that ``--init-from`` names.
    The graph that ``--set model.file`` names is read, from the working directory on.
    ``--width`` alone also widens the last layer of DLRM's bottom MLP, which must be as wide as the embedding.

    Raises:
        ConfigError: no data set named, or a field that is unknown, mistyped or out of range.
        DataNotFoundError: no such configuration file.
    """
    base = _base(options)
    flags = {path: getattr(options, name) for name, path in _FLAGS.items()}
    changes = {path: str(value) for path, value in flags.items() if value is not None}
    if options.data is not None:
        changes["data"] = str(options.data.absolute())
    if options.init_from is not None:
        changes["init_from"] = str(options.init_from.absolute())
    if options.reset_optimizer:
        changes["reset_optimizer"] = "true"
    changes |= parse_assignments(options.assignments or ())
    return with_graph(override(base, _with_bottom_as_wide(base, changes)), Path.cwd())


def _base(options: TrainOptions) -> RunSpec:
    """What the flags go on top of."""
    if options.config is not None and options.config_file is not None:
        raise ConfigError(f"--config: got {options.config_file} and CONFIG.json {options.config}, expected one of them")
    config = options.config or options.config_file
    if config is not None:
        return load_run(config)
    described = (options.out if options.seeds is None else _first_seed(options.out)) / _RUN_FILE
    if options.resume and described.is_file():
        return load_run(described)
    if options.init_from is not None:
        for run in (options.init_from, *options.init_from.absolute().parents[1:2]):
            if (run / _RUN_FILE).is_file():
                return dataclasses.replace(load_run(run / _RUN_FILE), init_from=None, reset_optimizer=False)
    if options.data is None:
        raise ConfigError(
            "nothing to train on: got neither CONFIG.json nor --data, expected one of them, "
            f"or --resume and a run in {options.out}, or --init-from and another run"
        )
    return RunSpec(data=str(options.data))


def _first_seed(out: Path) -> Path:
    """The run of the lowest seed below `out`, whose seed is the first one; `out` itself if there is none."""
    runs = [run for run in out.glob("seed-*") if run.name.removeprefix("seed-").isdecimal()]
    return min(runs, key=lambda run: int(run.name.removeprefix("seed-")), default=out)


def _with_bottom_as_wide(base: RunSpec, changes: dict[str, str]) -> dict[str, str]:
    kind = changes.get("model.kind", base.model.kind)
    if kind != DLRMSpec.kind or "model.width" not in changes or "model.bottom" in changes:
        return changes
    model = base.model if isinstance(base.model, DLRMSpec) else DLRMSpec()
    return {**changes, "model.bottom": "-".join(map(str, [*model.bottom[:-1], changes["model.width"]]))}
