"""``terarec prepare WORKFLOW``: any logs -> data set, by a workflow of one's own or a ready one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terarec.cli.preparation import PreparationOptions, pairs, prepare
from terarec.cli.show import Show
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.etl.workflow import Workflow


@dataclass(frozen=True, kw_only=True)
class PrepareWorkflowOptions(PreparationOptions):
    """What ``terarec prepare WORKFLOW`` takes."""

    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="workflow.json, a fitted workflow's directory, or a ready name.")
    ]
    raw: Annotated[list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order.")]
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A file of a side table; repeatable.")
    ] = None


def prepare_workflow(options: PrepareWorkflowOptions, show: Show) -> None:
    """Any logs by a workflow: your own, a fitted one, or a ready one such as avazu."""
    workflow = _find(options.workflow)
    tables = {name: tuple(values) for name, values in pairs("--table", options.table or ()).items()}
    prepare(workflow, options.raw, options, show, tables)


def _find(name: str) -> Workflow:
    """The workflow of a file, of a directory, or of a ready name."""
    from terarec.etl.ready import READY
    from terarec.etl.workflow import Workflow

    path = Path(name)
    if name in READY and not path.exists():
        return Workflow.of(READY[name]())
    if path.is_dir():
        return Workflow.load(path)
    if path.is_file():
        return Workflow.from_json(path)
    known = ", ".join(sorted({"criteo", "csv", *READY}))
    raise ConfigError(f"WORKFLOW: got {name}, expected a file, a directory, or one of {known}")
