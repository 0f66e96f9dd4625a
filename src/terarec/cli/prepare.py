# SPDX-License-Identifier: Apache-2.0
"""``terarec prepare criteo``, ``csv`` and ``WORKFLOW``: data sets from raw logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from terarec.cli.options import AllowImport, SpecFields, comma_separated, pairs
from terarec.errors import ConfigError
from terarec.reports.text import Show
from terarec.spec import CsvOptions, LeaveOneOut, OneSplit, PrepareOptions, SplitByFiles, SplitByFraction
from terarec.spec.checks import FieldError

if TYPE_CHECKING:
    from terarec.etl.dry_run import Preview
    from terarec.etl.engine.phases import Progress
    from terarec.etl.engine.report import PrepareReport
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
            "empty_splits",
            "earlier_rows",
            "late_rows",
            "restart",
            format="storage",
            master="spark_master",
            conf="spark_conf",
        ),
    ]
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
        memory_bytes=None if options.memory is None else int(options.memory * _GIB),
        tables=tables or {},
    )
    # In MiB of the sources: their rows are not counted before the first pass.
    with show.progress("preparing", "MiB") as advance:

        def report_progress(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s {progress.bytes_per_second / 2**20:,.0f} MiB/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, words=progress.phase, rate=rate)

        if options.dry_run:
            shown = preview(workflow, sources, preparation, report_progress)
        else:
            report = prepare_data(workflow, sources, options.out, preparation, report_progress)
    if options.dry_run:
        _show_preview(shown, show)
    else:
        _show(report, options.out, show)


def last_rows(fraction: float) -> Split | None:
    """Return the split for ``--valid-fraction``."""
    if not 0 <= fraction < 1:
        raise FieldError("", "valid_fraction", f"got {fraction}, expected a number from 0 to below 1")
    return SplitByFraction(valid=fraction) if fraction else None


def _show(report: PrepareReport, out: Path, show: Show) -> None:
    figures: dict[str, Any] = {"out": str(out), **dataclasses.asdict(report)}
    show.figures(f"Prepared {out}", figures)
    show.table("Splits", [{"split": split, "rows": rows} for split, rows in report.splits.items()])
    show.table("Files of the splits", _runs_of_files(report))
    show.table("Columns", figures["columns"])
    show.table("Read", figures["inputs"])
    show.table("Embedding table sizes (float32, estimated)", figures["tables"])
    show.table("Phases", figures["phases"])
    show.table("Bad input", [{"kind": kind, "count": count} for kind, count in report.bad_input.counts.items()])
    if report.late_rows:
        show.line(f"late rows: {report.late_rows:,}, which see only those of the earlier rows that were kept")
    # Beyond the memory bound counting takes longer: --memory would help.
    for line in (*report.bad_input.first, *(f"counted through the disk: {name}" for name in report.spilled)):
        show.line(line)
    show.json(figures)


def _runs_of_files(report: PrepareReport) -> list[dict[str, Any]]:
    """Return a row for each run of consecutive files whose rows went to the same splits."""
    runs = []
    for _, group in groupby(report.files, key=lambda file: tuple(file.splits)):
        run = list(group)
        rows = {name: sum(file.splits.get(name, 0) for file in run) for name in report.splits}
        runs.append({"first file": run[0].file, "last file": run[-1].file, "files": len(run), **rows})
    return runs


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
_VALID_FRACTION_OPTION: Any = typer.Option(help="Share of the rows, from the end, for the valid split; 0 for none.")
_LeaveOneOutOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="USER=TIME",
        help="Columns of the user and the time: the last row of each user is for the test split, the one before it "
        "for valid, the others, and users with fewer than 3, for train.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoOptions(PreparationOptions):
    """Options of ``terarec prepare criteo``."""

    raw: Annotated[
        list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order of time.")
    ]
    min_count: Annotated[
        int | None,
        typer.Option(help="Count below which the values of a category share one id; 15 if unset."),
    ] = None
    valid_fraction: Annotated[float | None, _VALID_FRACTION_OPTION] = None
    valid_last_day: Annotated[
        bool,
        typer.Option(
            "--valid-last-day",
            help="The last file is the valid split; the default if there are several files, "
            "otherwise the last tenth of the rows.",
        ),
    ] = False


def prepare_criteo(options: PrepareCriteoOptions, show: Show) -> None:
    """Run ``terarec prepare criteo``."""
    from terarec.etl.ready import criteo
    from terarec.etl.source.files import numbered_order
    from terarec.etl.workflow import Workflow

    chosen: dict[str, Any] = {} if options.min_count is None else {"min_count": options.min_count}
    workflow = Workflow.of(criteo(**chosen, split=_criteo_split(options)))
    prepare(workflow, numbered_order(options.raw), options, show)


def _criteo_split(options: PrepareCriteoOptions) -> Split | None:
    """Return the split by the last file if it is requested or is the default (several files), else by the last rows."""
    from terarec.etl.source.files import find_files

    if options.valid_fraction is not None:
        if options.valid_last_day:
            raise FieldError("", "valid_fraction", "got --valid-last-day as well, expected one of them")
        return last_rows(options.valid_fraction)
    # Expanded here: one pattern or directory may name all days.
    files = len(find_files(options.raw))
    if options.valid_last_day and files < 2:
        raise FieldError("", "valid_last_day", "got one file, expected at least two, the last being the valid split")
    # Criteo's files are days, of which the last one predicts the future as serving does.
    return SplitByFiles(valid=1) if files > 1 else last_rows(_VALID_FRACTION)


@dataclass(frozen=True, kw_only=True)
class PrepareCsvOptions(PreparationOptions):
    """Options of ``terarec prepare csv``. Lists are separated by commas, or their option is repeated."""

    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files, directories, patterns or URLs of the train split, in order."),
    ]
    columns: Annotated[
        CsvOptions,
        SpecFields(
            "label",
            "dense",
            "log",
            "categorical",
            "ids",
            "buckets",
            "keys",
            "weight",
            "metadata",
            "min_count",
            "delimiter",
            "names",
            "missing",
            positive="positives",
        ),
    ]
    valid_fraction: Annotated[float, _VALID_FRACTION_OPTION] = 0.0
    leave_one_out: _LeaveOneOutOption = None
    valid: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A file of the valid split, instead of --valid-fraction; repeatable."),
    ] = None
    test: Annotated[list[str] | None, typer.Option(metavar="FILE", help="A file of the test split; repeatable.")] = None
    name: Annotated[str | None, typer.Option(help="Name of the data set; that of the directory if unset.")] = None


def prepare_csv(options: PrepareCsvOptions, show: Show) -> None:
    """Run ``terarec prepare csv``."""
    from terarec.etl.ready import csv_workflow
    from terarec.etl.source.files import numbered_order
    from terarec.etl.workflow import Workflow

    columns = dataclasses.replace(
        options.columns,
        split=_csv_split(options),
        # A shell makes no tab of \t, so that users type the word.
        delimiter="\t" if options.columns.delimiter == "tab" else options.columns.delimiter,
        name=options.out.resolve().name if options.name is None else options.name,
    )
    sources = [*numbered_order(options.files), *(options.valid or ()), *(options.test or ())]
    prepare(Workflow.of(csv_workflow(columns)), sources, options, show)


def _csv_split(options: PrepareCsvOptions) -> Split | None:
    """Return the split of the options: the last files for validation and test, or a share of the last rows."""
    from terarec.etl.source.files import find_files

    fraction = last_rows(options.valid_fraction)
    if options.leave_one_out is not None:
        if fraction is not None or options.valid or options.test:
            raise FieldError("", "leave_one_out", "got another split as well, expected one of them")
        return _leave_one_out(options.leave_one_out)
    if options.valid and fraction is not None:
        raise FieldError("", "valid_fraction", "got valid (--valid) as well, expected one of them")
    if not (options.valid or options.test):
        return fraction
    # A split by files counts from the end, where `prepare_csv` puts these files.
    valid, test = (len(find_files(files)) if files else 0 for files in (options.valid, options.test))
    return SplitByFiles(valid=valid, test=test, valid_fraction=options.valid_fraction)


def _leave_one_out(text: str) -> LeaveOneOut:
    ((user, time),) = pairs("--leave-one-out", [text], "USER=TIME")
    return LeaveOneOut(column=user, order=time)


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
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A file of a side table that the workflow names; repeatable."),
    ] = None
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(
            help="Put all rows into this split, instead of the workflow's own: for new files and a fitted workflow."
        ),
    ] = None
    leave_one_out: _LeaveOneOutOption = None
    weight: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A column of numbers >= 0: sample weights, instead of the workflow's."),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...", help="Columns of the files to keep unchanged, instead of the workflow's; repeatable."
        ),
    ] = None
    allow_import: AllowImport = None


def prepare_workflow(options: PrepareWorkflowOptions, show: Show) -> None:
    """Run ``terarec prepare WORKFLOW``."""
    from terarec.etl.source.files import numbered_order

    workflow = _find(options.workflow, options.allow_import or ())
    if options.leave_one_out is not None:
        if options.split is not None:
            raise FieldError("", "leave_one_out", "got split (--split) as well, expected one of them")
        workflow = workflow.with_split(_leave_one_out(options.leave_one_out))
    if options.split is not None:
        workflow = workflow.with_split(OneSplit(split=options.split))
    if options.weight is not None or options.metadata is not None:
        workflow = workflow.with_sample_columns(
            weight=workflow.spec.weight if options.weight is None else options.weight,
            metadata=workflow.spec.metadata if options.metadata is None else comma_separated(options.metadata),
        )
    tables: dict[str, tuple[str, ...]] = {}
    for name, path in pairs("--table", options.table or (), "NAME=PATH"):
        # Not distinct: a side table may have several files.
        tables[name] = (*tables.get(name, ()), path)
    prepare(workflow, numbered_order(options.raw), options, show, tables)


def _find(name: str, allow_import: Sequence[str]) -> Workflow:
    """Return the workflow of a file, of a directory, of a data set or a run, or of a preset."""
    from terarec.config.files import DATASET_DIRECTORY, RUN_FILE
    from terarec.etl.ready import PRESETS
    from terarec.etl.workflow import Workflow, workflow_of
    from terarec.formats.dataset import DATASET_FILE

    path = Path(name)
    # A file of that name was made on purpose.
    if name in PRESETS and not path.exists():
        return Workflow.of(PRESETS[name]())
    # A run keeps the workflow of its data set in a directory below.
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
