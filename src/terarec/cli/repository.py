# SPDX-License-Identifier: Apache-2.0
"""Versions of served models in a repository: ``terarec promote``, ``rollback`` and ``models``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from terarec.cli.failures import EXIT_DATA, failure_of
from terarec.cli.options import AllowImport, CheckpointOption, SpecFields, check_unset, spec_option
from terarec.errors import ConfigError, TerarecError
from terarec.reports.text import Show
from terarec.spec import ServingSpec
from terarec.spec.serving_repository import MOST_VERSIONS, PointerSpec, PromotionSpec

if TYPE_CHECKING:
    from terarec.serve.repository import RepositoryModel

_RepositoryOption = Annotated[
    Path, typer.Option("--repository", metavar="DIR", help="Directory of the model repository.")
]
_ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model.")]
_OF_VERSION = ("run", "step", "data", "made", "memory_bytes", "metrics_step", "follows")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class PromoteOptions:
    """Options of ``terarec promote``."""

    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="RUN directory of a trained model; omit it with --version.")
    ] = None
    repository: _RepositoryOption
    model: _ModelOption
    version: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_VERSIONS, help="Version of the repository to promote in place of a RUN."),
    ] = None
    checkpoint: CheckpointOption = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Data set of the golden records; the run's own if unset."),
    ] = None
    role: Annotated[PromotionSpec, SpecFields("share", "by", "shadow", "keep", "follow", "split")]
    tables: Annotated[Path | None, spec_option("tables", ServingSpec, "tables", metavar="FILE.json")] = None
    allow_import: AllowImport = None


def promote(options: PromoteOptions, show: Show) -> None:
    """Run ``terarec promote``."""
    from terarec.apps.promotion import promote as promote_run
    from terarec.config.files import load_served_tables
    from terarec.serve import ServedTables
    from terarec.serve.repository import ModelRepository

    repository, role = ModelRepository(options.repository), options.role
    figures: dict[str, Any] = {"repository": str(options.repository), "model": options.model}
    if options.run is None:
        if options.version is None:
            raise ConfigError("RUN", "missing, expected a RUN, or --version for one that is in the repository")
        of_runs = {
            "--checkpoint": options.checkpoint,
            "--data": options.data,
            "--split": role.split,
            "--keep": role.keep,
            "--follow": role.follow or None,
            "--tables": options.tables,
            "--allow-import": options.allow_import,
        }
        check_unset({name: bool(value) for name, value in of_runs.items()}, "with --version")
        repository.known(options.model).promote(options.version, role)
        figures["version"] = options.version
    else:
        check_unset({"--version": options.version is not None}, "with a RUN")
        spec = None if options.tables is None else load_served_tables(options.tables)
        report = promote_run(
            options.run,
            options.repository,
            options.model,
            role,
            checkpoint=options.checkpoint,
            data=options.data,
            allow_import=options.allow_import or (),
            tables=None if spec is None else ServedTables(server=spec.server, cache=spec.cache),
        )
        figures |= {**dataclasses.asdict(report), "path": str(report.path), "removed": list(report.removed)}
    pointer = repository.model(options.model).pointer()
    version = figures["version"]
    show.result(f"Promoted version {version} of {options.model}", {**figures, **pointer.roles()})


@dataclass(frozen=True, kw_only=True)
class RollbackOptions:
    """Options of ``terarec rollback``."""

    repository: _RepositoryOption
    model: _ModelOption
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=1,
            max=MOST_VERSIONS,
            metavar="VERSION",
            help="Version to return to; if unset, a split or a shadow ends, or the version before answers again.",
        ),
    ] = None


def rollback(options: RollbackOptions, show: Show) -> None:
    """Run ``terarec rollback``."""
    from terarec.serve.repository import ModelRepository

    pointer = ModelRepository(options.repository).known(options.model).roll_back(options.to)
    figures = {"repository": str(options.repository), "model": options.model, "version": pointer.current}
    show.result(f"Version {pointer.current} of {options.model} answers", {**figures, **pointer.roles()})


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of ``terarec models``."""

    repository: _RepositoryOption
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Only this model.")] = None


def models(options: ModelsOptions, show: Show) -> None:
    """Run ``terarec models``."""
    from terarec.serve.repository import ModelRepository

    repository = ModelRepository(options.repository)
    names = repository.names if options.model is None else (repository.known(options.model).name,)
    described = [_described(repository.model(name)) for name in names]
    rows = [row for model in described for row in _rows(model)]
    if rows:
        show.table("models", rows)
    else:
        show.line(f"{options.repository} holds no versions")
    show.json({"repository": str(options.repository), "models": described})
    problems = [problem for model in described for problem in model["problems"]]
    for problem in problems:
        typer.echo(f"terarec: error: {problem}", err=True)
    if problems:
        raise typer.Exit(EXIT_DATA)


def _described(model: RepositoryModel) -> dict[str, Any]:
    from terarec.spec import to_data
    from terarec.spec.serving_repository import RepositoryModelSpec

    problems: list[str] = []

    def read(what: Callable[[], _T], otherwise: _T) -> _T:
        """Return what can be read; a damaged file hides nothing but its own content."""
        try:
            return what()
        except (TerarecError, OSError) as error:
            problems.append(failure_of(error).message or "")
            return otherwise

    none: tuple[int, ...] = ()
    pointer = read(model.pointer, PointerSpec())
    versions = []
    for number in read(lambda: model.versions, none):
        described = read(partial(model.described, number), None)
        versions.append(
            {
                "version": number,
                "role": _role(pointer, number) or ("before" if number in pointer.before else None),
                "kind": None if described is None else described.model,
                **{name: getattr(described, name, None) for name in _OF_VERSION},
                "metrics": {} if described is None else dict(described.metrics),
                "metrics_split": None if described is None else described.metrics_split or None,
            }
        )
    return {
        "model": model.name,
        **pointer.roles(),
        "policy": to_data(read(model.spec, RepositoryModelSpec()).versions),
        "versions": versions,
        "history": to_data(pointer.history),
        "problems": problems,
    }


def _role(pointer: PointerSpec, version: int) -> str | None:
    if version == pointer.current:
        return f"answers since {pointer.since}"
    if pointer.split is not None and pointer.split.version == version:
        return f"answers {pointer.split.share:g} by {pointer.split.by}"
    if pointer.shadow is not None and pointer.shadow.version == version:
        return f"scores {pointer.shadow.share:g} as a shadow"
    return None


def _rows(model: dict[str, Any]) -> list[dict[str, Any]]:
    from terarec.reports.text import metric_text

    return [
        {
            "model": model["model"],
            "version": version["version"],
            "role": version["role"],
            "run": version["run"],
            "step": version["step"],
            "data": version["data"],
            "made": version["made"],
            "metrics": ", ".join(f"{name} {metric_text(value)}" for name, value in version["metrics"].items()) or None,
        }
        for version in model["versions"]
    ]
