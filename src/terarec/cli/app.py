"""The table of contents: every command, in the order of the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from terarec import __version__
from terarec.cli import (
    convert,
    doctor,
    drift,
    evaluate,
    export,
    generate,
    init_config,
    predict,
    prepare_criteo,
    prepare_csv,
    prepare_workflow,
    reproduce,
    serve,
    train,
    workflow,
)
from terarec.cli import inspect as inspect_command
from terarec.cli.command import Group, add

DATA, MODEL, SERVING, LOOKING = "Data", "Model", "Serving", "Looking inside"
WORKFLOW = "WORKFLOW"
ORDER = (
    "generate",
    "workflow",
    "prepare",
    "convert",
    "drift",
    "init-config",
    "train",
    "evaluate",
    "predict",
    "export",
    "reproduce",
    "serve",
    "inspect",
    "doctor",
)


@dataclass
class Frame:
    """What the global options set for the one place that handles errors."""

    debug: bool = False


class Contents(Group):
    """Lists the commands in the order of the work; Typer alone would put groups of commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands' names, as ``terarec --help`` shows them."""
        return sorted(super().list_commands(ctx), key=ORDER.index)


class WorkflowOrCommand(Group):
    """Takes what is no command of its own as the first argument of the command `WORKFLOW`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As Click's, for ``prepare avazu day.csv``: ``prepare WORKFLOW avazu day.csv``."""
        is_command = self.get_command(ctx, args[0]) is not None
        return super().resolve_command(ctx, args if is_command else [WORKFLOW, *args])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"terarec {__version__}")
        raise typer.Exit


# Error messages and help must read the same in a pipe and in a terminal, so Typer's own error panels stay off.
app = typer.Typer(
    cls=Contents,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands and groups inherit it
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)


@app.callback()
def contents(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Recommender models with huge embedding tables: from raw click logs to served scores."""
    del version
    ctx.obj.debug = debug
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


_generate = typer.Typer(help="Write synthetic raw logs whose best reachable AUC is known.")
add(_generate, "criteo", generate.criteo)
add(_generate, "avazu", generate.avazu)
add(_generate, "rees46", generate.rees46)
add(_generate, "mind", generate.mind)
add(_generate, "movielens", generate.movielens)
add(_generate, "adult", generate.adult)
add(_generate, "amazon", generate.amazon)
app.add_typer(_generate, name="generate", rich_help_panel=DATA)

add(app, "workflow", workflow.workflow, panel=DATA)

_prepare = typer.Typer(
    cls=WorkflowOrCommand,
    subcommand_metavar="WORKFLOW|criteo|csv ...",
    help="Turn raw logs into a data set: ids, numbers, shards, dataset.json.",
)
add(_prepare, "criteo", prepare_criteo.prepare_criteo, describes=["PrepareOptions"])
add(_prepare, "csv", prepare_csv.prepare_csv, describes=["CsvOptions", "SourceSpec", "PrepareOptions"])
add(_prepare, WORKFLOW, prepare_workflow.prepare_workflow, describes=["PrepareOptions"])
app.add_typer(_prepare, name="prepare", rich_help_panel=DATA)

add(app, "convert", convert.convert, panel=DATA, describes=["RecordLayout"])
add(app, "drift", drift.drift, panel=DATA)
add(app, "init-config", init_config.init_config, panel=MODEL, describes=["PythonModelSpec"])
add(app, "train", train.train, panel=MODEL)
add(app, "evaluate", evaluate.evaluate, panel=MODEL)
add(app, "predict", predict.predict, panel=MODEL)
add(app, "export", export.export, panel=MODEL)
add(app, "reproduce", reproduce.reproduce, panel=MODEL, describes=["TrainingSpec"])
add(app, "serve", serve.serve, panel=SERVING, describes=["ServingSpec"])
add(app, "inspect", inspect_command.inspect, panel=LOOKING)
add(app, "doctor", doctor.doctor, panel=LOOKING)
