"""The drift report as a page and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terarec.etl.drift.compare import ColumnDrift, DriftReport
from terarec.etl.drift.page import render
from terarec.etl.drift.plots import draw_bins
from terarec.etl.drift.summary import DataSummary
from terarec.io import check_new_file, write_bytes, write_versioned_json

MAX_PLOTS = 24
"""Columns that are drawn, the most moved ones; a plot is about 20 KB of the page."""


def write_drift_report(report: DriftReport, path: Path, *, replace: bool = False) -> tuple[Path, Path]:
    """Write the page to `path` and the figures beside it, with the ending ``.json``.

    Args:
        report: what is told.
        path: of the page.
        replace: whether files that are there are replaced.

    Returns:
        Both paths.

    Raises:
        ConfigError: one of both is there.
        MissingDependencyError: matplotlib is not installed.
        StorageError: the disk is full.
    """
    figures = path.with_suffix(".json")
    for file in (path, figures):
        check_new_file(file, replace=replace)
    moved = sorted(report.columns, key=lambda column: -column.stability_index)
    plots = draw_bins(moved[:MAX_PLOTS], report.reference.name, report.current.name)
    write_bytes(path, render(report, moved, plots).encode(), replace=replace)
    write_versioned_json(figures, "terarec.drift", 1, _content(report), replace=replace)
    return path, figures


def _content(report: DriftReport) -> dict[str, Any]:
    return {
        "reference": _side(report.reference),
        "current": _side(report.current),
        "columns": [_column(column) for column in report.columns],
        "only_in_reference": report.only_in_reference,
        "only_in_current": report.only_in_current,
    }


def _side(summary: DataSummary) -> dict[str, Any]:
    return {"name": summary.name, "rows": summary.rows, "splits": dict(summary.splits)}


def _column(column: ColumnDrift) -> dict[str, Any]:
    bins = zip(column.bins.names, column.bins.reference.tolist(), column.bins.current.tolist(), strict=True)
    return {
        "name": column.name,
        "kind": column.kind,
        "stability_index": column.stability_index,
        "distance": column.distance,
        "missing": column.missing,
        "rare": column.rare,
        "new": column.new,
        "means": column.means,
        "bins": [{"name": name, "reference": own, "current": other} for name, own, other in bins],
    }
