# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import AUC
from tests.errors import at


def pairwise_auc(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative[None, :]).sum() + 0.5 * (positive[:, None] == negative[None, :]).sum()
    return float(wins / (len(positive) * len(negative)))


few_scores = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 0.25000003, 1.0, 3.0e38, -math.inf, math.inf])
any_scores = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(few_scores | any_scores, st.booleans()), min_size=1, max_size=80), st.integers(1, 7))
def test_equals_the_pairwise_count_however_it_is_batched(pairs, batch):
    scores = np.array([score for score, _ in pairs], np.float32)
    labels = np.array([label for _, label in pairs], np.float32)
    metric = AUC()
    for start in range(0, len(scores), batch):
        metric.update(scores[start : start + batch], labels[start : start + batch])
    if labels.min() == labels.max():
        assert math.isnan(metric.compute())
    else:
        assert metric.compute() == pytest.approx(pairwise_auc(scores, labels), abs=1e-12)


shared_labels = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=30)


@given(shared_labels, st.integers(0, 30))
def test_a_label_between_counts_on_both_sides(samples, cut):
    """B3: labels in (0, 1) were rejected after a whole epoch."""
    scores, labels = (np.array(column, np.float32) for column in zip(*samples, strict=True))
    labels /= 4
    wins = pairs = 0.0
    for score, label in zip(scores, labels, strict=True):
        for other, its in zip(scores, labels, strict=True):
            weight = float(label) * (1 - float(its))
            pairs += weight
            wins += weight * (0.5 if score == other else score > other)
    expected = wins / pairs if pairs else math.nan
    metric = AUC().update(scores[:cut], labels[:cut]).merge(AUC().update(scores[cut:], labels[cut:]))
    assert metric.compute() == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert metric.compute() == pytest.approx(expected, abs=1e-12, nan_ok=True)


weighted = st.tuples(
    st.integers(-3, 3), st.sampled_from([0.0, 0.25, 1.0, math.nan]), st.sampled_from([0.0, 0.3, 1.0, 7.5])
)


@given(st.lists(weighted, min_size=1, max_size=30), st.integers(0, 30))
def test_a_pair_counts_by_the_product_of_its_weights(samples, cut):
    scores, labels, weights = (np.array(column, np.float32) for column in zip(*samples, strict=True))
    wins = pairs = 0.0
    for score, label, weight in zip(scores, labels.astype(float), weights.astype(float), strict=True):
        for other, its, its_weight in zip(scores, labels.astype(float), weights.astype(float), strict=True):
            if not (math.isnan(label) or math.isnan(its)):
                mass = weight * label * its_weight * (1 - its)
                pairs += mass
                wins += mass * (0.5 if score == other else score > other)
    expected = wins / pairs if pairs else math.nan
    metric = AUC().update(scores[:cut], labels[:cut], weights[:cut])
    metric.merge(AUC().update(scores[cut:], labels[cut:], torch.from_numpy(weights[cut:])))
    assert metric.compute() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=30))
def test_an_integer_weight_equals_repeated_samples(samples):
    scores, labels, weights = (np.array(column) for column in zip(*samples, strict=True))
    repeated = AUC().update(np.repeat(scores, weights), np.repeat(labels, weights)).compute()
    assert AUC().update(scores, labels, weights).compute() == pytest.approx(repeated, abs=1e-14, nan_ok=True)


def test_batches_with_and_without_weights_mix():
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 9, 100).astype(np.float32), rng.integers(0, 2, 100)
    metric = AUC().update(scores[:50], labels[:50]).update(scores[50:], labels[50:], np.full(50, 2.0))
    again = np.concatenate([np.arange(100), np.arange(50, 100)])
    assert metric.compute() == pytest.approx(pairwise_auc(scores[again], labels[again]), abs=1e-12)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1.0, -1.0], "weight -1.0"),
        ([1.0, math.nan], "weight nan"),
        ([1.0, math.inf], "weight inf"),
        ([1.0], "weights [1] for 2 samples"),
    ],
)
def test_bad_weights_are_named(weights, problem):
    with pytest.raises(ConfigError, check=at("AUC.update", problem)):
        AUC().update(np.zeros(2), np.array([0, 1]), np.array(weights))


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.2, 0.8], [0.25, 0.75], 0.75),
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([7, 7, 7, 7, 7], [0, 1, 1, 0, 0], 0.5),
        ([0.0, -0.0], [1, 0], 0.5),
    ],
)
def test_known_values(scores, labels, expected):
    assert AUC().update(np.array(scores), np.array(labels)).compute() == expected


def test_compute_between_updates_does_not_disturb_the_stream():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 300).astype(np.float32), rng.integers(0, 2, 300)
    metric = AUC()
    for start in range(0, 300, 50):
        metric.update(scores[start : start + 50], labels[start : start + 50])
        metric.compute()
    assert metric.compute() == pytest.approx(pairwise_auc(scores, labels), abs=1e-12)


def test_more_positives_than_a_block_holds(monkeypatch):
    monkeypatch.setattr("terarec.metrics.auc._BLOCK", 3)
    rng = np.random.default_rng(1)
    scores, labels = rng.integers(0, 5, 40).astype(np.float32), rng.integers(0, 2, 40)
    assert AUC().update(scores, labels).compute() == pytest.approx(pairwise_auc(scores, labels), abs=1e-12)


def test_merge_equals_one_stream_and_leaves_the_other_alone():
    rng = np.random.default_rng(2)
    scores, labels = rng.standard_normal(200).astype(np.float32), rng.integers(0, 2, 200)
    left, right = AUC().update(scores[:70], labels[:70]), AUC().update(scores[70:], labels[70:])
    right_alone = right.compute()
    assert AUC().merge(left).merge(right).compute() == AUC().update(scores, labels).compute()
    assert right.compute() == right_alone
    assert left.merge(AUC()).compute() == left.compute()


def test_each_label_has_its_own_auc_and_compute_is_their_mean():
    scores = torch.tensor([[0.1, 0.9], [0.2, 0.1], [0.3, 0.5]], dtype=torch.bfloat16)
    labels = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    metric = AUC().update(scores, labels)
    assert metric.per_label() == (1.0, 1.0)
    metric.update(torch.tensor([[0.9, 0.0]]), torch.tensor([[0.0, 1.0]]))
    assert metric.per_label() == (2 / 3, 2 / 3)
    assert metric.compute() == pytest.approx(2 / 3)


def test_a_single_class_label_has_no_auc():
    assert math.isnan(AUC().compute())
    assert AUC().per_label() == ()
    metric = AUC().update(np.zeros((2, 2)), np.array([[1, 0], [1, 1]]))
    assert math.isnan(metric.per_label()[0])
    assert metric.per_label()[1] == 0.5
    assert math.isnan(metric.compute())


def test_reset_forgets():
    metric = AUC().update(np.array([0, 1]), np.array([1, 0]))
    metric.reset()
    assert metric.update(np.array([0, 1]), np.array([0, 1])).compute() == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "problem"),
    [
        ([0.0, math.nan], [0, 1], "NaN as the score of row 1"),
        ([0.0, 1.0], [0, 2], "label 2.0"),
        ([0.0, 1.0], [0.5, -0.25], "label -0.25"),
        ([0.0, 1.0], [0], "scores [2] and labels [1]"),
        ([[[0.0]]], [[[1.0]]], "expected the same shape, [B] or [B, L]"),
    ],
)
def test_bad_input_is_named(scores, labels, problem):
    with pytest.raises(ConfigError, check=at("AUC.update", problem)):
        AUC().update(np.array(scores), np.array(labels))


def test_the_number_of_labels_may_not_change():
    metric = AUC().update(np.zeros(2), np.array([0, 1]))
    with pytest.raises(ConfigError, check=at("AUC.update")):
        metric.update(np.zeros((1, 2)), np.ones((1, 2)))
