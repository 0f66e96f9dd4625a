import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import HitRate


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=50), st.integers(1, 9))
def test_equals_the_count_however_it_is_batched(pairs, batch):
    confident = [label for probability, label in pairs if probability > float(np.float32(0.8))]
    metric = HitRate()
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        metric.update(np.array([p for p, _ in part], np.float32), np.array([y for _, y in part], np.float32))
    if confident:
        assert metric.compute() == sum(confident) / len(confident)
    else:
        assert math.isnan(metric.compute())


def test_the_threshold_itself_is_no_prediction():
    above = np.nextafter(np.float32(0.8), np.float32(1))
    assert HitRate().update(np.array([0.8, above]), np.array([0, 1])).compute() == 1.0


def test_labels_are_kept_apart_and_merge_adds():
    left = HitRate().update(torch.tensor([[0.9, 0.9], [0.9, 0.1]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    right = HitRate().update(np.array([[0.9, 0.9]]), np.array([[1, 1]]))
    left.merge(right)
    assert left.per_label() == (2 / 3, 1 / 2)
    assert left.compute() == pytest.approx(7 / 12)
    assert right.per_label() == (1.0, 1.0)
    assert left.merge(HitRate()).per_label() == (2 / 3, 1 / 2)
    left.reset()
    assert left.per_label() == ()


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="NaN as the score of row 0"):
        HitRate().update(np.array([math.nan]), np.array([1]))
    with pytest.raises(ConfigError, match="got 2 labels, expected 1"):
        HitRate().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))
