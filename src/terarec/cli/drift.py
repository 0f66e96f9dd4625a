"""``terarec drift``: how far data have moved from a reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terarec.cli.options import AllowImport, Force
from terarec.cli.show import Show
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.etl.drift import DataSummary


@dataclass(frozen=True, kw_only=True)
class DriftOptions:
    """Options of ``terarec drift``."""

    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="The data set to compare with.")]
    current: Annotated[
        list[str],
        typer.Argument(metavar="CURRENT...", help="A data set, or raw logs for the reference's workflow to encode."),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Page to write; FILE.json is written beside it.")]
    reference_split: Annotated[str | None, typer.Option(help="Rows of the reference; train if unset.")] = None
    current_split: Annotated[str | None, typer.Option(help="Rows of the current data; all if unset.")] = None
    force: Force = False
    allow_import: AllowImport = None


def drift(options: DriftOptions, show: Show) -> None:
    """Run ``terarec drift``."""
    from terarec.etl.drift import compare, names_apart, summarize_dataset, write_drift_report
    from terarec.formats import read_dataset
    from terarec.io import check_new_file

    if options.out.suffix != ".html":
        raise ConfigError("--out", f"got {options.out}, expected a file that ends in .html")
    for file in (options.out, options.out.with_suffix(".json")):
        check_new_file(file, replace=options.force)  # before a long look at the data
    splits = read_dataset(options.reference).splits
    before = options.reference_split or ("train" if "train" in splits else None)
    allowed = options.allow_import or ()
    name, current_name = names_apart(options.reference, Path(options.current[0]))
    current = _summarize_current(options, current_name)
    wanted = None if before is None else [before]
    reference = summarize_dataset(options.reference, wanted, name=name, allow_import=allowed)
    report = compare(reference, current)
    page, figures = write_drift_report(report, options.out, replace=options.force)
    moved = sorted(report.columns, key=lambda column: -column.stability_index)
    show.result(
        f"Compared {len(moved)} columns",
        {
            "page": str(page),
            "figures": str(figures),
            "reference_rows": report.reference.rows,
            "current_rows": report.current.rows,
            "most_moved": moved[0].name,
            "stability_index": moved[0].stability_index,
        },
    )


def _summarize_current(options: DriftOptions, name: str) -> DataSummary:
    from terarec.etl.drift import summarize_dataset, summarize_raw
    from terarec.formats import DATASET_FILE

    first, allowed = Path(options.current[0]), options.allow_import or ()
    if len(options.current) == 1 and (first / DATASET_FILE).is_file():
        wanted = None if options.current_split is None else [options.current_split]
        return summarize_dataset(first, wanted, name=name, allow_import=allowed)
    if options.current_split is not None:
        raise ConfigError("--current-split", "raw logs have no splits, expected a data set as CURRENT")
    return summarize_raw(options.current, options.reference, allow_import=allowed)
