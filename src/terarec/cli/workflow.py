"""``terarec workflow``: a ready workflow as a file to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.options import Force
from terarec.cli.show import Show
from terarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """What ``terarec workflow`` takes."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a ready workflow, such as avazu.")]
    out: Annotated[Path, typer.Option(help="JSON file to write.")]
    min_count: Annotated[int | None, typer.Option(min=1, help="Values rarer than this share one id.")] = None
    layout: Annotated[str | None, typer.Option(help="Of movielens (latest, 1m) or amazon (2018, 2023).")] = None
    force: Force = False


def workflow(options: WorkflowOptions, show: Show) -> None:
    """Write a ready workflow as JSON, to change it and prepare by it."""
    from terarec.etl.ready import PRESETS
    from terarec.etl.workflow import Workflow
    from terarec.io import check_new_file

    if options.name not in PRESETS:
        raise ConfigError(f"NAME: got {options.name!r}, expected one of {', '.join(map(repr, PRESETS))}")
    if options.layout is not None and options.name not in {"movielens", "amazon"}:
        raise ConfigError(f"--layout: got {options.layout!r} for {options.name}, which has one layout")
    check_new_file(options.out, replace=options.force)
    chosen = {"min_count": options.min_count, "layout": options.layout}
    spec = PRESETS[options.name](**{name: value for name, value in chosen.items() if value is not None})
    Workflow.of(spec).to_json(options.out, replace=options.force)
    figures = {
        "out": str(options.out),
        "name": spec.name,
        "steps": len(spec.steps),
        "tables": list(spec.tables),
        "labels": [label.name for label in spec.labels],
        "dense": list(spec.dense),
        "categorical": list(spec.categorical),
    }
    show.result(f"Wrote {options.out}", figures)
