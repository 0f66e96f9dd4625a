# SPDX-License-Identifier: Apache-2.0
"""Drift of current data from a reference for each column, as figures and as a page. See docs/drift.md."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from terarec.apps.drift.summary import CategorySummary, DataSummary, NumberSummary
from terarec.errors import ConfigError
from terarec.io.files import check_new_file, write_bytes, write_versioned_json
from terarec.reports.page import (
    BLUE,
    INK,
    ORANGE,
    Badge,
    Grid,
    Page,
    Plot,
    Row,
    Tile,
    new_axes,
    plot_style,
    render,
    svg_element,
)
from terarec.reports.text import metric_text, number_text, percent_text
from terarec.spec.checks import shortened
from terarec.spec.codec import finite_data

SMOOTHING = 0.5
"""Added to the count of every bin, so that an empty one has a finite logarithm (Jeffreys' prior)."""


def stability_index(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """Return the population stability index of counts in k bins, int64[k]; NaN where either holds nothing."""
    if not reference.sum() or not current.sum():
        return math.nan
    expected, actual = reference + SMOOTHING, current + SMOOTHING
    expected, actual = expected / expected.sum(), actual / actual.sum()
    return float(((actual - expected) * np.log(actual / expected)).sum())


def largest_index(bins: Iterable[tuple[ArrayLike, ArrayLike]]) -> float:
    """Return the largest stability index of pairs of counts as `stability_index` takes; NaN where none has one."""
    # Lists that became empty hold no value that could drift.
    indices = [stability_index(np.asarray(reference), np.asarray(current)) for reference, current in bins]
    return max((index for index in indices if not math.isnan(index)), default=math.nan)


def jensen_shannon_distance(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """Return the square root of the Jensen-Shannon divergence in bits: 0 for equal shares, 1 for disjoint ones.

    It is NaN where either holds nothing.
    """
    if not reference.sum() or not current.sum():
        return math.nan
    shares = reference / reference.sum(), current / current.sum()
    middle = (shares[0] + shares[1]) / 2.0
    divergence = sum(_divergence(share, middle) for share in shares) / 2.0
    # Rounding may leave the divergence of equal shares just below 0.
    return float(np.sqrt(max(divergence, 0.0)))


def _divergence(share: NDArray[np.float64], middle: NDArray[np.float64]) -> float:
    # x log x goes to 0 with x.
    there = share > 0.0
    return float((share[there] * np.log2(share[there] / middle[there])).sum())


INTERVALS = 10
"""Bins of a number: the reference's deciles."""
NAMED_VALUES = 20
"""Bins of a category: the reference's most frequent values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Counts of the reference and of current data, int64[k] each, in k named bins."""

    names: tuple[str, ...]
    reference: NDArray[np.int64]
    current: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListDrift:
    """Drift of the lengths of lists.

    Attributes:
        empty: Shares of empty lists, reference and current.
        mean_lengths: Mean lengths, reference and current.
        bins: Lengths in bins: empty, and intervals of the reference's other lengths.
    """

    empty: tuple[float, float]
    mean_lengths: tuple[float, float]
    bins: Bins


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnDrift:
    """Drift of one column.

    Attributes:
        name: Name of the column.
        kind: "number" for labels and dense columns, or "category".
        missing: Shares of missing values, reference and current.
        rare: Shares in the ids of rare and unseen values, reference and current; 0 for numbers.
        new: Share of the current values that the reference does not hold; 0 for numbers.
        means: Means of numbers, reference and current, NaN where all are missing; None for categories.
        bins: Bins that the distances compare.
        lists: Lengths of the lists; None for one value a row.
    """

    name: str
    kind: Literal["number", "category"]
    missing: tuple[float, float]
    rare: tuple[float, float] = (0.0, 0.0)
    new: float = 0.0
    means: tuple[float, float] | None = None
    bins: Bins
    lists: ListDrift | None = None

    @property
    def stability_index(self) -> float:
        """The population stability index of the values, or that of the lengths of lists where it is larger."""
        return largest_index((bins.reference, bins.current) for bins in self._bins)

    @property
    def distance(self) -> float:
        """Jensen-Shannon's distance of the values, or that of the lengths of lists where it is larger."""
        distances = [jensen_shannon_distance(bins.reference, bins.current) for bins in self._bins]
        return max((distance for distance in distances if not math.isnan(distance)), default=math.nan)

    @property
    def _bins(self) -> list[Bins]:
        return [self.bins, *([] if self.lists is None else [self.lists.bins])]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """Drift of current data from a reference: columns in the order of the reference."""

    reference: DataSummary
    current: DataSummary
    columns: tuple[ColumnDrift, ...]
    only_in_reference: tuple[str, ...]
    only_in_current: tuple[str, ...]


def compare(reference: DataSummary, current: DataSummary) -> DriftReport:
    """Compare the columns that both have under one name and of one kind."""
    for side in (reference, current):
        # Nothing differs from nothing: every distance would be 0.
        if not side.rows:
            raise ConfigError(side.name, "has no rows to compare, expected some; another split may have them")
    if reference.name == current.name:
        # Every plot and table of the page names the sides.
        reference = dataclasses.replace(reference, name=f"{reference.name} (reference)")
        current = dataclasses.replace(current, name=f"{current.name} (current)")
    columns = [
        *(
            _numbers(name, own, current.numbers[name])
            for name, own in reference.numbers.items()
            if name in current.numbers
        ),
        *(
            _categories(name, own, current.categories[name])
            for name, own in reference.categories.items()
            if name in current.categories
        ),
    ]
    if not columns:
        raise ConfigError(f"{reference.name} and {current.name}", "have no column in common, expected at least one")
    names = {column.name for column in columns}
    return DriftReport(
        reference=reference,
        current=current,
        columns=tuple(columns),
        only_in_reference=tuple(name for name in (*reference.numbers, *reference.categories) if name not in names),
        only_in_current=tuple(name for name in (*current.numbers, *current.categories) if name not in names),
    )


def _numbers(name: str, reference: NumberSummary, current: NumberSummary) -> ColumnDrift:
    boundaries = reference.sample.boundaries(INTERVALS)
    bins = Bins(
        names=("missing", *_interval_names(boundaries)),
        reference=_interval_counts(reference, boundaries),
        current=_interval_counts(current, boundaries),
    )
    return ColumnDrift(
        name=name,
        kind="number",
        missing=(share(reference.missing, reference.total), share(current.missing, current.total)),
        means=(_mean(reference), _mean(current)),
        bins=bins,
    )


def _interval_names(boundaries: Sequence[float]) -> list[str]:
    if not boundaries:
        return ["all numbers"]
    edges = [number_text(bound) for bound in boundaries]
    return [f"< {edges[0]}", *(f"{low} to {high}" for low, high in itertools.pairwise(edges)), f">= {edges[-1]}"]


def _interval_counts(summary: NumberSummary, boundaries: Sequence[float]) -> NDArray[np.int64]:
    """Return the counts of missing numbers and in each interval; those of a sample are scaled up to all numbers."""
    numbers = summary.sample.numbers
    counts = np.bincount(np.searchsorted(boundaries, numbers, side="right"), minlength=len(boundaries) + 1)
    scale = (summary.total - summary.missing) / len(numbers) if len(numbers) else 1.0
    return np.concatenate([[summary.missing], np.rint(counts * scale).astype(np.int64)])


def _mean(summary: NumberSummary) -> float:
    return float(summary.sample.numbers.mean()) if len(summary.sample.numbers) else math.nan


def _categories(name: str, reference: CategorySummary, current: CategorySummary) -> ColumnDrift:
    places = pc.index_in(current.values, value_set=reference.values)
    # Values that the reference lacks have no place in it.
    is_new = places.is_null().to_numpy(zero_copy_only=False)
    matched = np.zeros(len(reference.values), dtype=np.int64)
    matched[places.drop_null().to_numpy()] = current.counts[~is_new]
    new = int(current.counts[is_new].sum())
    shown = min(NAMED_VALUES, len(reference.values))
    bins = Bins(
        names=(
            "missing",
            "rare or unseen",
            *reference.values.slice(0, shown).to_pylist(),
            "other values",
            "new values",
        ),
        reference=_value_counts(reference.missing, reference.rare, reference.counts, 0, shown),
        current=_value_counts(current.missing, current.rare, matched, new, shown),
    )
    return ColumnDrift(
        name=name,
        kind="category",
        missing=(share(reference.missing, reference.total), share(current.missing, current.total)),
        rare=(share(reference.rare, reference.total), share(current.rare, current.total)),
        new=share(new, current.total),
        bins=bins,
        lists=_lists(reference.lengths, current.lengths) if len(reference.lengths) and len(current.lengths) else None,
    )


def _lists(reference: NDArray[np.int64], current: NDArray[np.int64]) -> ListDrift:
    """Compare lengths by how many lists have each."""
    shares = np.cumsum(reference[1:]) / max(int(reference[1:].sum()), 1)
    # A bin begins at each decile of the lengths above 0.
    begins = np.unique([1 + int(np.searchsorted(shares, step / INTERVALS)) for step in range(INTERVALS)])
    begins = np.unique(np.append(begins[begins < len(reference)], 1))
    names = [
        f"{low}" if low + 1 == high else f"{low} to {high - 1}" for low, high in itertools.pairwise(begins.tolist())
    ]

    def counts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        places = np.searchsorted(begins, np.arange(len(lengths)), side="right")
        return np.bincount(places, lengths, len(begins) + 1).astype(np.int64)

    def mean(lengths: NDArray[np.int64]) -> float:
        return share(int((lengths * np.arange(len(lengths))).sum()), int(lengths.sum()))

    return ListDrift(
        empty=(share(int(reference[0]), int(reference.sum())), share(int(current[0]), int(current.sum()))),
        mean_lengths=(mean(reference), mean(current)),
        bins=Bins(names=("empty", *names, f"from {begins[-1]}"), reference=counts(reference), current=counts(current)),
    )


def _value_counts(missing: int, rare: int, counts: NDArray[np.int64], new: int, shown: int) -> NDArray[np.int64]:
    return np.concatenate([[missing, rare], counts[:shown], [counts[shown:].sum(), new]]).astype(np.int64)


def share(count: int, total: int) -> float:
    """Return the share of a count in a total; 0 of nothing."""
    return count / total if total else 0.0


MAX_PLOTS = 24
"""Columns that are drawn, the most moved ones; a plot is about 20 KB of the page."""
NOTABLE, LARGE = 0.1, 0.25
"""Stability indices from which a column is marked; the rule of thumb in docs/drift.md."""
_LONGEST_NAME, _LONGEST_SIDE = 18, 24


def write_drift_report(report: DriftReport, path: Path, *, replace: bool = False) -> tuple[Path, Path]:
    """Write the page to `path` and the figures next to it, with the ending ``.json``.

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
    write_versioned_json(figures, "terarec.drift", 1, finite_data(_content(report)), replace=replace)
    return path, figures


def _page(report: DriftReport) -> Page:
    # A column without values on a side, such as one of empty lists, has no distance and comes last.
    moved = sorted(report.columns, key=lambda column: -_order(column.stability_index))
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


def _order(index: float) -> float:
    return -math.inf if math.isnan(index) else index


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
        Tile(name="most moved", figure=metric_text(moved[0].stability_index, 3), remark=f"PSI of {moved[0].name}"),
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
    header = (
        "column",
        "kind",
        "PSI",
        "JS distance",
        "missing",
        "rare or unseen",
        "new values",
        "mean",
        "empty lists",
        "mean length",
    )
    rows = [
        (
            column.name,
            column.kind,
            _badge(column, ""),
            metric_text(column.distance, 3),
            _change(*map(percent_text, column.missing)),
            _change(*map(percent_text, column.rare)) if column.kind == "category" else "",
            percent_text(column.new) if column.kind == "category" else "",
            "" if column.means is None else _change(*map(_mean_text, column.means)),
            "" if column.lists is None else _change(*map(percent_text, column.lists.empty)),
            "" if column.lists is None else _change(*map(number_text, column.lists.mean_lengths)),
        )
        for column in moved
    ]
    return Grid(title="Columns, the most moved first", header=header, rows=rows)


def _mean_text(mean: float) -> str:
    return "-" if math.isnan(mean) else number_text(mean)


def _badge(column: ColumnDrift, words: str) -> Badge:
    index = column.stability_index
    return Badge(
        text=f"{words}{metric_text(index, 3)}",
        level="large" if index > LARGE else "notable" if index >= NOTABLE else "",
    )


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
    lists = column.lists
    return {
        "name": column.name,
        "kind": column.kind,
        "stability_index": column.stability_index,
        "distance": column.distance,
        "missing": column.missing,
        "rare": column.rare,
        "new": column.new,
        "means": column.means,
        "bins": _bins(column.bins),
        "lists": None
        if lists is None
        else {"empty": lists.empty, "mean_lengths": lists.mean_lengths, "bins": _bins(lists.bins)},
    }


def _bins(bins: Bins) -> list[dict[str, Any]]:
    counts = zip(bins.names, bins.reference.tolist(), bins.current.tolist(), strict=True)
    return [{"name": name, "reference": own, "current": other} for name, own, other in counts]
