"""`SoftAUC` equals `AUC` on hard labels, and the pair by pair definition on soft ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import AUC, SoftAUC

SAMPLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=30)


@given(SAMPLES)
def test_it_is_the_share_of_ordered_pairs(samples):
    scores, labels = (np.array(column, np.float32) for column in zip(*samples, strict=True))
    labels /= 4
    wins = pairs = 0.0
    for score, label in zip(scores, labels, strict=True):
        for other, its in zip(scores, labels, strict=True):
            weight = float(label) * (1 - float(its))
            pairs += weight
            wins += weight * (0.5 if score == other else score > other)
    expected = wins / pairs if pairs else math.nan
    assert SoftAUC().update(scores, labels).compute() == pytest.approx(expected, nan_ok=True)


@given(SAMPLES, st.integers(1, 29))
def test_hard_labels_give_auc_in_any_number_of_updates(samples, cut):
    scores, labels = (np.array(column, np.float32) for column in zip(*samples, strict=True))
    labels = (labels > 1).astype(np.float32)
    soft = SoftAUC().update(scores[:cut], labels[:cut]).merge(SoftAUC().update(scores[cut:], labels[cut:]))
    assert soft.compute() == pytest.approx(AUC().update(scores, labels).compute(), nan_ok=True)


def test_several_labels_have_one_each_and_reset_forgets():
    soft = SoftAUC().update(np.array([[0.1, 0.1], [0.9, 0.9]]), np.array([[0, 1], [1, 0]]))
    assert soft.per_label() == (1.0, 0.0)
    assert soft.compute() == 0.5
    soft.reset()
    assert soft.per_label() == ()
    assert math.isnan(soft.compute())


def test_strange_labels_and_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"got the label 1.5, expected 0 to 1"):
        SoftAUC().update(np.array([0.5]), np.array([1.5]))
    with pytest.raises(ConfigError, match="got 1 labels, expected 2 as before"):
        SoftAUC().update(np.zeros((1, 2)), np.zeros((1, 2))).update(np.zeros(1), np.zeros(1))
