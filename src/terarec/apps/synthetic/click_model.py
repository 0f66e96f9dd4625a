# SPDX-License-Identifier: Apache-2.0
"""The planted model: from a row's integers and categories to the probability that it was clicked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MISSING_INTEGER = np.iinfo(np.int32).min
"""Code of a missing integer, as in the compiled formatter."""

MISSING_CATEGORY = -1
"""Code of a missing category."""

KAGGLE_ROWS = 45_840_617
"""Rows of the Criteo Kaggle training file, for which the categories' numbers of values are given."""

_KEPT_VALUES = 1_000
"""Up to this many values, a category keeps all of them in a smaller log: the frequent ones occur early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerColumn:
    """Column of counts: log-logistic around `median` (tails grow with `spread`), from `low` to `high`."""

    missing: float
    median: float
    spread: float
    high: int
    low: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryColumn:
    """Column of `num_values` categories whose probability falls as 1 / rank."""

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
    """Scale the number of values of `column` from the public log of `full_rows` to a log of `rows` rows."""
    scaled = round(column.num_values * rows / full_rows)
    return min(column.num_values, max(scaled, _KEPT_VALUES))


def draw_integers(column: IntegerColumn, uniforms: NDArray[np.float64]) -> NDArray[np.int32]:
    """Convert uniform numbers [n] into int32[n], `MISSING_INTEGER` where missing."""
    present = (uniforms - column.missing) / (1.0 - column.missing)
    odds = np.maximum(present, 0.0) / (1.0 - present)
    values = np.minimum(column.median * odds**column.spread + column.low, column.high)
    return np.where(uniforms < column.missing, MISSING_INTEGER, np.floor(values)).astype(np.int32)


def draw_categories(column: CategoryColumn, num_values: int, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Convert uniform numbers [n] into ranks int64[n], 0 the most frequent, `MISSING_CATEGORY` where missing.

    Rank r has a probability in proportion to ln((r + 2) / (r + 1)), nearly 1 / (r + 1.5): Zipf's law.
    """
    present = (uniforms - column.missing) / (1.0 - column.missing)
    ranks: NDArray[np.int64] = np.exp(present * np.log1p(num_values)).astype(np.int64) - 1
    np.minimum(ranks, num_values - 1, out=ranks)
    ranks[uniforms < column.missing] = MISSING_CATEGORY
    return ranks


def category_values(column_index: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the 32-bit values that a log holds for `ranks` of a column: a fixed bijection that looks random.

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


# One epoch over a few hundred thousand rows must come close to the best AUC, so the signal is where a model can fit it:
# frequent values, gentle curves, few pairs. Measured with a DLRM (width 16, bottom 64-16, top 128-64, AdaGrad 0.05
# on tables, Adam on layers) on 540,000 rows: short of the best AUC by 0.014; with effects on every value that occurs
# 150 times, curves twice as wavy and pairs of 32 values each, by 0.026.
_FEWEST_OCCURRENCES = 150
"""A value has an effect if it is expected to occur this often."""
_MOST_VALUES = 32
"""Values of a column with an effect, at most."""
_CROSSED_VALUES = 8
_FACTORS = 4
_WAVES = (0.8, 1.8)
"""Range of the curves' frequencies, in radians between x = 0 and four times the median."""

_INTEGER_SHARE, _EFFECT_SHARE, _CROSS_SHARE = 0.30, 0.45, 0.25
"""Shares of the three kinds of terms in the variance of the logit."""
LOGIT_DEVIATION = 1.7
"""Standard deviation of the logit; gives a best AUC of about 0.84."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalShape:
    """Shape of a click model.

    Attributes:
        medians: Median of each integer column, which scales its curve.
        crossed: Pairs of categorical columns, by position, whose latent factors interact; a pair is only worth
            something if both have frequent values.
        positive_share: Share of the rows that are positive.
    """

    medians: tuple[float, ...]
    crossed: tuple[tuple[int, int], ...]
    positive_share: float


CRITEO = SignalShape(
    medians=tuple(column.median for column in INTEGERS),
    crossed=((5, 13), (5, 16), (8, 24), (13, 22), (16, 22), (8, 4), (1, 16), (4, 22)),
    positive_share=0.25,
)


@dataclass(frozen=True, slots=True)
class ClickModel:
    """Logit as a sum of effects of frequent values, of pairs of them, and of curves over the integers.

    In every table the last entry is the missing value's and the last but one that of all rarer values.

    Attributes:
        waves: float32[I, 3], amplitude, frequency and phase of a sine over ln(1 + x), a missing x being 0.
        effects: Effects of each categorical column: float32[H + 2].
        crosses: Pairs of columns with their effects: (first, second, float32[H + 2, H + 2]).
        bias: Bias of the logit.
    """

    waves: NDArray[np.float32]
    effects: tuple[NDArray[np.float32], ...]
    crosses: tuple[tuple[int, int, NDArray[np.float32]], ...]
    bias: float

    def probabilities(self, integers: NDArray[np.int32], categories: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return P(click) float32[n] of rows with `integers` int32[I, n] and ranks `categories` int64[C, n]."""
        logits = _integer_terms(self, integers) + _effect_terms(self, categories) + _cross_terms(self, categories)
        logits += np.float32(self.bias)
        probabilities: NDArray[np.float32] = np.float32(1.0) / (np.float32(1.0) + np.exp(-logits))
        return probabilities


def plant(
    generator: np.random.Generator,
    rows: int,
    num_values: tuple[int, ...],
    pilot: tuple[NDArray[np.int32], NDArray[np.int64]],
    shape: SignalShape = CRITEO,
) -> ClickModel:
    """Draw a click model for a log of `rows` rows.

    Args:
        generator: Source of the model's numbers.
        rows: Rows of the log; decides which values are frequent enough to matter.
        num_values: Number of values of each categorical column.
        pilot: Integers int32[I, p] and ranks int64[C, p] of rows like those of the log, on which the terms are
            scaled and the bias is chosen.
        shape: Terms of the model, of I integer and C categorical columns.
    """
    waves = np.stack(
        [
            generator.uniform(0.5, 1.0, len(shape.medians)),
            generator.uniform(*_WAVES, len(shape.medians)) / np.log1p(4.0 * np.array(shape.medians)),
            generator.uniform(0.0, 2.0 * np.pi, len(shape.medians)),
        ],
        axis=1,
    ).astype(np.float32)
    effects = tuple(_draw_effects(generator, rows, count) for count in num_values)
    factors = {column: _draw_factors(generator) for column in sorted({c for pair in shape.crossed for c in pair})}
    crosses = tuple((first, second, factors[first] @ factors[second].T) for first, second in shape.crossed)
    return _calibrate(ClickModel(waves, effects, crosses, 0.0), *pilot, shape.positive_share)


def _draw_effects(generator: np.random.Generator, rows: int, num_values: int) -> NDArray[np.float32]:
    frequent = int(rows / (_FEWEST_OCCURRENCES * np.log1p(num_values)))
    effects = generator.standard_normal(min(num_values, max(frequent, 1), _MOST_VALUES) + 2)
    # Rare values have no effect: a model could not fit it.
    effects[-2] = 0.0
    return effects.astype(np.float32)


def _draw_factors(generator: np.random.Generator) -> NDArray[np.float32]:
    factors = generator.standard_normal((_CROSSED_VALUES + 2, _FACTORS))
    factors[-2] = 0.0
    return factors.astype(np.float32)


def _calibrate(
    model: ClickModel, integers: NDArray[np.int32], categories: NDArray[np.int64], positive_share: float
) -> ClickModel:
    """Scale each type of term to its share of the variance, and fit the bias to `positive_share`."""
    logits = np.zeros(integers.shape[1])
    scales = []
    for share, terms in (
        (_INTEGER_SHARE, _integer_terms(model, integers)),
        (_EFFECT_SHARE, _effect_terms(model, categories)),
        (_CROSS_SHARE, _cross_terms(model, categories)),
    ):
        deviation = terms.std() or 1.0  # 0 without columns of a kind
        scales.append(np.float32(LOGIT_DEVIATION * np.sqrt(share) / deviation))
        logits += scales[-1] * terms
    return ClickModel(
        waves=model.waves * np.array([scales[0], 1.0, 1.0], dtype=np.float32),
        effects=tuple(table * scales[1] for table in model.effects),
        crosses=tuple((first, second, table * scales[2]) for first, second, table in model.crosses),
        bias=bias_for(logits, positive_share),
    )


def bias_for(logits: NDArray[np.floating], positive_share: float) -> float:
    """Return the bias that gives `logits` a mean probability of `positive_share`."""
    low, high = -50.0, 50.0
    for _ in range(40):  # halvings: the bias is then exact to float32
        bias = 0.5 * (low + high)
        if (1.0 / (1.0 + np.exp(-(logits + bias)))).mean() < positive_share:
            low = bias
        else:
            high = bias
    return bias


def _integer_terms(model: ClickModel, integers: NDArray[np.int32]) -> NDArray[np.float32]:
    total = np.zeros(integers.shape[1], dtype=np.float32)
    for values, (amplitude, frequency, phase) in zip(integers, model.waves, strict=True):
        total += amplitude * np.sin(frequency * np.log(np.maximum(values, 0).astype(np.float32) + 1.0) + phase)
    return total


def _effect_terms(model: ClickModel, categories: NDArray[np.int64]) -> NDArray[np.float32]:
    total = np.zeros(categories.shape[1], dtype=np.float32)
    for ranks, table in zip(categories, model.effects, strict=True):
        # A missing value is -1, which is the last entry of a table.
        total += table[np.minimum(ranks, len(table) - 2)]
    return total


def _cross_terms(model: ClickModel, categories: NDArray[np.int64]) -> NDArray[np.float32]:
    total = np.zeros(categories.shape[1], dtype=np.float32)
    for first, second, table in model.crosses:
        rows, columns = (np.minimum(categories[column], _CROSSED_VALUES) for column in (first, second))
        total += table[rows, columns]
    return total


assert MISSING_CATEGORY == -1, "the tables' last entry is reached by index -1"
