"""The 13 integer and 26 categorical columns of a Criteo-format log: how often missing, how spread, how many values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MISSING_INTEGER = np.iinfo(np.int32).min
"""Stands for a missing integer, as in the compiled formatter."""

MISSING_CATEGORY = -1
"""Stands for a missing category."""

KAGGLE_ROWS = 45_840_617
"""Rows of the Criteo Kaggle training file, for which the categories' numbers of values are given."""

_KEPT_VALUES = 1_000
"""Up to so many values a category keeps them all in a smaller log: the frequent ones do show up early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerColumn:
    """A count: log-logistic around `median` (tails grow with `spread`), from `low` to `high`."""

    missing: float
    median: float
    spread: float
    high: int
    low: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryColumn:
    """A category of `num_values` values whose probability falls as 1 / rank."""

    num_values: int
    missing: float = 0.0


# Shares of missing values, medians and ranges resemble those of the Kaggle file.
INTEGERS: tuple[IntegerColumn, ...] = (
    IntegerColumn(missing=0.45, median=1.5, spread=0.7, high=5_775),
    IntegerColumn(missing=0.0, median=6.0, spread=1.2, high=257_675, low=-3),
    IntegerColumn(missing=0.21, median=6.5, spread=0.8, high=65_535),
    IntegerColumn(missing=0.21, median=4.5, spread=0.5, high=969),
    IntegerColumn(missing=0.03, median=2_800.0, spread=0.9, high=23_159_456),
    IntegerColumn(missing=0.22, median=32.0, spread=0.8, high=431_037),
    IntegerColumn(missing=0.04, median=3.5, spread=0.9, high=56_311),
    IntegerColumn(missing=0.0005, median=8.0, spread=0.6, high=6_047),
    IntegerColumn(missing=0.04, median=38.0, spread=0.7, high=29_019),
    IntegerColumn(missing=0.45, median=0.8, spread=0.4, high=10),
    IntegerColumn(missing=0.04, median=1.8, spread=0.6, high=231),
    IntegerColumn(missing=0.76, median=0.6, spread=0.7, high=4_008),
    IntegerColumn(missing=0.21, median=4.5, spread=0.6, high=7_393),
)

CATEGORIES: tuple[CategoryColumn, ...] = (
    CategoryColumn(num_values=1_460),
    CategoryColumn(num_values=583),
    CategoryColumn(num_values=10_131_227, missing=0.034),
    CategoryColumn(num_values=2_202_608, missing=0.034),
    CategoryColumn(num_values=305),
    CategoryColumn(num_values=24, missing=0.12),
    CategoryColumn(num_values=12_517),
    CategoryColumn(num_values=633),
    CategoryColumn(num_values=3),
    CategoryColumn(num_values=93_145),
    CategoryColumn(num_values=5_683),
    CategoryColumn(num_values=8_351_593, missing=0.034),
    CategoryColumn(num_values=3_194),
    CategoryColumn(num_values=27),
    CategoryColumn(num_values=14_992),
    CategoryColumn(num_values=5_461_306, missing=0.034),
    CategoryColumn(num_values=10),
    CategoryColumn(num_values=5_652),
    CategoryColumn(num_values=2_173, missing=0.44),
    CategoryColumn(num_values=4, missing=0.44),
    CategoryColumn(num_values=7_046_547, missing=0.034),
    CategoryColumn(num_values=18, missing=0.76),
    CategoryColumn(num_values=15),
    CategoryColumn(num_values=286_181, missing=0.034),
    CategoryColumn(num_values=105, missing=0.44),
    CategoryColumn(num_values=142_572, missing=0.44),
)


def scaled_values(column: CategoryColumn, rows: int, full_rows: int = KAGGLE_ROWS) -> int:
    """How many values `column` has in a log of `rows` rows: in proportion to the public log's of `full_rows`."""
    scaled = round(column.num_values * rows / full_rows)
    return min(column.num_values, max(scaled, _KEPT_VALUES))


def draw_integers(column: IntegerColumn, uniforms: NDArray[np.float64]) -> NDArray[np.int32]:
    """Turn uniform numbers [n] into int32[n], `MISSING_INTEGER` where missing."""
    present = (uniforms - column.missing) / (1.0 - column.missing)
    odds = np.maximum(present, 0.0) / (1.0 - present)
    values = np.minimum(column.median * odds**column.spread + column.low, column.high)
    return np.where(uniforms < column.missing, MISSING_INTEGER, np.floor(values)).astype(np.int32)


def draw_categories(column: CategoryColumn, num_values: int, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Turn uniform numbers [n] into ranks int64[n], 0 the most frequent, `MISSING_CATEGORY` where missing.

    Rank r has a probability in proportion to ln((r + 2) / (r + 1)), nearly 1 / (r + 1.5): Zipf's law.
    """
    present = (uniforms - column.missing) / (1.0 - column.missing)
    ranks: NDArray[np.int64] = np.exp(present * np.log1p(num_values)).astype(np.int64) - 1
    np.minimum(ranks, num_values - 1, out=ranks)
    ranks[uniforms < column.missing] = MISSING_CATEGORY
    return ranks


def category_values(column_index: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The 32-bit values that a log holds for `ranks` of a column: a fixed bijection that looks random.

    The steps are those of MurmurHash3's finalizer, each of which can be undone.
    """
    mixed = ranks.astype(np.uint32)
    mixed += np.uint32((column_index + 1) * 0x9E3779B1 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    values = mixed.astype(np.int64)
    values[ranks == MISSING_CATEGORY] = MISSING_CATEGORY
    return values
