"""Column by column, how far current data are from a reference. Figures are described in docs/drift.md."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.drift.summary import CategorySummary, DataSummary, NumberSummary
from terarec.reports.numbers import number_text

SMOOTHING = 0.5
"""Added to the count of every bin, so that an empty one has a finite logarithm (Jeffreys' prior)."""


def stability_index(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """Return the population stability index of counts in k bins, int64[k]; 0 where either holds nothing."""
    if not reference.sum() or not current.sum():
        return 0.0
    expected, actual = reference + SMOOTHING, current + SMOOTHING
    expected, actual = expected / expected.sum(), actual / actual.sum()
    return float(((actual - expected) * np.log(actual / expected)).sum())


def jensen_shannon_distance(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """Return the square root of the Jensen-Shannon divergence in bits: 0 for equal shares, 1 for disjoint ones."""
    if not reference.sum() or not current.sum():
        return 0.0
    shares = reference / reference.sum(), current / current.sum()
    middle = (shares[0] + shares[1]) / 2.0
    divergence = sum(_divergence(share, middle) for share in shares) / 2.0
    return float(np.sqrt(max(divergence, 0.0)))


def _divergence(share: NDArray[np.float64], middle: NDArray[np.float64]) -> float:
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
class ColumnDrift:
    """Drift of one column.

    Attributes:
        name: Name of the column.
        kind: "number" for labels and dense columns, or "category".
        missing: Shares of missing values, reference and current.
        rare: Shares in the ids of rare and unseen values, reference and current; 0 for numbers.
        new: Share of the current values that the reference does not hold; 0 for numbers.
        means: Means of numbers, reference and current; None for categories.
        bins: Bins that the distances compare.
    """

    name: str
    kind: Literal["number", "category"]
    missing: tuple[float, float]
    rare: tuple[float, float] = (0.0, 0.0)
    new: float = 0.0
    means: tuple[float, float] | None = None
    bins: Bins

    @property
    def stability_index(self) -> float:
        """The population stability index, see `measures`."""
        return stability_index(self.bins.reference, self.bins.current)

    @property
    def distance(self) -> float:
        """Jensen-Shannon's distance, see `measures`."""
        return jensen_shannon_distance(self.bins.reference, self.bins.current)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """Drift of current data from a reference: columns in the order of the reference.

    Attributes:
        reference: Data before.
        current: Data to compare with it.
        columns: Columns that both have.
        only_in_reference: Columns that the current data lack.
        only_in_current: Columns that the reference lacks.
    """

    reference: DataSummary
    current: DataSummary
    columns: tuple[ColumnDrift, ...]
    only_in_reference: tuple[str, ...]
    only_in_current: tuple[str, ...]


def compare(reference: DataSummary, current: DataSummary) -> DriftReport:
    """Compare the columns that both have under one name and of one kind.

    Raises:
        ConfigError: There is none.
    """
    if reference.name == current.name:
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
        missing=(_share(reference.missing, reference.total), _share(current.missing, current.total)),
        means=(_mean(reference), _mean(current)),
        bins=bins,
    )


def _interval_names(boundaries: Sequence[float]) -> list[str]:
    if not boundaries:
        return ["all numbers"]
    edges = [number_text(bound) for bound in boundaries]
    return [f"< {edges[0]}", *(f"{low} to {high}" for low, high in itertools.pairwise(edges)), f">= {edges[-1]}"]


def _interval_counts(summary: NumberSummary, boundaries: Sequence[float]) -> NDArray[np.int64]:
    """Counts of missing numbers and in each interval; a sample's are raised to those of all numbers."""
    numbers = summary.sample.numbers
    counts = np.bincount(np.searchsorted(boundaries, numbers, side="right"), minlength=len(boundaries) + 1)
    scale = (summary.total - summary.missing) / len(numbers) if len(numbers) else 1.0
    return np.concatenate([[summary.missing], np.rint(counts * scale).astype(np.int64)])


def _mean(summary: NumberSummary) -> float:
    return float(summary.sample.numbers.mean()) if len(summary.sample.numbers) else 0.0


def _categories(name: str, reference: CategorySummary, current: CategorySummary) -> ColumnDrift:
    places = pc.index_in(current.values, value_set=reference.values)
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
        missing=(_share(reference.missing, reference.total), _share(current.missing, current.total)),
        rare=(_share(reference.rare, reference.total), _share(current.rare, current.total)),
        new=_share(new, current.total),
        bins=bins,
    )


def _value_counts(missing: int, rare: int, counts: NDArray[np.int64], new: int, shown: int) -> NDArray[np.int64]:
    return np.concatenate([[missing, rare], counts[:shown], [counts[shown:].sum(), new]]).astype(np.int64)


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0
