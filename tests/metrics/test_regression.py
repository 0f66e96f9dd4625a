import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import SMAPE

numbers = st.floats(0, 2.0**100, width=32)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=50), st.integers(1, 9))
def test_equals_the_formula_in_float64(pairs, batch):
    expected = math.fsum(abs(p - y) / ((p + y) / 2) if p + y else 0.0 for p, y in pairs) / len(pairs)
    metric = SMAPE()
    for start in range(0, len(pairs), batch):
        part = np.array(pairs[start : start + batch], np.float32)
        metric.update(part[:, 0], part[:, 1])
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_known_values():
    assert SMAPE().update(np.array([0.5]), np.array([0])).compute() == 2.0
    assert SMAPE().update(np.array([3.0]), np.array([1])).compute() == 1.0
    assert SMAPE().update(np.zeros(3), np.zeros(3)).compute() == 0.0


def test_labels_are_kept_apart_and_merge_adds():
    left = SMAPE().update(np.array([[1.0, 0.5]]), np.array([[1, 0]]))
    right = SMAPE().update(np.array([[3.0, 1.0]]), np.array([[1, 1]]))
    left.merge(right)
    assert left.per_label() == (0.5, 1.0)
    assert left.compute() == 0.75
    assert right.per_label() == (1.0, 0.0)
    left.reset()
    assert math.isnan(left.compute())


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        ([-0.5], [1], r"got the prediction -0\.5, expected finite numbers >= 0"),
        ([math.inf], [1], "got the prediction inf"),
        ([0.5], [-1], r"got the label -1\.0"),
        ([math.nan], [1], "NaN as the score of row 0"),
    ],
)
def test_bad_input_is_named(predictions, labels, message):
    with pytest.raises(ConfigError, match=message):
        SMAPE().update(np.array(predictions), np.array(labels))


def test_the_number_of_labels_may_not_change():
    with pytest.raises(ConfigError, match=r"SMAPE\.update: got 2 labels, expected 1"):
        SMAPE().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))
