"""Command ``terarec plan``: the memory of a training before anything is allocated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.options import AllowImport
from terarec.cli.show import Show
from terarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``terarec plan``."""

    config: Annotated[Path, typer.Argument(metavar="CONFIG.json|RUN", help="Description of a run, or a run.")]
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the description; repeatable.")
    ] = None
    tiers: Annotated[
        str | None, typer.Option(metavar="host=2GiB,file=DIR", help="Memories for the rows of the tables.")
    ] = None
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory to stay within; what is available if unset.")
    ] = None
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a GPU to stay within; what is free if unset.")
    ] = None
    rows: Annotated[
        list[str] | None, typer.Option("--rows", metavar="TABLE=N", help="Expected rows of a table; repeatable.")
    ] = None
    allow_import: AllowImport = None


def plan(options: PlanOptions, show: Show) -> None:
    """Run ``terarec plan``; a run over its budget is an error after the tables were shown."""
    from terarec.cli.train import tier_changes
    from terarec.config import load_run, override, parse_assignments
    from terarec.models.artifact import RUN_FILE
    from terarec.spec import Tiers
    from terarec.spec.tiers import parse_size
    from terarec.train.devices import resolve_device
    from terarec.train.plan import plan_run

    file = options.config / RUN_FILE if options.config.is_dir() else options.config
    base = load_run(file)
    changes = {} if options.tiers is None else tier_changes(base, Tiers.parse(options.tiers))
    spec = override(base, changes | parse_assignments(options.assignments or ()))
    found = plan_run(
        spec,
        rows=_rows(options.rows or ()),
        host_bytes=None if options.memory is None else parse_size(options.memory),
        device=resolve_device(spec.training.device),
        device_bytes=None if options.device_memory is None else parse_size(options.device_memory),
        allow_import=options.allow_import or (),
    )
    figures = dataclasses.asdict(found)
    show.table("Tables", figures["tables"])
    show.table(f"Tables with --tiers {found.suggestion}", figures["placement"])
    show.result(f"Plan of {file}", figures)
    found.check()


def _rows(texts: list[str] | tuple[()]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, equals, count = text.rpartition("=")
        if not equals or not count.isdecimal():
            raise ConfigError("--rows", f"got {text!r}, expected TABLE=N")
        found[name] = int(count)
    return found
