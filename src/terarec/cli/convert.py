"""``terarec convert``: data sets from and to HugeCTR's files, and HugeCTR's models as runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.show import Show
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.spec import RecordsSpec

_OF_RUNS = ("records", "dense", "sparse", "dense_states", "sparse_states", "step", "batch_size", "lr", "seed")
_KINDS = {"norm": "norm", "parquet": "parquet", "raw": "raw", "raw-async": "raw_async"}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``terarec convert``."""

    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A data set; a records.json (dataset), or a graph's JSON (run).")
    ]
    to: Annotated[str, typer.Option(metavar="norm|parquet|raw|raw-async|dataset|run", help="What to write.")]
    out: Annotated[Path, typer.Option(help="Directory to make.")]
    key_bytes: Annotated[int | None, typer.Option(metavar="4|8", help="Bytes of a key; 4 if all fit.")] = None
    no_checksum: Annotated[bool, typer.Option("--no-checksum", help="Norm files without checksums.")] = False
    keysets: Annotated[bool, typer.Option("--keysets", help="Write a keyset for each split, too.")] = False
    storage: Annotated[
        str | None, typer.Option("--format", metavar="parquet|raw", help="Format of a data set's shards.")
    ] = None
    records: Annotated[Path | None, typer.Option(help="records.json of a model's data (run).")] = None
    dense: Annotated[Path | None, typer.Option(metavar="FILE", help="Dense weights (run).")] = None
    sparse: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Rows of an embedding (run); repeatable, in order.")
    ] = None
    dense_states: Annotated[Path | None, typer.Option(metavar="FILE", help="Dense optimizer states (run).")] = None
    sparse_states: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="An embedding's optimizer states (run); repeatable.")
    ] = None
    step: Annotated[int | None, typer.Option(help="Iterations behind a model's files (run); 0.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples in an iteration (run); 2048.")] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate to go on with (run); 0.001.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of new rows and dropout (run); 1.")] = None


def convert(options: ConvertOptions, show: Show) -> None:
    """Run ``terarec convert``."""
    _check(options)
    started = time.perf_counter()
    if options.to == "run":
        figures = _to_run(options)
        show.result(f"Converted {options.out}", {**figures, "seconds": time.perf_counter() - started})
        return
    to_dataset = options.to == "dataset"
    figures = _to_dataset(options, show) if to_dataset else _to_records(options, show)
    seconds = time.perf_counter() - started
    speed = {"seconds": seconds, "rows_per_second": figures["rows"] / seconds}
    show.result(f"Converted {options.out}", {"out": str(options.out), "kind": options.to, **figures, **speed})


def _check(options: ConvertOptions) -> None:
    targets = (*_KINDS, "dataset", "run")
    if options.to not in targets:
        raise ConfigError("--to", f"got {options.to!r}, expected one of {', '.join(targets)}")
    is_dataset, is_run = options.to == "dataset", options.to == "run"
    is_records = not (is_dataset or is_run)
    for name, is_given, is_wanted in (
        ("--key-bytes", options.key_bytes is not None, is_records),
        ("--no-checksum", options.no_checksum, options.to == "norm"),
        ("--keysets", options.keysets, is_records),
        ("--format", options.storage is not None, is_dataset),
        *((f"--{name.replace('_', '-')}", getattr(options, name) is not None, is_run) for name in _OF_RUNS),
    ):
        if is_given and not is_wanted:
            raise ConfigError(name, f"has no meaning with --to {options.to}")
    for name in ("records", "dense"):
        if is_run and getattr(options, name) is None:
            raise ConfigError(f"--{name}", "got none, expected a path with --to run")


def _to_records(options: ConvertOptions, show: Show) -> dict[str, Any]:
    from terarec.data.records import RecordOptions, write_as_records
    from terarec.formats import read_dataset

    asked = RecordOptions(
        kind=_KINDS[options.to],  # type: ignore[arg-type]  # the words are checked
        key_bytes=options.key_bytes,
        checksum=not options.no_checksum,
        keysets=options.keysets,
    )
    spec = read_dataset(options.data)
    dropped = (*(() if spec.weight is None else (spec.weight,)), *(column.name for column in spec.metadata))
    if dropped:
        show.line(f"left out, as HugeCTR's files hold neither weights nor metadata: {', '.join(dropped)}")
    with show.progress("converting", "rows") as progress:
        records: RecordsSpec = write_as_records(options.data, options.out, asked, progress)
    return {
        "rows": sum(split.rows for split in records.splits.values()),
        "key_bytes": records.layout.key_bytes,
        "slot_sizes": list(records.layout.slot_sizes),
    }


def _to_dataset(options: ConvertOptions, show: Show) -> dict[str, Any]:
    from terarec.data.records import write_as_dataset
    from terarec.formats.hugectr import RECORDS_FILE

    path = options.data / RECORDS_FILE if options.data.is_dir() else options.data
    storage: Any = options.storage or "parquet"  # the spec checks the word
    with show.progress("converting", "rows") as progress:
        imported = write_as_dataset(path, options.out, storage=storage, progress=progress)
    dataset = imported.dataset
    return {
        "rows": sum(dataset.num_rows(split) for split in dataset.splits),
        "skipped_rows": imported.num_skipped,
    }


def _to_run(options: ConvertOptions) -> dict[str, Any]:
    from terarec.formats.hugectr import RECORDS_FILE
    from terarec.hugectr.saved_model import SavedModel, convert_model
    from terarec.models.artifact import tables

    assert options.records is not None  # checked
    assert options.dense is not None
    given = {name: getattr(options, name) for name in ("step", "batch_size", "lr", "seed")}
    saved = SavedModel(
        graph=options.data,
        records=options.records / RECORDS_FILE if options.records.is_dir() else options.records,
        dense=options.dense,
        sparse=tuple(options.sparse or ()),
        dense_states=options.dense_states,
        sparse_states=tuple(options.sparse_states or ()),
        **{name: value for name, value in given.items() if value is not None},
    )
    held = tables(convert_model(saved, options.out).module)
    return {
        "out": str(options.out),
        "kind": options.to,
        "step": saved.step,
        "tables": len(held),
        "table_rows": sum(map(len, held.values())),
    }
