# SPDX-License-Identifier: Apache-2.0
"""Objectives against their formulas in float64, sample by sample and pair by pair."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError
from terarec.nn.objectives import build_objective
from terarec.spec import (
    BinarySpec,
    CategoricalColumn,
    ClassWeights,
    DatasetSpec,
    LabelColumn,
    MultiClassSpec,
    PairwiseSpec,
    RegressionSpec,
    SampledSoftmaxSpec,
)
from tests.errors import at

B = 7
RNG = np.random.default_rng(2)
WEIGHT = RNG.random(B) * 3
QUERY = [1, 1, 2, 2, 2, 1, 3]


def batch(label, *, weighted=True, query=QUERY):
    label = np.asarray(label, np.float64).reshape(B, -1)
    return Batch(
        dense=torch.zeros(B, 0),
        label=torch.from_numpy(label).float(),
        sparse=Jagged(
            names=("item",), keys=torch.tensor([5, 5, 6, 6, 6, 5, 7]), offsets=torch.arange(B + 1, dtype=torch.int64)
        ),
        weight=torch.from_numpy(WEIGHT).float() if weighted else None,
        metadata={"query": pa.array([f"q{number}" for number in query])},
    )


def loss_of(spec, logits, held):
    return float(build_objective(spec).loss(torch.from_numpy(np.asarray(logits)).float(), held))


@pytest.mark.parametrize("weighted", [True, False])
def test_binary_with_weights_of_samples_and_labels(weighted):
    logits, label = RNG.normal(size=(B, 2)), RNG.random((B, 2))
    sample = WEIGHT if weighted else np.ones(B)
    expected = np.mean((np.logaddexp(0, logits) - logits * label) * [0.5, 2.0] * sample[:, None])
    found = loss_of(BinarySpec(label_weights=(0.5, 2.0)), logits, batch(label, weighted=weighted))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_multi_class(smoothing):
    logits, label = RNG.normal(size=(B, 4)), RNG.integers(0, 4, B)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    target = np.eye(4)[label] * (1 - smoothing) + smoothing / 4
    spec = MultiClassSpec(classes=4, label_smoothing=smoothing)
    assert loss_of(spec, logits, batch(label)) == pytest.approx(np.mean(-(target * logs).sum(1) * WEIGHT), rel=1e-5)
    scores = build_objective(spec).scores(torch.from_numpy(logits))
    np.testing.assert_allclose(scores.numpy(), np.exp(logs), rtol=1e-5)
    assert build_objective(spec).num_outputs(1) == 4


@pytest.mark.parametrize("label", [4, -1, 0.5, math.nan])
def test_a_label_that_is_not_a_class(label):
    with pytest.raises(ConfigError, check=at("label")):
        loss_of(MultiClassSpec(classes=4), np.zeros((B, 4)), batch([0, 1, 2, 3, label, 0, 0]))


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("mse", np.square),
        ("mae", np.abs),
        ("huber", lambda x: np.where(np.abs(x) < 0.5, 0.5 * x * x, 0.5 * (np.abs(x) - 0.25))),
    ],
)
def test_regression(kind, formula):
    values, label = RNG.normal(size=(B, 2)), RNG.normal(size=(B, 2))
    expected = np.mean(formula(values - label) * WEIGHT[:, None])
    assert loss_of(RegressionSpec(loss=kind, delta=0.5), values, batch(label)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("group", [None, "query", "item"])
def test_pairwise_counts_pairs_of_a_group(group):
    scores, label = RNG.normal(size=(B, 1)), RNG.integers(0, 3, (B, 1))
    losses = [
        np.logaddexp(0, -(scores[i, 0] - scores[j, 0])) * WEIGHT[i]
        for i in range(B)
        for j in range(B)
        if label[i, 0] > label[j, 0] and (group is None or QUERY[i] == QUERY[j])
    ]
    assert loss_of(PairwiseSpec(group=group), scores, batch(label)) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("group", ["query", "item"])
def test_samples_without_a_group_are_in_no_pair(group):
    columns = DatasetSpec(
        name="small",
        storage="parquet",
        labels=(LabelColumn(name="y"),),
        dense=(),
        categorical=(CategoricalColumn(name="item", rows=9),),
        workflow="w",
    )
    scores, label = RNG.normal(size=(B, 1)), np.array([2, 1, 0, 1, 2, 0, 1])
    held = batch(label)
    keys = held.sparse.keys.where(held.sparse.keys != 6, 0)  # the same samples as those of the query 2
    metadata = {"query": pa.array([None if number == 2 else f"q{number}" for number in QUERY])}
    held = dataclasses.replace(held, sparse=dataclasses.replace(held.sparse, keys=keys), metadata=metadata)
    losses = [
        np.logaddexp(0, -(scores[i, 0] - scores[j, 0])) * WEIGHT[i]
        for i in range(B)
        for j in range(B)
        if label[i] > label[j] and QUERY[i] == QUERY[j] != 2
    ]
    found = build_objective(PairwiseSpec(group=group), columns).loss(torch.from_numpy(scores).float(), held)
    assert found.item() == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_batch_without_a_pair_has_no_loss():
    assert loss_of(PairwiseSpec(), np.ones((B, 1)), batch(np.ones(B))) == 0.0


def test_an_unknown_group():
    with pytest.raises(ConfigError, check=at("column 'queri'")):
        loss_of(PairwiseSpec(group="queri"), np.ones((B, 1)), batch(np.ones(B)))


def test_sampled_softmax():
    logits = RNG.normal(size=(B, 5))
    scaled = logits / 0.5
    expected = np.mean((np.log(np.exp(scaled).sum(1)) - scaled[:, 0]) * WEIGHT)
    assert loss_of(SampledSoftmaxSpec(temperature=0.5), logits, batch(np.ones(B))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "logits"),
    [
        (BinarySpec(), np.zeros((B, 2))),
        (RegressionSpec(), np.zeros((B, 3))),
        (PairwiseSpec(), np.zeros((B, 2))),
        (SampledSoftmaxSpec(), np.zeros((B, 1))),
    ],
)
def test_logits_of_a_wrong_shape(spec, logits):
    with pytest.raises(
        ConfigError, check=at("sampled_softmax" if isinstance(spec, SampledSoftmaxSpec) else "model", "got logits")
    ):
        loss_of(spec, logits, batch(np.ones(B)))


@pytest.mark.parametrize("spec", [BinarySpec(label_weights=(1.0,)), MultiClassSpec(classes=3)])
def test_a_number_of_labels_that_does_not_fit(spec):
    with pytest.raises(ConfigError):
        build_objective(spec).num_outputs(2)


@pytest.mark.parametrize("label_weights", [(), (0.5, 2.0)])
def test_weights_of_classes(label_weights):
    logits, label = RNG.normal(size=(B, 2)), RNG.random((B, 2))
    positive, negative = label * np.logaddexp(0, -logits), (1 - label) * np.logaddexp(0, logits)
    sample = WEIGHT[:, None] * (label_weights or (1.0, 1.0))
    by_label = (ClassWeights(negative=0.6, positive=3.0), ClassWeights(negative=2.0, positive=0.7))
    spec = BinarySpec(label_weights=label_weights, positive_weight="auto", class_weights=by_label)
    expected = np.mean(([3.0, 0.7] * positive + [0.6, 2.0] * negative) * sample)
    assert loss_of(spec, logits, batch(label)) == pytest.approx(expected, rel=1e-5)
    one = BinarySpec(label_weights=label_weights, positive_weight=4.0)
    expected = np.mean((4.0 * positive + negative) * sample)
    assert loss_of(one, logits, batch(label)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: BinarySpec(positive_weight="balanced"), ("BinarySpec.positive_weight", "or 'auto'")),
        (lambda: BinarySpec(positive_weight=0.0), ("BinarySpec.positive_weight",)),
        (lambda: ClassWeights(negative=0.0, positive=1.0), ("ClassWeights.negative",)),
        (
            lambda: loss_of(BinarySpec(positive_weight="auto"), np.zeros((B, 1)), batch(np.ones(B))),
            ("objective.positive_weight", "'auto' without"),
        ),
    ],
)
def test_weights_of_classes_that_are_none(make, place):
    with pytest.raises(ConfigError, check=at(*place)):
        make()
