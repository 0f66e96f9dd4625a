"""``terarec prepare csv``: any CSV or TSV -> data set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.show import Show
from terarec.errors import ConfigError

_NAMES = "A,B,..."


@dataclass(frozen=True, kw_only=True)
class PrepareCsvOptions:
    """What ``terarec prepare csv`` takes. Lists are separated by commas."""

    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Files of the train split, in order.")]
    out: Annotated[Path, typer.Option(help="Directory of the data set to make.")]
    label: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")]
    positive: Annotated[
        str, typer.Option(metavar="X,Y,...", help="Values of the label that mean 1; else a number.")
    ] = ""
    dense: Annotated[str, typer.Option(metavar=_NAMES, help="Columns of numbers: standardized.")] = ""
    log: Annotated[str, typer.Option(metavar=_NAMES, help="Columns of counts: logarithm.")] = ""
    categorical: Annotated[str, typer.Option(metavar=_NAMES, help="Columns of texts: ids by frequency.")] = ""
    ids: Annotated[str, typer.Option(metavar=_NAMES, help="Columns of integers, as user ids: ids by frequency.")] = ""
    buckets: Annotated[str, typer.Option(metavar="A=10,...", help="Columns of numbers: ids of so many intervals.")] = ""
    keys: Annotated[str, typer.Option(metavar=_NAMES, help="Columns of integers: keys of dynamic tables.")] = ""
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 1
    valid_fraction: Annotated[float, typer.Option(help="Share of the rows, from the end, for the valid split.")] = 0.0
    valid: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A file of the valid split; repeatable.")] = (
        None
    )
    test: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A file of the test split; repeatable.")] = (
        None
    )
    delimiter: Annotated[str, typer.Option(metavar="CHAR", help="Between the fields; 'tab' for a tabulator.")] = ","
    names: Annotated[str, typer.Option(metavar=_NAMES, help="All columns in order, for files without a header.")] = ""
    missing: Annotated[str, typer.Option(metavar="X,Y,...", help="Fields that stand for a missing value.")] = ",?"
    storage: Annotated[str, typer.Option("--format", metavar="parquet|raw", help="Format of the shards.")] = "parquet"
    name: Annotated[str | None, typer.Option(help="Of the data set; the directory's if unset.")] = None


def prepare_csv(options: PrepareCsvOptions, show: Show) -> None:
    """Any CSV or TSV: numbers standardized, ids of categories by frequency."""
    from terarec.etl import CsvLayout, CsvOptions
    from terarec.etl import prepare_csv as prepare

    delimiter = "\t" if options.delimiter == "tab" else options.delimiter
    layout = CsvLayout(delimiter=delimiter, names=_list(options.names), missing=tuple(options.missing.split(",")))
    asked = CsvOptions(
        label=options.label,
        positives=_list(options.positive),
        dense=_list(options.dense),
        log=_list(options.log),
        categorical=_list(options.categorical),
        integer_categorical=_list(options.ids),
        buckets=_buckets(options.buckets),
        keys=_list(options.keys),
        min_count=options.min_count,
        valid_fraction=options.valid_fraction,
        valid=tuple(options.valid or ()),
        test=tuple(options.test or ()),
        layout=layout,
        storage=options.storage,  # type: ignore[arg-type]  # the spec checks the word
        name=options.name,
    )
    with show.progress("preparing", "rows") as progress:
        report = prepare(options.files, options.out, asked, progress)
    show.result(f"Prepared {options.out}", {"out": str(options.out), **dataclasses.asdict(report)})


def _list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",")) if text else ()


def _buckets(text: str) -> dict[str, int]:
    buckets = {}
    for word in _list(text):
        column, _, count = word.rpartition("=")
        if not column or not count.isdecimal():
            raise ConfigError(f"--buckets: got {word!r}, expected COLUMN=COUNT such as age=10")
        buckets[column] = int(count)
    return buckets
