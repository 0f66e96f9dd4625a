# SPDX-License-Identifier: Apache-2.0
"""Commands around data: ``terarec generate``, ``workflow``, ``convert`` and ``drift``."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from terarec.cli.options import AllowImport, Force, SpecField, check_unset, repeatable, spec_option
from terarec.errors import ConfigError
from terarec.reports.text import Show
from terarec.spec import DatasetSpec, RecordOptions
from terarec.spec.preparation import SavedModel

if TYPE_CHECKING:
    from terarec.apps.drift.summary import DataSummary
    from terarec.spec import RecordsSpec


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of every ``terarec generate``."""

    rows: Annotated[int, typer.Option(min=1, help="Total number of rows, without side tables.")]
    out: Annotated[Path, typer.Option(help="Output directory.")]
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0


@dataclass(frozen=True, kw_only=True)
class GenerateCriteoOptions(GenerateOptions):
    """Options of ``terarec generate criteo``."""

    days: Annotated[int, typer.Option(min=1, help="Number of files: day_0.tsv, day_1.tsv, ...")] = 1


@dataclass(frozen=True, kw_only=True)
class GenerateMovielensOptions(GenerateOptions):
    """Options of ``terarec generate movielens``."""

    layout: Annotated[
        Literal["latest", "1m"],
        typer.Option(help="ratings.csv and movies.csv; or ratings.dat, movies.dat and users.dat as in MovieLens 1M."),
    ] = "latest"


@dataclass(frozen=True, kw_only=True)
class GenerateAmazonOptions(GenerateOptions):
    """Options of ``terarec generate amazon``."""

    layout: Annotated[Literal["2018", "2023"], typer.Option(help="Release of the reviews.")] = "2018"


def _generator(name: str, unit: str, options_type: type[GenerateOptions] = GenerateOptions) -> Callable[..., None]:
    """Return the function of ``terarec generate NAME``, whose generator counts in `unit`."""

    def generate(options: GenerateOptions, show: Show) -> None:
        generator = importlib.import_module(f"terarec.apps.synthetic.{name}")
        arguments = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        out = arguments.pop("out")
        with show.progress("generating", unit) as progress:
            report = generator.generate(out, **arguments, progress=progress)
        # The one figure that the report does not have.
        known = {"days": arguments["days"]} if "days" in arguments else {}
        show.result(f"Generated {out}", {**known, "out": str(out), **dataclasses.asdict(report)})

    generate.__annotations__["options"] = options_type  # its fields become the options of the command
    return generate


criteo = _generator("criteo", "rows", GenerateCriteoOptions)
avazu = _generator("avazu", "rows")
rees46 = _generator("rees46", "events")
mind = _generator("mind", "pages")
movielens = _generator("movielens", "ratings", GenerateMovielensOptions)
adult = _generator("adult", "people")
amazon = _generator("amazon", "reviews", GenerateAmazonOptions)


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """Options of ``terarec workflow``."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a preset, such as avazu.")]
    out: Annotated[Path, typer.Option(help="Output file, JSON.")]
    min_count: Annotated[
        int | None,
        typer.Option(
            min=1, help="Values rarer than this in the training part share one id; the preset's number if unset."
        ),
    ] = None
    layout: Annotated[str | None, typer.Option(help="Layout of movielens (latest, 1m) or amazon (2018, 2023).")] = None
    force: Force = False


def workflow(options: WorkflowOptions, show: Show) -> None:
    """Run ``terarec workflow``."""
    from terarec.etl.ready import PRESETS
    from terarec.etl.workflow import Workflow
    from terarec.io.files import check_new_file

    preset = PRESETS.find(options.name, "NAME")
    if options.layout is not None and options.name not in {"movielens", "amazon"}:
        raise ConfigError("--layout", f"got {options.layout!r} for {options.name}, which has one layout")
    check_new_file(options.out, replace=options.force)
    # Only what is given: each preset has its own defaults, and not all have a layout.
    chosen = {"min_count": options.min_count, "layout": options.layout}
    spec = preset(**{name: value for name, value in chosen.items() if value is not None})
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


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of ``terarec workflow draft``."""

    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files, directories, patterns or URLs of one format.")
    ]
    out: Annotated[Path, typer.Option(help="Output file, JSON.")]
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column to predict; guessed if unset.")] = None
    force: Force = False


def draft(options: DraftOptions, show: Show) -> None:
    """Run ``terarec workflow draft``."""
    from terarec.apps.draft import draft_workflow
    from terarec.etl.workflow import Workflow
    from terarec.io.files import check_new_file

    # Before the sample is read, which may come from a slow disk or a URL.
    check_new_file(options.out, replace=options.force)
    drafted = draft_workflow(options.files, options.label, name=options.out.stem)
    Workflow.of(drafted.spec).to_json(options.out, replace=options.force)
    source = drafted.spec.source
    is_text = source.format == "delimited"
    figures: dict[str, Any] = {
        "out": str(options.out),
        "format": source.format,
        "delimiter": source.delimiter if is_text else None,
        "header": source.header if is_text else None,
        "sample_rows": drafted.sample_rows,
        "dropped_rows": drafted.dropped_rows,
        "label": drafted.spec.labels[0].name,
        "label_reason": drafted.label_reason,
        "split_reason": drafted.split_reason,
        "steps": len(drafted.spec.steps),
        "format_reasons": list(drafted.format_reasons),
        "columns": [dataclasses.asdict(choice) for choice in drafted.choices],
    }
    show.figures(f"Wrote {options.out}", figures)
    for reason in drafted.format_reasons:
        show.line(f"format: {reason}")
    show.table("Columns", figures["columns"])
    show.json(figures)


_OF_RUNS = ("records", "dense", "sparse", "dense_states", "sparse_states", "step", "batch_size", "lr", "seed")
_TABLES = ("sok", "sparse")
_KINDS = {"norm": "norm", "parquet": "parquet", "raw": "raw", "raw-async": "raw_async"}


def _run_option(name: str) -> Any:
    """Declare an option for a field of `SavedModel`, None where it is not given: it belongs to ``--to run`` alone."""
    field = SpecField.at(SavedModel, name)
    is_number = field.type is not str
    words = f"{field.meaning.rstrip('.')} (run){f'; {field.default}' if is_number else ''}."
    words = repeatable(words) if field.is_repeatable else words
    return spec_option(name, SavedModel, name, metavar=None if is_number else "PATH", summary=words)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``terarec convert``."""

    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A data set; a records.json (dataset), a graph's JSON (run), a run (sok) or SOK's files (sparse).",
        ),
    ]
    to: Annotated[str, typer.Option(metavar="norm|parquet|raw|raw-async|dataset|run|sok|sparse", help="Output format.")]
    out: Annotated[Path, typer.Option(help="Output directory.")]
    key_bytes: Annotated[int | None, spec_option("key_bytes", RecordOptions, "key_bytes", metavar="4|8")] = None
    no_checksum: Annotated[bool, typer.Option("--no-checksum", help="Norm files without checksums.")] = False
    keysets: Annotated[bool, spec_option("keysets", RecordOptions, "keysets", is_plain=True)] = False
    storage: Annotated[str | None, spec_option("format", DatasetSpec, "storage")] = None
    records: Annotated[Path | None, _run_option("records")] = None
    dense: Annotated[Path | None, _run_option("dense")] = None
    sparse: Annotated[list[Path] | None, _run_option("sparse")] = None
    dense_states: Annotated[Path | None, _run_option("dense_states")] = None
    sparse_states: Annotated[list[Path] | None, _run_option("sparse_states")] = None
    step: Annotated[int | None, _run_option("step")] = None
    batch_size: Annotated[int | None, _run_option("batch_size")] = None
    lr: Annotated[float | None, _run_option("lr")] = None
    seed: Annotated[int | None, _run_option("seed")] = None
    allow_import: AllowImport = None


def convert(options: ConvertOptions, show: Show) -> None:
    """Run ``terarec convert``."""
    _check(options)
    # A model is not a data set: it has neither rows nor a rate.
    started = time.perf_counter()
    if options.to == "run":
        figures = _to_run(options)
        show.result(f"Converted {options.out}", {**figures, "seconds": time.perf_counter() - started})
        return
    if options.to in _TABLES:
        rows = _to_tables(options)
        result = {"out": str(options.out), "kind": options.to, "tables": len(rows), "table_rows": sum(rows.values())}
        show.result(f"Converted {options.out}", {**result, "seconds": time.perf_counter() - started})
        return
    to_dataset = options.to == "dataset"
    figures = _to_dataset(options, show) if to_dataset else _to_records(options, show)
    seconds = time.perf_counter() - started
    speed = {"seconds": seconds, "rows_per_second": figures["rows"] / seconds}
    show.result(f"Converted {options.out}", {"out": str(options.out), "kind": options.to, **figures, **speed})


def _check(options: ConvertOptions) -> None:
    targets = (*_KINDS, "dataset", "run", *_TABLES)
    if options.to not in targets:
        raise ConfigError("--to", f"got {options.to!r}, expected one of {', '.join(targets)}")
    is_dataset, is_run = options.to == "dataset", options.to == "run"
    is_records = options.to in _KINDS
    counts = {
        "--key-bytes": options.key_bytes is not None and not is_records,
        "--no-checksum": options.no_checksum and options.to != "norm",
        "--keysets": options.keysets and not is_records,
        "--format": options.storage is not None and not is_dataset,
        "--allow-import": bool(options.allow_import) and options.to != "sok",
    }
    of_runs = {f"--{name.replace('_', '-')}": getattr(options, name) is not None and not is_run for name in _OF_RUNS}
    check_unset(counts | of_runs, f"with --to {options.to}")
    for name in ("records", "dense"):
        if is_run and getattr(options, name) is None:
            raise ConfigError(f"--{name}", "got none, expected a path with --to run")


def _to_records(options: ConvertOptions, show: Show) -> dict[str, Any]:
    from terarec.data.records import write_as_records
    from terarec.formats import read_dataset

    wanted = RecordOptions(
        kind=_KINDS[options.to],  # type: ignore[arg-type]  # the words are checked
        key_bytes=options.key_bytes,
        checksum=not options.no_checksum,
        keysets=options.keysets,
    )
    spec = read_dataset(options.data)
    # Not an error: a data set with weights can be converted, but the user should know that training ignores them.
    dropped = (*(() if spec.weight is None else (spec.weight,)), *(column.name for column in spec.metadata))
    if dropped:
        show.line(f"left out, as HugeCTR's files hold neither weights nor metadata: {', '.join(dropped)}")
    with show.progress("converting", "rows") as progress:
        records: RecordsSpec = write_as_records(options.data, options.out, wanted, progress)
    return {
        "rows": sum(split.rows for split in records.splits.values()),
        "key_bytes": records.layout.key_bytes,
        "slot_sizes": list(records.layout.slot_sizes),
    }


def _to_dataset(options: ConvertOptions, show: Show) -> dict[str, Any]:
    from terarec.data.records import write_as_dataset
    from terarec.formats.hugectr.records import RECORDS_FILE

    path = options.data / RECORDS_FILE if options.data.is_dir() else options.data
    storage: Any = options.storage or "parquet"  # the spec checks the word
    with show.progress("converting", "rows") as progress:
        imported = write_as_dataset(path, options.out, storage=storage, progress=progress)
    dataset = imported.dataset
    return {
        "rows": sum(dataset.num_rows(split) for split in dataset.splits),
        "skipped_rows": imported.num_skipped,
    }


def _to_tables(options: ConvertOptions) -> dict[str, int]:
    """Return the number of rows of each table."""
    from terarec.hugectr.sok_dumps import write_dump, write_sparse_models

    if options.to == "sok":
        return write_dump(options.data, options.out, allow_import=options.allow_import or ())
    return write_sparse_models(options.data, options.out)


def _to_run(options: ConvertOptions) -> dict[str, Any]:
    from terarec.formats.hugectr.records import RECORDS_FILE
    from terarec.hugectr.saved_model import convert_model
    from terarec.models.artifact import tables

    assert options.records is not None  # checked
    assert options.dense is not None
    overrides = {name: getattr(options, name) for name in ("step", "batch_size", "lr", "seed")}
    saved = SavedModel(
        graph=options.data,
        records=options.records / RECORDS_FILE if options.records.is_dir() else options.records,
        dense=options.dense,
        sparse=tuple(options.sparse or ()),
        dense_states=options.dense_states,
        sparse_states=tuple(options.sparse_states or ()),
        **{name: value for name, value in overrides.items() if value is not None},
    )
    tables_of_run = tables(convert_model(saved, options.out).module)
    return {
        "out": str(options.out),
        "kind": options.to,
        "step": saved.step,
        "tables": len(tables_of_run),
        "table_rows": sum(map(len, tables_of_run.values())),
    }


@dataclass(frozen=True, kw_only=True)
class DriftOptions:
    """Options of ``terarec drift``."""

    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="The data set to compare with.")]
    current: Annotated[
        list[str],
        typer.Argument(metavar="CURRENT...", help="A data set, or raw logs for the reference's workflow to encode."),
    ]
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.html", help="HTML page to write; FILE.json gets the statistics of all columns."),
    ]
    reference_split: Annotated[
        str | None, typer.Option(help="Rows of the reference; train if unset, or all without it.")
    ] = None
    current_split: Annotated[str | None, typer.Option(help="Rows of the current data; all if unset.")] = None
    force: Force = False
    allow_import: AllowImport = None


def drift(options: DriftOptions, show: Show) -> None:
    """Run ``terarec drift``."""
    from terarec.apps.drift.compare import compare, write_drift_report
    from terarec.apps.drift.summary import names_apart, summarize_dataset
    from terarec.formats import read_dataset
    from terarec.io.files import check_new_file

    if options.out.suffix != ".html":
        raise ConfigError("--out", f"got {options.out}, expected a file that ends in .html")
    for file in (options.out, options.out.with_suffix(".json")):
        check_new_file(file, replace=options.force)  # before the data are read, which may take long
    splits = read_dataset(options.reference).splits
    before = options.reference_split or ("train" if "train" in splits else None)
    allowed = options.allow_import or ()
    name, current_name = names_apart(options.reference, Path(options.current[0]))
    current = _summarize_current(options, current_name)
    wanted = None if before is None else [before]
    reference = summarize_dataset(options.reference, wanted, name=name, allow_import=allowed)
    report = compare(reference, current)
    page, figures = write_drift_report(report, options.out, replace=options.force)
    # The stability index compares all kinds of columns by one number.
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
    from terarec.apps.drift.summary import summarize_dataset, summarize_raw
    from terarec.formats.dataset import DATASET_FILE

    first, allowed = Path(options.current[0]), options.allow_import or ()
    if len(options.current) == 1 and (first / DATASET_FILE).is_file():
        wanted = None if options.current_split is None else [options.current_split]
        return summarize_dataset(first, wanted, name=name, allow_import=allowed)
    if options.current_split is not None:
        raise ConfigError("--current-split", "raw logs have no splits, expected a data set as CURRENT")
    return summarize_raw(options.current, options.reference, allow_import=allowed)
