"""The planted model: from a row's integers and categories to the probability that it was clicked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.data.synthetic.columns import INTEGERS, MISSING_CATEGORY

# One epoch over a few hundred thousand rows must come close to the best AUC, so the signal sits where it can be learnt:
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
"""How the variance of the logit is shared out among the three kinds of terms."""
LOGIT_DEVIATION = 1.7
"""Standard deviation of the logit; gives a best AUC of about 0.84."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalShape:
    """What a click model is made of.

    Attributes:
        medians: of each integer column, which its curve is scaled by.
        crossed: pairs of categorical columns, by position, whose latent factors interact; a pair is only worth
            something if both have frequent values.
        positive_share: share of the rows that are positive.
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
    """A logit that is a sum of effects of frequent values, of pairs of them, and of curves over the integers.

    In every table the last entry is the missing value's and the last but one that of all rarer values.

    Attributes:
        waves: float32[I, 3], amplitude, frequency and phase of a sine over ln(1 + x), a missing x being 0.
        effects: per categorical column float32[H + 2].
        crosses: per pair of columns (first, second, float32[H + 2, H + 2]).
        bias: added to the logit.
    """

    waves: NDArray[np.float32]
    effects: tuple[NDArray[np.float32], ...]
    crosses: tuple[tuple[int, int, NDArray[np.float32]], ...]
    bias: float

    def probabilities(self, integers: NDArray[np.int32], categories: NDArray[np.int64]) -> NDArray[np.float32]:
        """P(click) float32[n] of rows with `integers` int32[I, n] and ranks `categories` int64[C, n]."""
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
        generator: source of the model's numbers.
        rows: rows of the log; decides which values are frequent enough to matter.
        num_values: per categorical column, its number of values.
        pilot: integers int32[I, p] and ranks int64[C, p] of rows like those of the log, on which the terms are
            scaled and the bias is chosen.
        shape: which terms, of I integer and C categorical columns.
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
    effects[-2] = 0.0
    return effects.astype(np.float32)


def _draw_factors(generator: np.random.Generator) -> NDArray[np.float32]:
    factors = generator.standard_normal((_CROSSED_VALUES + 2, _FACTORS))
    factors[-2] = 0.0
    return factors.astype(np.float32)


def _calibrate(
    model: ClickModel, integers: NDArray[np.int32], categories: NDArray[np.int64], positive_share: float
) -> ClickModel:
    """Give each kind of terms its share of the variance, and find the bias that makes `positive_share` positive."""
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
    """What to add to `logits` for a mean probability of `positive_share`."""
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
        total += table[np.minimum(ranks, len(table) - 2)]
    return total


def _cross_terms(model: ClickModel, categories: NDArray[np.int64]) -> NDArray[np.float32]:
    total = np.zeros(categories.shape[1], dtype=np.float32)
    for first, second, table in model.crosses:
        rows, columns = (np.minimum(categories[column], _CROSSED_VALUES) for column in (first, second))
        total += table[rows, columns]
    return total


assert MISSING_CATEGORY == -1, "the tables' last entry is reached by index -1"
