"""``terarec convert``: data sets from and to HugeCTR's files."""

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

_KINDS = {"norm": "norm", "parquet": "parquet", "raw": "raw", "raw-async": "raw_async"}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What ``terarec convert`` takes."""

    data: Annotated[Path, typer.Argument(metavar="DATA", help="A data set; for --to dataset a records.json.")]
    to: Annotated[str, typer.Option(metavar="norm|parquet|raw|raw-async|dataset", help="What to write.")]
    out: Annotated[Path, typer.Option(help="Directory to make.")]
    key_bytes: Annotated[int | None, typer.Option(metavar="4|8", help="Bytes of a key; 4 if all fit.")] = None
    no_checksum: Annotated[bool, typer.Option("--no-checksum", help="Norm files without checksums.")] = False
    keysets: Annotated[bool, typer.Option("--keysets", help="Write a keyset for each split, too.")] = False
    storage: Annotated[
        str | None, typer.Option("--format", metavar="parquet|raw", help="Format of a data set's shards.")
    ] = None


def convert(options: ConvertOptions, show: Show) -> None:
    """Write a data set as HugeCTR's files, or HugeCTR's files as a data set."""
    _check(options)
    started = time.perf_counter()
    to_dataset = options.to == "dataset"
    figures = _to_dataset(options, show) if to_dataset else _to_records(options, show)
    seconds = time.perf_counter() - started
    speed = {"seconds": seconds, "rows_per_second": figures["rows"] / seconds}
    show.result(f"Converted {options.out}", {"out": str(options.out), "kind": options.to, **figures, **speed})


def _check(options: ConvertOptions) -> None:
    if options.to not in (*_KINDS, "dataset"):
        raise ConfigError(f"--to: got {options.to!r}, expected one of {', '.join((*_KINDS, 'dataset'))}")
    is_dataset = options.to == "dataset"
    for name, is_given, is_wanted in (
        ("--key-bytes", options.key_bytes is not None, not is_dataset),
        ("--no-checksum", options.no_checksum, options.to == "norm"),
        ("--keysets", options.keysets, not is_dataset),
        ("--format", options.storage is not None, is_dataset),
    ):
        if is_given and not is_wanted:
            raise ConfigError(f"{name}: has no meaning with --to {options.to}")


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
