"""What the commands that prepare data share: how the work is done, and what is shown of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import BAD_INPUT_POLICIES, STORAGES, FieldError, PrepareOptions, SplitByFraction

if TYPE_CHECKING:
    from terarec.etl.engine import PrepareReport, Progress
    from terarec.etl.workflow import Workflow
    from terarec.spec import Split

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """What ``terarec prepare`` takes, whatever the data."""

    out: Annotated[Path, typer.Option(help="Directory of the data set to make.")]
    engine: Annotated[str, typer.Option(metavar="local|spark", help="What does the work.")] = "local"
    spark_master: Annotated[
        str | None, typer.Option("--master", metavar="URL", help="Spark's master, such as local[2].")
    ] = None
    spark_conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; repeatable.")
    ] = None
    bad_input: Annotated[
        str, typer.Option(metavar="|".join(BAD_INPUT_POLICIES), help="What to do with what cannot be read.")
    ] = "raise"
    storage: Annotated[str, typer.Option("--format", metavar="|".join(STORAGES), help="Format of the files.")] = (
        "parquet"
    )
    rows_per_shard: Annotated[int, typer.Option(min=1, help="Most rows of a file.")] = 1 << 21
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the train split across its files.")] = False
    seed: Annotated[int, typer.Option(min=0, help="Of the shuffle.")] = 0
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that parse and encode.")] = None
    memory: Annotated[
        float | None,
        typer.Option(min=0.0625, metavar="GIB", help="Memory for counting and sorting; half of what is free."),
    ] = None
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what an interrupted run left.")] = False


def prepare(
    workflow: Workflow,
    sources: Sequence[str],
    options: PreparationOptions,
    show: Show,
    tables: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Prepare `sources` by `workflow`, whose side tables are `tables`, and show the report."""
    from terarec.etl import prepare as prepare_data

    asked = PrepareOptions(
        engine=options.engine,  # type: ignore[arg-type]  # the options check the word
        bad_input=options.bad_input,  # type: ignore[arg-type]
        storage=options.storage,  # type: ignore[arg-type]
        rows_per_shard=options.rows_per_shard,
        shuffle=options.shuffle,
        seed=options.seed,
        threads=options.threads,
        memory_bytes=None if options.memory is None else int(options.memory * _GIB),
        restart=options.restart,
        tables=tables or {},
        spark_master=options.spark_master,
        spark_conf=_settings(options.spark_conf or ()),
    )
    with show.progress("preparing", "MiB") as advance:

        def tell(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s {progress.bytes_per_second / 2**20:,.0f} MiB/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, words=progress.phase, rate=rate)

        report = prepare_data(workflow, sources, options.out, asked, tell)
    _show(report, options.out, show)


def last_rows(fraction: float) -> Split | None:
    """The split that ``--valid-fraction`` asks for.

    Raises:
        FieldError: no share from 0 to below 1.
    """
    if not 0 <= fraction < 1:
        raise FieldError("", "valid_fraction", f"got {fraction}, expected a number from 0 to below 1")
    return SplitByFraction(valid=fraction) if fraction else None


def pairs(option: str, texts: Sequence[str]) -> dict[str, list[str]]:
    """``NAME=VALUE`` -> name -> its values.

    Raises:
        ConfigError: a text of another form.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign or not value:
            raise ConfigError(f"{option}: got {text!r}, expected NAME=VALUE")
        found.setdefault(name, []).append(value)
    return found


def _settings(texts: Sequence[str]) -> dict[str, str]:
    found = pairs("--conf", texts)
    for name, values in found.items():
        if len(values) > 1:
            raise ConfigError(f"--conf: got {name!r} {len(values)} times, expected it once")
    return {name: value for name, (value,) in found.items()}


def _show(report: PrepareReport, out: Path, show: Show) -> None:
    figures: dict[str, Any] = {"out": str(out), **dataclasses.asdict(report)}
    show.figures(f"Prepared {out}", figures)
    show.table("Splits", [{"split": split, "rows": rows} for split, rows in report.splits.items()])
    show.table("Columns", figures["columns"])
    show.table("Read", figures["inputs"])
    show.table("Tables that would follow (float32)", figures["tables"])
    show.table("Phases", figures["phases"])
    show.table("Bad input", [{"kind": kind, "count": count} for kind, count in report.bad_input.counts.items()])
    for line in (*report.bad_input.first, *(f"counted through the disk: {name}" for name in report.spilled)):
        show.line(line)
    show.json(figures)
