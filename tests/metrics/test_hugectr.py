# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.metrics import NDCG, HitRate
from tests.errors import at


def plain_ndcg(scores, labels):
    """Return the mean over all orders of the samples that the scores allow, by trying them."""

    def gain(ranked):
        return math.fsum(label / math.log2(rank + 1) for rank, label in enumerate(ranked, start=1))

    pairs = list(zip(scores, labels, strict=True))
    orders = [
        order for order in itertools.permutations(pairs) if all(a[0] >= b[0] for a, b in itertools.pairwise(order))
    ]
    mean = math.fsum(gain([label for _, label in order]) for order in orders) / len(orders)
    return mean / gain(sorted(labels, reverse=True))


@given(
    st.lists(
        st.tuples(st.sampled_from([-math.inf, -1.0, 0.5, 0.75]), st.sampled_from([0.0, 1.0, 3.0])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_equals_the_mean_over_all_orders_however_it_is_batched(pairs, batch):
    scores, labels = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    metric = NDCG()
    for start in range(0, len(scores), batch):
        metric.update(scores[start : start + batch], labels[start : start + batch])
    if labels.any():
        assert metric.compute() == pytest.approx(plain_ndcg(scores.tolist(), labels.tolist()), rel=1e-12)
    else:
        assert math.isnan(metric.compute())


def test_a_long_ranking_without_ties():
    rng = np.random.default_rng(0)
    scores, labels = rng.permutation(5000).astype(np.float32), rng.integers(0, 2, 5000)
    ranks = (-scores).argsort().argsort() + 1
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, int(labels.sum()) + 1))
    expected = (labels / np.log2(ranks + 1)).sum() / ideal
    assert NDCG().update(scores, labels).compute() == pytest.approx(expected, rel=1e-12)


def test_labels_are_ranked_apart_and_merge_equals_one_stream():
    scores = torch.tensor([[0.1, 0.9], [0.2, 0.1], [0.3, 0.5]])
    labels = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    whole = NDCG().update(scores, labels)
    assert whole.per_label() == (1.0, 1.0)
    right = NDCG().update(scores[1:], 1.0 - labels[1:])
    right_alone = right.compute()
    merged = NDCG().update(scores, labels).merge(right)
    assert merged.per_label() == NDCG().update(scores, labels).update(scores[1:], 1.0 - labels[1:]).per_label()
    assert right.compute() == right_alone
    merged.reset()
    assert merged.per_label() == ()
    assert math.isnan(merged.compute())


def test_the_callers_arrays_may_be_reused():
    scores, labels = np.array([3.0, 2.0, 1.0], np.float32), np.array([0.0, 1.0, 0.0], np.float32)
    metric = NDCG().update(scores, labels)
    scores[:], labels[:] = 0.0, 1.0
    assert metric.compute() == pytest.approx(1 / math.log2(3))


def test_ndcg_bad_input_is_named():
    with pytest.raises(ConfigError, check=at("NDCG.update")):
        NDCG().update(np.zeros(2), np.array([0, -1]))
    with pytest.raises(ConfigError, check=at("NDCG.update")):
        NDCG().update(np.array([0.0, math.nan]), np.zeros(2))
    with pytest.raises(ConfigError, check=at("NDCG.update")):
        NDCG().update(np.zeros(1), np.ones(1)).update(np.zeros((1, 2)), np.ones((1, 2)))


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


def test_the_threshold_itself_is_not_a_prediction():
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


def test_hit_rate_bad_input_is_named():
    with pytest.raises(ConfigError, check=at("HitRate.update")):
        HitRate().update(np.array([math.nan]), np.array([1]))
    with pytest.raises(ConfigError, check=at("HitRate.update")):
        HitRate().update(np.zeros(1), np.zeros(1)).update(np.zeros((1, 2)), np.zeros((1, 2)))
