# SPDX-License-Identifier: Apache-2.0
"""``terarec inspect``: what is in a data set, a RUN, a checkpoint, a column or a table; ``doctor``: the host.

``hugectr-alias`` changes the host: whether it has the names of HugeCTR's packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terarec.cli.options import AllowImport, CheckpointOption, Force, changed, check_unset
from terarec.errors import ConfigError, DataNotFoundError
from terarec.reports.text import Show, label


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of ``terarec inspect``."""

    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A data set, a RUN, a checkpoint, or a graph file of HugeCTR.")
    ]
    column: Annotated[str | None, typer.Option(help="One column of a data set: its values, most frequent first.")] = (
        None
    )
    table: Annotated[str | None, typer.Option(help="One table of a model: row norms and the largest rows.")] = None
    split: Annotated[str | None, typer.Option(help="Split whose values are counted; train if unset.")] = None
    checkpoint: CheckpointOption = None
    export_table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Write the rows of a table of a model to --out.")
    ] = None
    to: Annotated[str, typer.Option("--to", metavar="parquet", help="Format of --out.")] = "parquet"
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for --export-table.")] = None
    force: Force = False
    top: Annotated[int, typer.Option(min=1, help="Number of values or rows to show.")] = 10
    allow_import: AllowImport = None


def inspect(options: InspectOptions, show: Show) -> None:
    """Run ``terarec inspect``."""
    description = _describe(options, show)
    show.figures(
        f"{description['what']} {description['path']}",
        {name: value for name, value in description.items() if name != "what"},
    )
    for name, rows in description.items():
        if isinstance(rows, list):
            show.table(label(name), rows)
    show.json(description)


def _describe(options: InspectOptions, show: Show) -> dict[str, Any]:
    from terarec.formats.dataset import DATASET_FILE

    path = options.path
    # Distinguished by their files, as users name a directory in each case.
    if (path / DATASET_FILE).is_file():
        return _describe_dataset(options, show)
    if path.is_dir():
        return _describe_model(options)
    # Before torch is loaded, which takes a second: a path that is typed wrong is reported at once.
    if not path.exists():
        expected = "a data set, a RUN, a checkpoint, or a graph file"
        raise DataNotFoundError(path, f"no such file or directory, expected {expected}")
    from terarec.cli.inspect_model import describe_graph_file

    names = ("column", "table", "split", "checkpoint", "export_table", "out", "to", "force", "top")
    check_unset(changed(options, *names), "for a graph")
    return describe_graph_file(path)


def _describe_dataset(options: InspectOptions, show: Show) -> dict[str, Any]:
    from terarec.cli.inspect_data import describe_column, describe_dataset

    # Options of other things are errors rather than ignored: the path is probably not what the user meant.
    if options.checkpoint is not None:
        raise ConfigError("--checkpoint", f"{options.path} is a data set, expected a RUN")
    if options.table is not None:
        raise ConfigError("--table", f"{options.path} is a data set, which has columns, expected a RUN or a checkpoint")
    if options.export_table is not None or options.out is not None:
        raise ConfigError("--export-table", f"{options.path} is a data set, expected a RUN or a checkpoint")
    check_unset(changed(options, "to", "force"), "for a data set")
    if options.column is None:
        check_unset(changed(options, "split", "top"), "without --column")
        return describe_dataset(options.path, allow_import=options.allow_import or ())
    with show.progress(f"counting {options.column}", "rows") as progress:
        return describe_column(
            options.path,
            options.column,
            options.split,
            options.top,
            progress,
            allow_import=options.allow_import or (),
        )


def _describe_model(options: InspectOptions) -> dict[str, Any]:
    from terarec.checkpoint.directory import MANIFEST
    from terarec.cli.inspect_model import describe_checkpoint, describe_table
    from terarec.config.files import CHECKPOINT_DIRECTORY, RUN_FILE
    from terarec.formats.dataset import DATASET_FILE

    path = options.path
    if not any((path / name).exists() for name in (MANIFEST, RUN_FILE, CHECKPOINT_DIRECTORY)):
        raise DataNotFoundError(
            path, f"expected a data set (with {DATASET_FILE}), a RUN ({RUN_FILE}) or a checkpoint ({MANIFEST})"
        )
    if options.column is not None:
        raise ConfigError("--column", f"{path} is a model, which has tables, expected a data set")
    check_unset({"--split": options.split is not None}, "for a model")
    if options.export_table is not None:
        check_unset(changed(options, "table", "top"), "with --export-table")
        return _export(options, options.export_table)
    if options.out is not None:
        raise ConfigError("--out", "got it without --export-table, expected both")
    check_unset(changed(options, "to", "force"), "without --export-table")
    if options.table is None:
        check_unset(changed(options, "top"), "without --table")
        return describe_checkpoint(path, options.checkpoint)
    return describe_table(
        path, options.table, options.top, which=options.checkpoint, allow_import=options.allow_import or ()
    )


def _export(options: InspectOptions, table: str) -> dict[str, Any]:
    from terarec.cli.inspect_model import export_table
    from terarec.io.files import check_new_file

    # One format, but an option, so that others can follow without another command.
    if options.to != "parquet":
        raise ConfigError("--to", f"got {options.to!r}, expected parquet")
    if options.out is None:
        raise ConfigError("--export-table", "got it without --out, expected both")
    check_new_file(options.out, replace=options.force)
    return export_table(
        options.path, table, options.out, which=options.checkpoint, allow_import=options.allow_import or ()
    )


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of ``terarec doctor``: those of every command."""


def doctor(options: DoctorOptions, show: Show) -> None:
    """Run ``terarec doctor``."""
    from terarec.cli.diagnostics import examine

    del options
    results = examine()
    # Sections are figures, lists tables; "ok" alone is neither and comes last.
    for section, entries in results.items():
        if isinstance(entries, Mapping):
            show.figures(section, {name: _words(value) for name, value in entries.items()})
        elif isinstance(entries, list):
            show.table(section, entries)
    show.line("All is well." if results["ok"] else "Not all is well: see check.")
    show.json(results)


def _words(value: Any) -> Any:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class AliasOptions:
    """Options of ``terarec hugectr-alias``."""

    remove: Annotated[bool, typer.Option("--remove", help="Remove the names again.")] = False


def hugectr_alias(options: AliasOptions, show: Show) -> None:
    """Run ``terarec hugectr-alias``."""
    from terarec.hugectr.alias import install_alias, remove_alias

    path = remove_alias() if options.remove else install_alias()
    meaning = "is removed: Python finds no hugectr any more" if options.remove else "lets Python find hugectr"
    show.line(f"{path} {meaning}.")
    show.json({"installed": not options.remove, "path": str(path)})
