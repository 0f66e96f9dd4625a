# SPDX-License-Identifier: Apache-2.0
"""Figures of loads as a table for people, a file of rows, and a plot of latency against throughput."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from terarec.apps.bench_serve.figures import LoadFigures
from terarec.formats.table_file import table_file
from terarec.io.files import atomic_file
from terarec.reports.page import BLUE, GREEN, OCHRE, ORANGE, PURPLE, new_axes, plot_style
from terarec.spec.checks import FieldError

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

    Raises:
        ConfigError: Another suffix, or a file that may not be replaced.
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
