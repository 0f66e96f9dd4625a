"""``terarec prepare csv``: any CSV or TSV -> data set, by a workflow made of the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from terarec.cli.options import comma_separated
from terarec.cli.preparation import PreparationOptions, last_rows, prepare
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import FieldError, SplitByFiles

if TYPE_CHECKING:
    from terarec.spec import Split

_NAMES = "A,B,..."
_Words: TypeAlias = list[str] | None


@dataclass(frozen=True, kw_only=True)
class PrepareCsvOptions(PreparationOptions):
    """What ``terarec prepare csv`` takes. Lists are separated by commas, or their option is repeated."""

    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, directories, patterns or URLs of the train split, in order."),
    ]
    label: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")]
    positive: Annotated[
        list[str] | None, typer.Option(metavar="X,Y,...", help="Values of the label that mean 1; else a number.")
    ] = None
    dense: Annotated[_Words, typer.Option(metavar=_NAMES, help="Columns of numbers: standardized.")] = None
    log: Annotated[_Words, typer.Option(metavar=_NAMES, help="Columns of counts: logarithm.")] = None
    categorical: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of texts: ids by frequency.")
    ] = None
    ids: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of integers, as user ids: ids by frequency.")
    ] = None
    buckets: Annotated[
        list[str] | None, typer.Option(metavar="A=10,...", help="Columns of numbers: ids of so many intervals.")
    ] = None
    keys: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of integers: keys of dynamic tables.")
    ] = None
    weight: Annotated[str | None, typer.Option(metavar="NAME", help="A column of numbers >= 0: sample weights.")] = None
    metadata: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns to keep as they are, beside what models read.")
    ] = None
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 1
    valid_fraction: Annotated[float, typer.Option(help="Share of the rows, from the end, for the valid split.")] = 0.0
    valid: Annotated[list[str] | None, typer.Option(metavar="FILE", help="A file of the valid split; repeatable.")] = (
        None
    )
    test: Annotated[list[str] | None, typer.Option(metavar="FILE", help="A file of the test split; repeatable.")] = None
    delimiter: Annotated[str, typer.Option(metavar="TEXT", help="Between the fields; 'tab' for a tabulator.")] = ","
    names: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="All columns in order, for files without a header.")
    ] = None
    missing: Annotated[
        list[str] | None, typer.Option(metavar="X,Y,...", help="Fields that mean a missing value; ? if unset.")
    ] = None
    name: Annotated[str | None, typer.Option(help="Of the data set; the directory's if unset.")] = None


def prepare_csv(options: PrepareCsvOptions, show: Show) -> None:
    """Any CSV or TSV: numbers standardized, ids of categories by frequency."""
    from terarec.etl.ready import CsvOptions, csv_workflow
    from terarec.etl.workflow import Workflow

    asked = CsvOptions(
        label=options.label,
        positives=comma_separated(options.positive),
        dense=comma_separated(options.dense),
        log=comma_separated(options.log),
        categorical=comma_separated(options.categorical),
        ids=comma_separated(options.ids),
        buckets=_buckets(options.buckets),
        keys=comma_separated(options.keys),
        weight=options.weight,
        metadata=comma_separated(options.metadata),
        min_count=options.min_count,
        split=_split(options),
        delimiter="\t" if options.delimiter == "tab" else options.delimiter,
        names=comma_separated(options.names),
        missing=("", "?") if options.missing is None else tuple(",".join(options.missing).split(",")),
        name=options.out.resolve().name if options.name is None else options.name,
    )
    sources = [*options.files, *(options.valid or ()), *(options.test or ())]
    prepare(Workflow.of(csv_workflow(asked)), sources, options, show)


def _split(options: PrepareCsvOptions) -> Split | None:
    """Files for validation and test are the last ones; without any, the last rows are for validation if asked for."""
    from terarec.etl.source import find_files

    fraction = last_rows(options.valid_fraction)
    if options.valid and fraction is not None:
        raise FieldError("", "valid_fraction", "got valid (--valid) as well, expected one of them")
    if not (options.valid or options.test):
        return fraction
    valid, test = (len(find_files(files)) if files else 0 for files in (options.valid, options.test))
    return SplitByFiles(valid=valid, test=test, valid_fraction=options.valid_fraction)


def _buckets(texts: Sequence[str] | None) -> dict[str, int]:
    buckets: dict[str, int] = {}
    for word in comma_separated(texts):
        column, _, count = word.rpartition("=")
        if not column or not count.isdecimal():
            raise ConfigError(f"--buckets: got {word!r}, expected COLUMN=COUNT such as age=10")
        if column in buckets:
            raise ConfigError(f"--buckets: got {column!r} twice, expected it once")
        buckets[column] = int(count)
    return buckets
