import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import LogLoss


@given(
    st.lists(st.tuples(st.floats(-80, 80, width=32), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=50),
    st.integers(1, 9),
)
def test_equals_the_formula_in_float64(pairs, batch):
    logits = np.array([logit for logit, _ in pairs], np.float32)
    labels = np.array([label for _, label in pairs], np.float32)
    expected = math.fsum(max(z, 0.0) - z * y + math.log1p(math.exp(-abs(z))) for z, y in pairs) / len(pairs)
    metric = LogLoss()
    for start in range(0, len(logits), batch):
        metric.update(logits[start : start + batch], labels[start : start + batch])
    assert metric.compute() == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_known_values():
    assert LogLoss().update(np.zeros(4), np.array([0, 1, 1, 0])).compute() == pytest.approx(math.log(2))
    assert LogLoss().update(np.array([1000.0]), np.array([0])).compute() == 1000.0
    assert LogLoss().update(np.array([math.inf, -math.inf]), np.array([1, 0])).compute() == 0.0
    assert LogLoss().update(np.array([math.inf]), np.array([0])).compute() == math.inf


def test_labels_are_kept_apart_and_merge_adds():
    left = LogLoss().update(np.array([[0.0, 30.0]]), np.array([[1, 1]]))
    right = LogLoss().update(np.array([[0.0, -30.0]]), np.array([[0, 1]]))
    right_alone = right.compute()
    left.merge(right)
    assert left.per_label() == pytest.approx((math.log(2), 15.0))
    assert left.compute() == pytest.approx((math.log(2) + 15.0) / 2)
    assert right.compute() == right_alone
    left.reset()
    assert math.isnan(left.compute())
    assert math.isnan(left.merge(LogLoss()).compute())


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="NaN as the score of row 0"):
        LogLoss().update(np.array([math.nan]), np.array([1]))
    with pytest.raises(ConfigError, match=r"label -1\.0, expected 0 to 1"):
        LogLoss().update(np.array([0.0]), np.array([-1]))
    with pytest.raises(ConfigError, match="got 2 labels, expected 1"):
        LogLoss().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))
