# SPDX-License-Identifier: Apache-2.0
"""The planted model has the positives and the spread that it is calibrated to, and uses every kind of term."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from terarec.apps.synthetic.click_model import (
    CATEGORIES,
    INTEGERS,
    KAGGLE_ROWS,
    MISSING_CATEGORY,
    MISSING_INTEGER,
    CategoryColumn,
    category_values,
    draw_categories,
    draw_integers,
    plant,
    scaled_values,
)

EVEN = (np.arange(200_000) + 0.5) / 200_000  # in the place of uniform numbers, without their noise


@pytest.mark.parametrize("column", INTEGERS)
def test_integers_keep_their_promises(column):
    drawn = draw_integers(column, EVEN)
    present = drawn[drawn != MISSING_INTEGER]
    assert 1 - len(present) / len(drawn) == pytest.approx(column.missing, abs=1e-4)
    assert present.min() == column.low
    assert present.max() <= column.high
    assert np.median(present) == pytest.approx(column.median + column.low, abs=1.0)


def test_some_integers_are_negative_and_some_missing():
    assert min(column.low for column in INTEGERS) == -3
    assert any(column.missing > 0.5 for column in INTEGERS)


@pytest.mark.parametrize("num_values", [1, 3, 1_000, 10_131_227])
@pytest.mark.parametrize("missing", [0.0, 0.44])
def test_categories_follow_zipf(num_values, missing):
    drawn = draw_categories(CategoryColumn(num_values=num_values, missing=missing), num_values, EVEN)
    present = drawn[drawn != MISSING_CATEGORY]
    assert 1 - len(present) / len(drawn) == pytest.approx(missing, abs=1e-4)
    assert present.min() == 0
    assert present.max() < num_values
    ranks = np.arange(min(num_values, 20))
    expected = np.log((ranks + 2) / (ranks + 1)) / np.log(num_values + 1)
    shares = np.bincount(present, minlength=num_values)[ranks] / len(present)
    assert shares == pytest.approx(expected, abs=1e-4)


def test_extreme_uniform_numbers_stay_inside():
    edges = np.array([0.0, np.nextafter(1.0, 0.0)])
    for column in INTEGERS:
        assert draw_integers(column, edges)[1] <= column.high
    for column in CATEGORIES:
        assert draw_categories(column, column.num_values, edges)[1] < column.num_values


def test_values_are_a_bijection_of_ranks():
    ranks = np.arange(-1, 300_000)
    for column in (0, 1, 25):
        values = category_values(column, ranks)
        assert values[0] == MISSING_CATEGORY
        assert values[1:].min() >= 0
        assert values[1:].max() < 2**32
        assert len(np.unique(values)) == len(ranks)
    assert (category_values(0, ranks)[1:] != category_values(1, ranks)[1:]).all()


def test_cardinalities_grow_with_the_log_up_to_kaggles():
    assert [scaled_values(column, KAGGLE_ROWS) for column in CATEGORIES] == [c.num_values for c in CATEGORIES]
    at_million = [scaled_values(column, 1_000_000) for column in CATEGORIES]
    assert at_million[2] == round(10_131_227 / 45.840617)
    assert at_million[8] == 3


ROWS = 500_000
NUM_VALUES = tuple(scaled_values(column, ROWS) for column in CATEGORIES)


def features(seed, rows=20_000):
    generator = np.random.default_rng(seed)
    integers = np.stack([draw_integers(column, generator.random(rows)) for column in INTEGERS])
    ranks = [draw_categories(c, count, generator.random(rows)) for c, count in zip(CATEGORIES, NUM_VALUES, strict=True)]
    return integers, np.stack(ranks)


@pytest.fixture(scope="module")
def model():
    return plant(np.random.default_rng(0), ROWS, NUM_VALUES, features(1))


def test_a_quarter_is_positive_on_other_rows(model):
    assert model.probabilities(*features(2)).mean() == pytest.approx(0.25, abs=0.01)


def test_probabilities_are_probabilities_of_float32(model):
    probabilities = model.probabilities(*features(2))
    assert probabilities.dtype == np.float32
    assert probabilities.min() > 0.0
    assert probabilities.max() < 1.0


@pytest.mark.parametrize(("part", "share"), [("waves", 0.30), ("effects", 0.45), ("crosses", 0.25)])
def test_each_kind_of_terms_has_its_share_of_the_variance(model, part, share):
    rows = features(1)
    whole = np.log(model.probabilities(*rows) / (1 - model.probabilities(*rows)))
    silent = {"waves": model.waves * 0, "effects": tuple(t * 0 for t in model.effects)}
    silent["crosses"] = tuple((first, second, table * 0) for first, second, table in model.crosses)
    without = dataclasses.replace(model, **{part: silent[part]}).probabilities(*rows)
    terms = whole - np.log(without / (1 - without))
    assert terms.var() / 1.7**2 == pytest.approx(share, abs=0.01)


def test_pairs_of_categories_do_not_add_up(model):
    """Flipping two crossed columns changes the logit by more than the two flips one by one."""
    integers, ranks = features(3, rows=4)
    first, second, _ = model.crosses[0]
    ranks[:] = ranks[:, :1]
    integers[:] = integers[:, :1]
    ranks[first] = [0, 1, 0, 1]
    ranks[second] = [0, 0, 1, 1]
    probabilities = model.probabilities(integers, ranks).astype(np.float64)
    logits = np.log(probabilities / (1 - probabilities))
    assert abs(logits[3] - logits[1] - logits[2] + logits[0]) > 0.01


def test_rare_values_share_one_effect(model):
    integers, ranks = features(4, rows=2)
    ranks[:, 1] = ranks[:, 0]
    integers[:, 1] = integers[:, 0]
    ranks[2] = [NUM_VALUES[2] - 1, NUM_VALUES[2] - 2]
    left, right = model.probabilities(integers, ranks)
    assert left == right
