"""``terarec prepare WORKFLOW``: any logs -> data set, by a workflow of one's own or a ready one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.show import Show
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.etl.engine import PrepareReport, Progress
    from terarec.etl.workflow import Workflow

_STORAGES = "parquet|raw|norm|hugectr_parquet|hugectr_raw|hugectr_raw_async"
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PrepareWorkflowOptions:
    """What ``terarec prepare WORKFLOW`` takes."""

    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="workflow.json, a fitted workflow's directory, or a ready name.")
    ]
    raw: Annotated[list[str], typer.Argument(metavar="RAW...", help="Files, directories, patterns or URLs, in order.")]
    out: Annotated[Path, typer.Option(help="Directory of the data set to make.")]
    engine: Annotated[str, typer.Option(metavar="local|spark", help="What does the work.")] = "local"
    spark_master: Annotated[
        str | None, typer.Option("--master", metavar="URL", help="Spark's master, such as local[2].")
    ] = None
    spark_conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; repeatable.")
    ] = None
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A file of a side table; repeatable.")
    ] = None
    bad_input: Annotated[
        str, typer.Option(metavar="raise|skip|missing", help="What to do with what cannot be read.")
    ] = "raise"
    storage: Annotated[str, typer.Option("--format", metavar=_STORAGES, help="Format of the files.")] = "parquet"
    rows_per_shard: Annotated[int, typer.Option(min=1, help="Most rows of a file.")] = 1 << 21
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the train split across its files.")] = False
    seed: Annotated[int, typer.Option(min=0, help="Of the shuffle.")] = 0
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that parse and encode.")] = None
    memory: Annotated[
        float | None,
        typer.Option(min=0.0625, metavar="GIB", help="Memory for counting and sorting; half of what is free."),
    ] = None
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what an interrupted run left.")] = False


def prepare_workflow(options: PrepareWorkflowOptions, show: Show) -> None:
    """Any logs by a workflow: your own, a fitted one, or a ready one such as avazu."""
    from terarec.etl.engine import PrepareOptions

    workflow = _find(options.workflow)
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
        tables={name: tuple(values) for name, values in _pairs("--table", options.table or ()).items()},
        spark_master=options.spark_master,
        spark_conf={name: values[-1] for name, values in _pairs("--conf", options.spark_conf or ()).items()},
    )
    with show.progress("preparing", "MiB") as advance:

        def tell(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s {progress.bytes_per_second / 2**20:,.0f} MiB/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, words=progress.phase, rate=rate)

        report = workflow.prepare(options.raw, options.out, options=asked, progress=tell)
    _show(report, options.out, show)


def _find(name: str) -> Workflow:
    """The workflow of a file, of a directory, or of a ready name."""
    from terarec.etl.ready import READY
    from terarec.etl.workflow import Workflow

    path = Path(name)
    if name in READY and not path.exists():
        return Workflow.of(READY[name]())
    if path.is_dir():
        return Workflow.load(path)
    if path.is_file():
        return Workflow.from_json(path)
    known = ", ".join(sorted({"criteo", "csv", *READY}))
    raise ConfigError(f"WORKFLOW: got {name}, expected a file, a directory, or one of {known}")


def _pairs(option: str, texts: Sequence[str]) -> dict[str, list[str]]:
    """``NAME=VALUE`` -> name -> its values."""
    pairs: dict[str, list[str]] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign or not value:
            raise ConfigError(f"{option}: got {text!r}, expected NAME=VALUE")
        pairs.setdefault(name, []).append(value)
    return pairs


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
