# SPDX-License-Identifier: Apache-2.0
"""Loads to measure with: ``terarec bench serve``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from terarec.cli.options import SpecFields, comma_separated, repeatable, spec_option
from terarec.errors import ConfigError
from terarec.reports.text import Show, percent_text
from terarec.spec.bench_serving import LOAD_PROTOCOLS, LoadSpec

if TYPE_CHECKING:
    from terarec.apps.bench_serve.figures import LoadFigures

_BUSY = 0.9
"""Share of the time from which the client may be the limit."""

_LATE_MS = 1.0

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Options of ``terarec bench serve``."""

    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="URL of a server over HTTP, such as http://127.0.0.1:8000.")
    ] = None
    grpc: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the same server over gRPC.")] = None
    protocols: Annotated[
        list[str] | None,
        spec_option("protocols", LoadSpec, "protocols", summary=repeatable("Protocols: http, json, grpc.")),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Raw records to send: .parquet, .csv or .jsonl; without it, synthetic ones are sent."
        ),
    ] = None
    sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of records in a request.")] = "1"
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of clients, each of which sends its next request when it has an answer (closed loop).",
        ),
    ] = "1,2,4,8,16,32,64"
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="X,X,...",
            help="Requests a second at random moments, whether or not earlier ones are answered (open loop).",
        ),
    ] = None
    cores: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Cores for the sending processes, one after the other.")
    ] = None
    load: Annotated[
        LoadSpec,
        SpecFields(
            "model",
            "version",
            "seconds",
            "warmup_seconds",
            "processes",
            "timeout_seconds",
            "max_connections",
            "bodies",
            "list_length",
            "seed",
            header="headers",
        ),
    ]
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures: .csv, .parquet or .jsonl.")] = (
        None
    )
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw latency against throughput: .svg, .png or .pdf."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace existing files at --csv and --plot.")] = False


def bench_serve(options: BenchServeOptions, show: Show) -> None:
    """Run ``terarec bench serve``."""
    from terarec.apps.bench_serve.bench import ServingBench
    from terarec.apps.bench_serve.figures import check_plot, table_rows, write_plot, write_rows
    from terarec.apps.bench_serve.processes import LoadError
    from terarec.formats.table_file import check_suffix, read_table_file
    from terarec.io.files import check_new_file

    # All that can be wrong, before minutes of measurements.
    if options.csv is not None:
        check_suffix(options.csv)
        check_new_file(options.csv, replace=options.force)
    if options.plot is not None:
        check_plot(options.plot)
        check_new_file(options.plot, replace=options.force)
    spec = _spec(options)
    table = None if options.records is None else read_table_file(options.records)
    bench = ServingBench(spec, options.url, options.grpc, table)
    figures: list[LoadFigures] = []
    errors: Counter[str] = Counter()
    with show.progress("measuring", "loads") as advance:
        for cell in bench.run():
            if cell.figures is not None:
                figures.append(cell.figures)
                errors.update(cell.errors)
            advance(cell.place + (cell.figures is not None), cell.total)
    show.table(f"{options.load.model}: times in milliseconds", table_rows(figures))
    for reason, count in errors.items():
        show.line(f"{count} requests failed: {reason}")
    for note in notes(figures):
        show.line(note)
    if options.csv is not None:
        write_rows(options.csv, figures, replace=options.force)
    if options.plot is not None:
        write_plot(options.plot, figures, title=options.load.model, replace=options.force)
    show.json({"model": options.load.model, "figures": [dataclasses.asdict(one) for one in figures], "errors": errors})
    if not any(one.requests for one in figures):
        raise LoadError("load", "no request was answered, expected a server that answers in time")


def _spec(options: BenchServeOptions) -> LoadSpec:
    names = comma_separated(options.protocols)
    if not names:
        addresses = {"http": options.url, "grpc": options.grpc}
        names = tuple(name for name, address in addresses.items() if address is not None)
    if not names:
        raise ConfigError("URL", "got none, expected the URL of a server, or --grpc HOST:PORT")
    protocols = tuple(one for name in names for one in LOAD_PROTOCOLS if one == name)
    if len(protocols) < len(names):
        got = next(name for name in names if name not in LOAD_PROTOCOLS)
        raise ConfigError("--protocols", f"got {got!r}, expected some of {', '.join(LOAD_PROTOCOLS)}")
    return dataclasses.replace(
        options.load,
        protocols=protocols,
        sizes=_numbers("--sizes", options.sizes, int),
        concurrency=_numbers("--concurrency", options.concurrency, int),
        rates=_numbers("--rates", options.rates, float),
        cores=_numbers("--cores", options.cores, int),
    )


def _numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    words = comma_separated([text or ""])
    try:
        return tuple(map(kind, words))
    except ValueError:
        raise ConfigError(option, f"got {text!r}, expected numbers with commas between") from None


def notes(figures: Sequence[LoadFigures]) -> list[str]:
    """Return what a reader of the figures must know of the client."""
    lines = []
    busy = [one for one in figures if one.rate is None and one.client_busy_share > _BUSY]
    if busy:
        most = percent_text(max(one.client_busy_share for one in busy))
        lines.append(
            f"The client's processes were busy for up to {most} of the time: they may be the limit; see --processes."
        )
    late = [one.late_p99_ms for one in figures if one.late_p99_ms is not None and one.late_p99_ms > _LATE_MS]
    if late:
        lines.append(
            f"1 % of the requests were sent up to {max(late):.1f} ms late, which counts as latency; see --processes."
        )
    return lines
