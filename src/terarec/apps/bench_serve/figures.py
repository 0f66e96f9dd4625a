# SPDX-License-Identifier: Apache-2.0
"""Figures of a load: throughput, percentiles of the latency, the server's own account; as a table, file and plot."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from terarec.apps.bench_serve.load import Measured
from terarec.errors import FormatError
from terarec.formats.table_file import table_file
from terarec.io.files import atomic_file
from terarec.reports.page import BLUE, GREEN, OCHRE, ORANGE, PURPLE, new_axes, plot_style
from terarec.spec.checks import FieldError

PERCENTILES = (50.0, 95.0, 99.0, 99.9)


class ServerTimes(NamedTuple):
    """Counters of a server, of all requests since it began.

    Attributes:
        requests: Requests that succeeded.
        records: Records that were scored.
        batches: Batches that were scored.
        queue_ns, compute_input_ns, compute_infer_ns, compute_output_ns: Nanoseconds that requests spent in each stage.
    """

    requests: int
    records: int
    batches: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    @classmethod
    def of(cls, statistics: Iterable[Mapping[str, Any]], model: str) -> ServerTimes:
        """Add up the statistics of a model and, where it is an ensemble, of its stages.

        Args:
            statistics: Objects of Triton's ``model_stats``.
            model: Name of the model whose requests are counted.
        """
        requests = records = batches = 0
        times = [0, 0, 0, 0]
        try:
            for entry in statistics:
                stages = entry["inference_stats"]
                if entry["name"] == model:
                    requests += _number(stages["success"], "count")
                    records += _number(entry, "inference_count")
                    batches += _number(entry, "execution_count")
                for place, stage in enumerate(("queue", "compute_input", "compute_infer", "compute_output")):
                    times[place] += _number(stages[stage], "ns")
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("statistics", f"expected those of Triton ({type(error).__name__}: {error})") from None
        return cls(requests, records, batches, *times)

    def since(self, before: ServerTimes) -> ServerTimes:
        """Return what was counted since `before`."""
        return ServerTimes(*(now - then for now, then in zip(self, before, strict=True)))


def _number(fields: Mapping[str, Any], name: str) -> int:
    # Fields that are 0 may be absent, and 64-bit integers may be texts, where the JSON was made from protobuf.
    return int(fields.get(name, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFigures:
    """One measurement.

    Attributes:
        protocol: "http", "json" or "grpc".
        records: Records of a request.
        clients: Clients of a closed loop; None in an open one.
        rate: Requests a second of an open loop; None in a closed one.
        requests: Requests that were answered.
        errors: Requests that failed.
        requests_per_second, records_per_second: Throughput: what was answered until the load ended, by its duration.
        mean_ms, p50_ms, p95_ms, p99_ms, p99_9_ms, max_ms: Latency, in milliseconds.
        server_requests: Requests that the server has counted meanwhile; None where it has no statistics. More than
            `requests` and `errors` if there are other clients.
        queue_ms, compute_input_ms, compute_infer_ms, compute_output_ms: Mean time of a request in the server's stages,
            in milliseconds: waiting for a batch, its workflow, its scores, the answer.
        network_ms: The rest of the mean latency: transport, its encoding and decoding, and the client.
        batch_records: Mean number of records that the server scored at once.
        late_p99_ms: 99th percentile of how late requests of an open loop were sent; None in a closed one.
        client_busy_share: Share of the processes' time in which they used a processor. Near 1 the client is the limit.
    """

    protocol: str
    records: int
    clients: int | None
    rate: float | None
    requests: int
    errors: int
    requests_per_second: float
    records_per_second: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float
    server_requests: int | None
    queue_ms: float | None
    compute_input_ms: float | None
    compute_infer_ms: float | None
    compute_output_ms: float | None
    network_ms: float | None
    batch_records: float | None
    late_p99_ms: float | None
    client_busy_share: float

    @classmethod
    def of(
        cls,
        measured: Measured,
        server: ServerTimes | None,
        *,
        protocol: str,
        records: int,
        clients: int | None,
        rate: float | None,
        seconds: float,
        processes: int,
    ) -> LoadFigures:
        """Compute the figures."""
        latencies = np.frombuffer(measured.latencies, np.int64) / 1e6
        # Answers after the end belong to the latencies, not to the rate: an overloaded server is not faster for them.
        answered = int(np.count_nonzero(np.frombuffer(measured.ends, np.int64) <= seconds * 1e9))
        shown = latencies if len(latencies) else np.array([np.nan])
        percentiles = np.percentile(shown, PERCENTILES)
        mean = float(shown.mean())
        lateness = np.frombuffer(measured.lateness, np.int64) / 1e6
        stages: list[float | None] = [None] * 4
        if server is not None and server.requests > 0:
            stages = [spent / server.requests / 1e6 for spent in server[3:]]
        known = [stage for stage in stages if stage is not None]
        return cls(
            protocol=protocol,
            records=records,
            clients=clients,
            rate=rate,
            requests=len(latencies),
            errors=measured.errors.total(),
            requests_per_second=answered / seconds,
            records_per_second=answered * records / seconds,
            mean_ms=mean,
            p50_ms=float(percentiles[0]),
            p95_ms=float(percentiles[1]),
            p99_ms=float(percentiles[2]),
            p99_9_ms=float(percentiles[3]),
            max_ms=float(shown.max()),
            server_requests=None if server is None else server.requests,
            queue_ms=stages[0],
            compute_input_ms=stages[1],
            compute_infer_ms=stages[2],
            compute_output_ms=stages[3],
            network_ms=mean - sum(known) if known else None,
            batch_records=None if server is None or not server.batches else server.records / server.batches,
            late_p99_ms=float(np.percentile(lateness, 99)) if len(lateness) else None,
            client_busy_share=measured.cpu_seconds / measured.seconds / processes if measured.seconds else 0.0,
        )


PLOT_SUFFIXES = (".svg", ".png", ".pdf")

_SHOWN = {
    "protocol": "protocol",
    "records": "records",
    "clients": "clients",
    "rate": "rate",
    "errors": "errors",
    "requests_per_second": "requests/s",
    "records_per_second": "records/s",
    "p50_ms": "p50",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "p99_9_ms": "p99.9",
    "queue_ms": "queue",
    "compute_input_ms": "workflow",
    "compute_infer_ms": "infer",
    "compute_output_ms": "output",
    "network_ms": "network",
    "batch_records": "batch",
}
"""Figure -> the head of its column."""


def table_rows(figures: Sequence[LoadFigures]) -> list[Mapping[str, object]]:
    """Return the rows of a table for people; times are in milliseconds."""
    rows = [dataclasses.asdict(one) for one in figures]
    return [{head: _rounded(name, row[name]) for name, head in _SHOWN.items()} for row in rows]


def _rounded(name: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if name.endswith("_ms"):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_rows(path: Path, figures: Sequence[LoadFigures], *, replace: bool = False) -> None:
    """Write a row for each measurement with all its figures.

    Args:
        path: Path of the file; its suffix selects the format.
        figures: The measurements.
        replace: Whether an existing file is replaced.
    """
    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
    schema = pa.schema(
        [(item.name, kinds[str(item.type).removesuffix(" | None")]) for item in dataclasses.fields(LoadFigures)]
    )
    with table_file(path, schema, replace=replace) as file:
        file.write_table(pa.Table.from_pylist([dataclasses.asdict(one) for one in figures], schema))


def check_plot(path: Path) -> None:
    """Raise `ConfigError` unless a plot can be written in the format of the name's suffix."""
    if path.suffix not in PLOT_SUFFIXES:
        raise FieldError("", "plot", f"got {path}, expected a name that ends in {', '.join(PLOT_SUFFIXES)}")


def write_plot(path: Path, figures: Sequence[LoadFigures], *, title: str = "", replace: bool = False) -> None:
    """Draw latency against throughput: a curve for each protocol and size, its median and its 99th percentile.

    Args:
        path: Path of the file; its suffix selects the format.
        figures: The measurements.
        title: Words above the curves.
        replace: Whether an existing file is replaced.

    Raises:
        ConfigError: Another suffix, or a file that may not be replaced.
        MissingDependencyError: Matplotlib is not installed.
    """
    check_plot(path)
    curves: dict[tuple[str, int], list[LoadFigures]] = {}
    for one in figures:
        if one.requests:
            curves.setdefault((one.protocol, one.records), []).append(one)
    with plot_style():
        from matplotlib.ticker import EngFormatter, FuncFormatter

        figure, axes = new_axes(3.8)
        for (label, points), color in zip(
            curves.items(), itertools.cycle((BLUE, ORANGE, GREEN, PURPLE, OCHRE)), strict=False
        ):
            throughput = [point.records_per_second for point in points]
            name = f"{label[0]}, {label[1]:,} record{'s' if label[1] > 1 else ''}"
            median = [point.p50_ms for point in points]
            axes.plot(throughput, median, color=color, marker="o", markersize=3.5, label=f"{name}: p50")
            tail = [point.p99_ms for point in points]
            axes.plot(throughput, tail, color=color, marker="o", markersize=2.5, linestyle=":", label="p99")
        axes.set_xlabel("records per second")
        axes.set_ylabel("latency in ms")
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda _value, _: ""))
        if title:
            axes.set_title(title, loc="left")
        if curves:
            axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.16), ncols=2, fontsize=7)
        with atomic_file(path, replace=replace) as partial:
            # On white: the file is shown by itself, and not on a page that has a background.
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(
                partial, format=path.suffix[1:], metadata=metadata, facecolor="white", bbox_inches="tight", dpi=160
            )
