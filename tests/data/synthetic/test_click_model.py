"""The planted model has the positives and the spread that it is calibrated to, and uses every kind of term."""

import dataclasses

import numpy as np
import pytest

from terarec.data.synthetic.click_model import plant
from terarec.data.synthetic.columns import CATEGORIES, INTEGERS, draw_categories, draw_integers, scaled_values

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
