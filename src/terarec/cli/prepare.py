"""``terarec prepare criteo``, ``csv`` and ``WORKFLOW``: data sets from raw logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from terarec.cli.options import AllowImport, SpecFields, comma_separated, distinct_pairs, pairs, spec_option
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import (
    FieldError,
    OneSplit,
    PrepareOptions,
    SplitByFiles,
    SplitByFraction,
)

if TYPE_CHECKING:
    from terarec.etl.dry_run import Preview
    from terarec.etl.engine import PrepareReport, Progress
    from terarec.etl.workflow import Workflow
    from terarec.spec import Split


_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """Options of ``terarec prepare``, whatever the data."""

    out: Annotated[Path, typer.Option(help="Output directory of the data set.")]
    how: Annotated[
        PrepareOptions,
        SpecFields(
            "engine",
            "bad_input",
            "rows_per_shard",
            "shuffle",
            "parts",
            "keysets",
            "seed",
            "threads",
            "limit",
            "restart",
        ),
    ]
    storage: Annotated[str, spec_option("format", PrepareOptions, "storage")] = "parquet"
    spark_master: Annotated[
        str | None, typer.Option("--master", metavar="URL", help="Spark's master, such as local[2].")
    ] = None
    spark_conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; repeatable.")
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.0625, metavar="GIB", help="Memory for counting and sorting; half of the free memory if unset."
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: show columns, ten samples and estimates.")
    ] = False


def prepare(
    workflow: Workflow,
    sources: Sequence[str],
    options: PreparationOptions,
    show: Show,
    tables: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Prepare `sources` by `workflow`, whose side tables are `tables`, and show the report or, dry, the preview."""
    from terarec.etl.dry_run import preview
    from terarec.etl.preparation import prepare as prepare_data

    preparation = dataclasses.replace(
        options.how,
        storage=options.storage,  # type: ignore[arg-type]  # the spec checks the word
        memory_bytes=None if options.memory is None else int(options.memory * _GIB),
        tables=tables or {},
        spark_master=options.spark_master,
        spark_conf=distinct_pairs("--conf", options.spark_conf or (), "NAME=VALUE"),
    )
    with show.progress("preparing", "MiB") as advance:

        def tell(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s {progress.bytes_per_second / 2**20:,.0f} MiB/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, words=progress.phase, rate=rate)

        if options.dry_run:
            found = preview(workflow, sources, preparation, tell)
        else:
            report = prepare_data(workflow, sources, options.out, preparation, tell)
    if options.dry_run:
        _show_preview(found, show)
    else:
        _show(report, options.out, show)


def last_rows(fraction: float) -> Split | None:
    """Return the split for ``--valid-fraction``.

    Raises:
        FieldError: No share from 0 to below 1.
    """
    if not 0 <= fraction < 1:
        raise FieldError("", "valid_fraction", f"got {fraction}, expected a number from 0 to below 1")
    return SplitByFraction(valid=fraction) if fraction else None


def _show(report: PrepareReport, out: Path, show: Show) -> None:
    figures: dict[str, Any] = {"out": str(out), **dataclasses.asdict(report)}
    show.figures(f"Prepared {out}", figures)
    show.table("Splits", [{"split": split, "rows": rows} for split, rows in report.splits.items()])
    show.table("Columns", figures["columns"])
    show.table("Read", figures["inputs"])
    show.table("Embedding table sizes (float32, estimated)", figures["tables"])
    show.table("Phases", figures["phases"])
    show.table("Bad input", [{"kind": kind, "count": count} for kind, count in report.bad_input.counts.items()])
    for line in (*report.bad_input.first, *(f"counted through the disk: {name}" for name in report.spilled)):
        show.line(line)
    show.json(figures)


def _show_preview(preview: Preview, show: Show) -> None:
    figures = dataclasses.asdict(preview)
    sample = "all rows" if preview.is_complete else f"the first {preview.sample_rows:,} rows"
    show.line(f"Dry run: nothing is written. Missing shares, ids and tables are those of {sample}.")
    show.figures("Preview", figures)
    show.table("Columns of the sources", figures["inputs"])
    show.table("Columns of the data set", figures["columns"])
    samples = [
        {"column": name, **{str(place): _cell(value) for place, value in enumerate(values, 1)}}
        for name, values in preview.rows.items()
    ]
    show.table("First samples", samples)
    show.table("Embedding table sizes (float32, estimated)", figures["tables"])
    show.table("Bad input", [{"kind": kind, "count": count} for kind, count in preview.bad_input.counts.items()])
    for line in preview.bad_input.first:
        show.line(line)
    show.json(figures)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _CELL_CHARACTERS else text[: _CELL_CHARACTERS - 3] + "..."


_CELL_CHARACTERS = 24
_VALID_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoOptions(PreparationOptions):
    """Options of ``terarec prepare criteo``."""

    raw: Annotated[
        list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order of time.")
    ]
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 15
    valid_fraction: Annotated[
        float | None, typer.Option(help="Share of the rows, from the end, for the valid split.")
    ] = None
    valid_last_day: Annotated[bool, typer.Option("--valid-last-day", help="The last file is the valid split.")] = False


def prepare_criteo(options: PrepareCriteoOptions, show: Show) -> None:
    """Run ``terarec prepare criteo``."""
    from terarec.etl.ready import criteo
    from terarec.etl.workflow import Workflow

    workflow = Workflow.of(criteo(min_count=options.min_count, split=_criteo_split(options)))
    prepare(workflow, options.raw, options, show)


def _criteo_split(options: PrepareCriteoOptions) -> Split | None:
    """Return the split by the last file if it is requested or is the default (several files), else by the last rows."""
    from terarec.etl.source import find_files

    if options.valid_fraction is not None:
        if options.valid_last_day:
            raise FieldError("", "valid_fraction", "got --valid-last-day as well, expected one of them")
        return last_rows(options.valid_fraction)
    files = len(find_files(options.raw))
    if options.valid_last_day and files < 2:
        raise FieldError("", "valid_last_day", "got one file, expected at least two, the last being the valid split")
    return SplitByFiles(valid=1) if files > 1 else last_rows(_VALID_FRACTION)


_NAMES = "A,B,..."
_Words: TypeAlias = list[str] | None


@dataclass(frozen=True, kw_only=True)
class PrepareCsvOptions(PreparationOptions):
    """Options of ``terarec prepare csv``. Lists are separated by commas, or their option is repeated."""

    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, directories, patterns or URLs of the train split, in order."),
    ]
    label: Annotated[str, typer.Option(metavar="NAME", help="The column to predict.")]
    positive: Annotated[
        list[str] | None,
        typer.Option(metavar="X,Y,...", help="Values of the label that mean 1; without any, labels are numbers."),
    ] = None
    dense: Annotated[_Words, typer.Option(metavar=_NAMES, help="Columns of numbers: standardized.")] = None
    log: Annotated[_Words, typer.Option(metavar=_NAMES, help="Columns of counts: logarithm.")] = None
    categorical: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of texts: ids by frequency.")
    ] = None
    ids: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of integers, such as user ids: ids by frequency.")
    ] = None
    buckets: Annotated[
        list[str] | None,
        typer.Option(metavar="A=10,...", help="Columns of numbers, each with its number of quantile buckets."),
    ] = None
    keys: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns of integers: keys of dynamic tables.")
    ] = None
    weight: Annotated[str | None, typer.Option(metavar="NAME", help="A column of numbers >= 0: sample weights.")] = None
    metadata: Annotated[
        list[str] | None, typer.Option(metavar=_NAMES, help="Columns to keep unchanged, which models do not read.")
    ] = None
    min_count: Annotated[int, typer.Option(min=1, help="Values rarer than this share one id.")] = 1
    valid_fraction: Annotated[float, typer.Option(help="Share of the rows, from the end, for the valid split.")] = 0.0
    valid: Annotated[list[str] | None, typer.Option(metavar="FILE", help="A file of the valid split; repeatable.")] = (
        None
    )
    test: Annotated[list[str] | None, typer.Option(metavar="FILE", help="A file of the test split; repeatable.")] = None
    delimiter: Annotated[str, typer.Option(metavar="TEXT", help="Delimiter of fields; 'tab' for a tab.")] = ","
    names: Annotated[
        list[str] | None,
        typer.Option(metavar=_NAMES, help="Names of all columns in order, for files without a header."),
    ] = None
    missing: Annotated[
        list[str] | None, typer.Option(metavar="X,Y,...", help="Marks of a missing value; ? if unset.")
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the data set; that of the directory if unset.")] = None


def prepare_csv(options: PrepareCsvOptions, show: Show) -> None:
    """Run ``terarec prepare csv``."""
    from terarec.etl.ready import CsvOptions, csv_workflow
    from terarec.etl.workflow import Workflow

    chosen = CsvOptions(
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
        split=_csv_split(options),
        delimiter="\t" if options.delimiter == "tab" else options.delimiter,
        names=comma_separated(options.names),
        missing=("", "?") if options.missing is None else tuple(",".join(options.missing).split(",")),
        name=options.out.resolve().name if options.name is None else options.name,
    )
    sources = [*options.files, *(options.valid or ()), *(options.test or ())]
    prepare(Workflow.of(csv_workflow(chosen)), sources, options, show)


def _csv_split(options: PrepareCsvOptions) -> Split | None:
    """Return the split of the options: the last files for validation and test, or a share of the last rows."""
    from terarec.etl.source import find_files

    fraction = last_rows(options.valid_fraction)
    if options.valid and fraction is not None:
        raise FieldError("", "valid_fraction", "got valid (--valid) as well, expected one of them")
    if not (options.valid or options.test):
        return fraction
    valid, test = (len(find_files(files)) if files else 0 for files in (options.valid, options.test))
    return SplitByFiles(valid=valid, test=test, valid_fraction=options.valid_fraction)


def _buckets(texts: Sequence[str] | None) -> dict[str, int]:
    expected = "COLUMN=COUNT such as age=10"
    counts = distinct_pairs("--buckets", comma_separated(texts), expected, last=True)
    for column, count in counts.items():
        if not count.isdecimal():
            raise ConfigError("--buckets", f"got '{column}={count}', expected {expected}")
    return {column: int(count) for column, count in counts.items()}


@dataclass(frozen=True, kw_only=True)
class PrepareWorkflowOptions(PreparationOptions):
    """Options of ``terarec prepare WORKFLOW``."""

    workflow: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW",
            help="workflow.json, a fitted workflow, a data set or a RUN that has one, or a preset.",
        ),
    ]
    raw: Annotated[list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order.")]
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A file of a side table; repeatable.")
    ] = None
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(help="Put all rows into this split, instead of the workflow's own."),
    ] = None
    weight: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A column of numbers >= 0: sample weights, instead of the workflow's."),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,...", help="Columns of the files to keep unchanged, instead of the workflow's."),
    ] = None
    allow_import: AllowImport = None


def prepare_workflow(options: PrepareWorkflowOptions, show: Show) -> None:
    """Run ``terarec prepare WORKFLOW``."""
    workflow = _find(options.workflow, options.allow_import or ())
    if options.split is not None:
        workflow = workflow.with_split(OneSplit(split=options.split))
    if options.weight is not None or options.metadata is not None:
        workflow = workflow.with_sample_columns(
            weight=workflow.spec.weight if options.weight is None else options.weight,
            metadata=workflow.spec.metadata if options.metadata is None else comma_separated(options.metadata),
        )
    tables: dict[str, tuple[str, ...]] = {}
    for name, path in pairs("--table", options.table or (), "NAME=PATH"):
        tables[name] = (*tables.get(name, ()), path)
    prepare(workflow, options.raw, options, show, tables)


def _find(name: str, allow_import: Sequence[str]) -> Workflow:
    """Return the workflow of a file, of a directory, of a data set or a run, or of a preset."""
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
    raise ConfigError("WORKFLOW", f"got {name}, expected a file, a directory, or one of {known}")
