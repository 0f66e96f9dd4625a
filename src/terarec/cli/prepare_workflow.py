"""``terarec prepare WORKFLOW``: any logs -> data set, by a workflow of one's own or a ready one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from terarec.cli.options import AllowImport, comma_separated
from terarec.cli.preparation import PreparationOptions, pairs, prepare
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import OneSplit

if TYPE_CHECKING:
    from terarec.etl.workflow import Workflow


@dataclass(frozen=True, kw_only=True)
class PrepareWorkflowOptions(PreparationOptions):
    """What ``terarec prepare WORKFLOW`` takes."""

    workflow: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW",
            help="workflow.json, a fitted workflow, a data set or a RUN that has one, or a ready name.",
        ),
    ]
    raw: Annotated[list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order.")]
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A file of a side table; repeatable.")
    ] = None
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(help="Put all rows into this split, in the place of the workflow's own splits."),
    ] = None
    weight: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A column of numbers >= 0: sample weights, in the place of the workflow's."),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...", help="Columns of the files to keep as they are, in the place of the workflow's."
        ),
    ] = None
    allow_import: AllowImport = None


def prepare_workflow(options: PrepareWorkflowOptions, show: Show) -> None:
    """Any logs by a workflow: your own, a fitted one, or a ready one such as avazu."""
    workflow = _find(options.workflow, options.allow_import or ())
    if options.split is not None:
        workflow = workflow.with_split(OneSplit(split=options.split))
    if options.weight is not None or options.metadata is not None:
        workflow = workflow.with_sample_columns(
            weight=workflow.spec.weight if options.weight is None else options.weight,
            metadata=workflow.spec.metadata if options.metadata is None else comma_separated(options.metadata),
        )
    tables = {name: tuple(values) for name, values in pairs("--table", options.table or ()).items()}
    prepare(workflow, options.raw, options, show, tables)


def _find(name: str, allow_import: Sequence[str]) -> Workflow:
    """The workflow of a file, of a directory, of a data set or a run, or of a ready name."""
    from terarec.etl.ready import PRESETS
    from terarec.etl.workflow import Workflow, workflow_of
    from terarec.formats import DATASET_FILE
    from terarec.models.artifact import DATASET_DIRECTORY, RUN_FILE

    path = Path(name)
    if name in PRESETS and not path.exists():
        return Workflow.of(PRESETS[name]())
    if (path / RUN_FILE).is_file():
        return workflow_of(path / DATASET_DIRECTORY, allow_import=allow_import)
    if (path / DATASET_FILE).is_file():
        return workflow_of(path, allow_import=allow_import)
    if path.is_dir():
        return Workflow.load(path, allow_import=allow_import)
    if path.is_file():
        return Workflow.from_json(path, allow_import=allow_import)
    known = ", ".join(sorted({"criteo", "csv", *PRESETS}))
    raise ConfigError(f"WORKFLOW: got {name}, expected a file, a directory, or one of {known}")
