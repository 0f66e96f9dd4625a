"""``terarec prepare criteo``: raw Criteo logs -> data set, by the ready workflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from terarec.cli.preparation import PreparationOptions, last_rows, prepare
from terarec.cli.show import Show
from terarec.spec import FieldError, SplitByFiles

if TYPE_CHECKING:
    from terarec.spec import Split

_VALID_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoOptions(PreparationOptions):
    """What ``terarec prepare criteo`` takes."""

    raw: Annotated[
        list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order of time.")
    ]
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 15
    valid_fraction: Annotated[
        float | None, typer.Option(help="Share of the rows, from the end, for the valid split.")
    ] = None
    valid_last_day: Annotated[bool, typer.Option("--valid-last-day", help="The last file is the valid split.")] = False


def prepare_criteo(options: PrepareCriteoOptions, show: Show) -> None:
    """Criteo logs: logarithms of integers, ids of categories by frequency."""
    from terarec.etl.ready import criteo
    from terarec.etl.workflow import Workflow

    workflow = Workflow.of(criteo(min_count=options.min_count, split=_split(options)))
    prepare(workflow, options.raw, options, show)


def _split(options: PrepareCriteoOptions) -> Split | None:
    """The last file if asked for, or if there are several and nothing is asked for; else the last rows."""
    from terarec.etl.source import find_files

    if options.valid_fraction is not None:
        if options.valid_last_day:
            raise FieldError("", "valid_fraction", "got --valid-last-day as well, expected one of them")
        return last_rows(options.valid_fraction)
    files = len(find_files(options.raw))
    if options.valid_last_day and files < 2:
        raise FieldError("", "valid_last_day", "got one file, expected at least two, the last being the valid split")
    return SplitByFiles(valid=1) if files > 1 else last_rows(_VALID_FRACTION)
