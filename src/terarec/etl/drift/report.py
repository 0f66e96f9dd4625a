"""The drift report as a page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from terarec.etl.drift.compare import ColumnDrift, DriftReport
from terarec.etl.drift.summary import DataSummary
from terarec.io import check_new_file, write_bytes, write_versioned_json
from terarec.reports.numbers import number_text, percent_text
from terarec.reports.page import Badge, Grid, Page, Plot, Row, Tile, render
from terarec.reports.plots import BLUE, INK, ORANGE, new_axes, plot_style, svg_element
from terarec.spec.quoting import shortened

MAX_PLOTS = 24
"""Columns that are drawn, the most moved ones; a plot is about 20 KB of the page."""
NOTABLE, LARGE = 0.1, 0.25
"""Stability indices from which a column is marked; the rule of thumb in docs/drift.md."""
_LONGEST_NAME, _LONGEST_SIDE = 18, 24


def write_drift_report(report: DriftReport, path: Path, *, replace: bool = False) -> tuple[Path, Path]:
    """Write the page to `path` and the figures next to it, with the ending ``.json``.

    Args:
        report: Report.
        path: Path of the page.
        replace: Whether existing files are replaced.

    Returns:
        Both paths.

    Raises:
        ConfigError: One of both exists.
        MissingDependencyError: Matplotlib or Jinja2 is not installed.
        StorageError: The disk is full.
    """
    figures = path.with_suffix(".json")
    for file in (path, figures):
        check_new_file(file, replace=replace)
    write_bytes(path, render(_page(report)).encode(), replace=replace)
    write_versioned_json(figures, "terarec.drift", 1, _content(report), replace=replace)
    return path, figures


def _page(report: DriftReport) -> Page:
    moved = sorted(report.columns, key=lambda column: -column.stability_index)
    with plot_style():
        plots = [_plot(report, number, column) for number, column in enumerate(moved[:MAX_PLOTS])]
    return Page(
        title=f"Drift of {report.current.name} from {report.reference.name}",
        subtitle=_subtitle(report),
        rows=(
            Row(width="narrow", cards=_tiles(moved)),
            Row(width="wide", cards=[_split_grid(report), _column_grid(moved)]),
            Row(width="medium", cards=plots),
        ),
    )


def _subtitle(report: DriftReport) -> str:
    lacking = [
        f"only in {side}: {', '.join(names)}"
        for side, names in (
            (report.reference.name, report.only_in_reference),
            (report.current.name, report.only_in_current),
        )
        if names
    ]
    rows = f"{report.current.rows:,} rows compared with {report.reference.rows:,}"
    return "; ".join([rows, *lacking])


def _tiles(moved: Sequence[ColumnDrift]) -> list[Tile]:
    large = sum(column.stability_index > LARGE for column in moved)
    newest = max(moved, key=lambda column: column.new)
    rarest = max(moved, key=lambda column: column.rare[1] - column.rare[0])
    gone = max(moved, key=lambda column: column.missing[1] - column.missing[0])
    return [
        Tile(name="columns of large drift", figure=f"{large} of {len(moved)}", remark=f"PSI above {LARGE}"),
        Tile(name="most moved", figure=f"{moved[0].stability_index:.3f}", remark=f"PSI of {moved[0].name}"),
        Tile(name="most new values", figure=percent_text(newest.new), remark=f"of {newest.name}"),
        Tile(name="more rare or unseen", figure=_points(rarest.rare), remark=f"percentage points, {rarest.name}"),
        Tile(name="more missing", figure=_points(gone.missing), remark=f"percentage points, {gone.name}"),
    ]


def _split_grid(report: DriftReport) -> Grid:
    names = dict.fromkeys((*report.reference.splits, *report.current.splits))
    rows = [
        (side.name, *(f"{side.splits[name]:,}" if name in side.splits else "-" for name in names), f"{side.rows:,}")
        for side in (report.reference, report.current)
    ]
    return Grid(title="Rows", header=("", *names, "compared"), rows=rows)


def _column_grid(moved: Sequence[ColumnDrift]) -> Grid:
    header = ("column", "kind", "PSI", "JS distance", "missing", "rare or unseen", "new values", "mean")
    rows = [
        (
            column.name,
            column.kind,
            _badge(column, ""),
            f"{column.distance:.3f}",
            _change(*map(percent_text, column.missing)),
            _change(*map(percent_text, column.rare)) if column.kind == "category" else "",
            percent_text(column.new) if column.kind == "category" else "",
            "" if column.means is None else _change(*map(number_text, column.means)),
        )
        for column in moved
    ]
    return Grid(title="Columns, the most moved first", header=header, rows=rows)


def _badge(column: ColumnDrift, words: str) -> Badge:
    index = column.stability_index
    return Badge(text=f"{words}{index:.3f}", level="large" if index > LARGE else "notable" if index >= NOTABLE else "")


def _points(shares: tuple[float, float]) -> str:
    return f"{100.0 * (shares[1] - shares[0]):+.2f}"


def _change(before: str, after: str) -> str:
    return f"{before} \N{RIGHTWARDS ARROW} {after}"


def _plot(report: DriftReport, number: int, column: ColumnDrift) -> Plot:
    """Return the share of every bin on both sides."""
    bins = column.bins
    used = np.flatnonzero((bins.reference > 0) | (bins.current > 0))
    figure, axes = new_axes(0.75 + 0.29 * len(used))
    places = np.arange(len(used))
    for counts, side, color, shift in (
        (bins.reference, report.reference.name, BLUE, -0.2),
        (bins.current, report.current.name, ORANGE, 0.2),
    ):
        shares = 100.0 * counts[used] / max(int(counts.sum()), 1)
        axes.barh(places + shift, shares, height=0.38, color=color, label=_short_side(side))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_yticks(places, [_short(bins.names[place]) for place in used])
    axes.set_ylim(len(used) - 0.4, -0.6)
    axes.set_xlabel("% of values")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    return Plot(title=column.name, svg=svg_element(figure, f"p{number}"), badge=_badge(column, "PSI "))


def _short_side(name: str) -> str:
    """Return the end of a name, where data sets of one name in several directories differ by their splits."""
    return _short(name if len(name) <= _LONGEST_SIDE else "..." + name[3 - _LONGEST_SIDE :], _LONGEST_SIDE)


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    plain = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)
    return shortened(plain, longest).replace("$", r"\$")  # matplotlib reads formulas between dollars


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
