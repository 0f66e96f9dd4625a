# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import SMAPE, AverageLoss
from terarec.metrics.means import LogLoss, Throughput
from tests.errors import at


def test_every_batch_counts_the_same():
    metric = AverageLoss()
    assert math.isnan(metric.compute())
    losses = [0.1, 0.7, 0.3]
    for loss in losses:
        metric.update(torch.tensor(loss, requires_grad=True))
    assert metric.compute() == pytest.approx(math.fsum(losses) / 3, rel=1e-7)


def test_merge_adds_and_reset_forgets():
    left, right = AverageLoss().update(1.0), AverageLoss().update(2.0).update(6.0)
    assert left.merge(right).compute() == 3.0
    assert right.compute() == 4.0
    left.reset()
    assert left.update(5.0).compute() == 5.0


def test_nan_stays():
    assert math.isnan(AverageLoss().update(1.0).update(math.nan).compute())


@given(
    st.lists(st.tuples(st.floats(-80, 80, width=32), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=50),
    st.integers(1, 9),
)
def test_logloss_equals_the_formula_in_float64(pairs, batch):
    logits = np.array([logit for logit, _ in pairs], np.float32)
    labels = np.array([label for _, label in pairs], np.float32)
    expected = math.fsum(max(z, 0.0) - z * y + math.log1p(math.exp(-abs(z))) for z, y in pairs) / len(pairs)
    metric = LogLoss()
    for start in range(0, len(logits), batch):
        metric.update(logits[start : start + batch], labels[start : start + batch])
    assert metric.compute() == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_logloss_known_values():
    assert LogLoss().update(np.zeros(4), np.array([0, 1, 1, 0])).compute() == pytest.approx(math.log(2))
    assert LogLoss().update(np.array([1000.0]), np.array([0])).compute() == 1000.0
    assert LogLoss().update(np.array([math.inf, -math.inf]), np.array([1, 0])).compute() == 0.0
    assert LogLoss().update(np.array([math.inf]), np.array([0])).compute() == math.inf


def test_logloss_labels_are_kept_apart_and_merge_adds():
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


def test_logloss_bad_input_is_named():
    with pytest.raises(ConfigError, check=at("LogLoss.update", "NaN as the score of row 0")):
        LogLoss().update(np.array([math.nan]), np.array([1]))
    with pytest.raises(ConfigError, check=at("LogLoss.update", "label -1.0")):
        LogLoss().update(np.array([0.0]), np.array([-1]))
    with pytest.raises(ConfigError, check=at("LogLoss.update", "got 2 labels")):
        LogLoss().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))


numbers = st.floats(0, 2.0**100, width=32)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=50), st.integers(1, 9))
def test_smape_equals_the_formula_in_float64(pairs, batch):
    expected = math.fsum(abs(p - y) / ((p + y) / 2) if p + y else 0.0 for p, y in pairs) / len(pairs)
    metric = SMAPE()
    for start in range(0, len(pairs), batch):
        part = np.array(pairs[start : start + batch], np.float32)
        metric.update(part[:, 0], part[:, 1])
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_smape_known_values():
    assert SMAPE().update(np.array([0.5]), np.array([0])).compute() == 2.0
    assert SMAPE().update(np.array([3.0]), np.array([1])).compute() == 1.0
    assert SMAPE().update(np.zeros(3), np.zeros(3)).compute() == 0.0


def test_smape_labels_are_kept_apart_and_merge_adds():
    left = SMAPE().update(np.array([[1.0, 0.5]]), np.array([[1, 0]]))
    right = SMAPE().update(np.array([[3.0, 1.0]]), np.array([[1, 1]]))
    left.merge(right)
    assert left.per_label() == (0.5, 1.0)
    assert left.compute() == 0.75
    assert right.per_label() == (1.0, 0.0)
    left.reset()
    assert math.isnan(left.compute())


@pytest.mark.parametrize(
    ("predictions", "labels", "problem"),
    [
        ([-0.5], [1], "got the prediction -0.5"),
        ([math.inf], [1], "got the prediction inf"),
        ([0.5], [-1], "got the label -1.0"),
        ([math.nan], [1], "NaN as the score of row 0"),
    ],
)
def test_smape_bad_input_is_named(predictions, labels, problem):
    with pytest.raises(ConfigError, check=at("SMAPE.update", problem)):
        SMAPE().update(np.array(predictions), np.array(labels))


def test_the_number_of_labels_may_not_change():
    with pytest.raises(ConfigError, check=at("SMAPE.update")):
        SMAPE().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))


def test_samples_over_the_clocks_seconds():
    now = [10.0]
    metric = Throughput(clock=lambda: now[0])
    assert metric.compute() == 0.0
    metric.update(300)
    now[0] = 12.0
    metric.update(100)
    assert metric.compute() == 200.0
    metric.reset()
    now[0] = 13.0
    assert metric.compute() == 0.0
    assert metric.update(5).compute() == 5.0
