"""``terarec init-config``: a run description to start from."""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.shared_options import Force
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import ModelSpec
from terarec.spec.quoting import did_you_mean

_MODELS = {spec.kind: spec for spec in typing.get_args(ModelSpec)}


@dataclass(frozen=True, kw_only=True)
class InitConfigOptions:
    """What ``terarec init-config`` takes."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Kind of model: {', '.join(_MODELS)}.")]
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A prepared data set, or HugeCTR's files.")]
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("run.json")
    factory: Annotated[
        str | None, typer.Option(metavar="package.module:name", help="Class or function that makes a python model.")
    ] = None
    force: Force = False


def init_config(options: InitConfigOptions, show: Show) -> None:
    """Write a complete, commented run description for a data set."""
    from terarec.config import commented_json, starting_run
    from terarec.data import read_spec
    from terarec.formats import check_new_file, write_bytes

    if options.model not in _MODELS:
        hint = did_you_mean(options.model, _MODELS)
        raise ConfigError(f"MODEL: got {options.model!r}{hint}, expected one of {', '.join(_MODELS)}")
    if options.factory is not None and options.model != "python":
        raise ConfigError(f"--factory: has no meaning for {options.model}, expected the model python")
    check_new_file(options.out, replace=options.force)
    dataset = read_spec(options.data)
    # A relative path counts from the folder of the file, so that both may be moved together.
    data = os.path.relpath(options.data, options.out.parent)
    found = starting_run(_MODELS[options.model], dataset, data, factory=options.factory)
    write_bytes(options.out, commented_json(found.run, found.remarks).encode())
    for field in found.open_fields:
        show.line(f"{field}: {found.remarks[field]}")
    figures = {"out": str(options.out), "model": options.model, "data": str(options.data)}
    show.result(f"Wrote {options.out}", {**figures, "open_fields": list(found.open_fields)})
