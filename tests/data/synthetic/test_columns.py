"""Draws have the missing shares, ranges and shapes that the column lists promise."""

import numpy as np
import pytest

from terarec.data.synthetic.columns import (
    CATEGORIES,
    INTEGERS,
    KAGGLE_ROWS,
    MISSING_CATEGORY,
    MISSING_INTEGER,
    CategoryColumn,
    category_values,
    draw_categories,
    draw_integers,
    scaled_values,
)

EVEN = (np.arange(200_000) + 0.5) / 200_000  # stands for uniform numbers, without their noise


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
