# SPDX-License-Identifier: Apache-2.0
"""Evaluation of graphs, of losses, and of what is no model of logits."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from terarec.data import InMemorySource, Reader
from terarec.errors import ConfigError
from terarec.metrics import AUC
from terarec.metrics.means import LogLoss
from terarec.models import GraphModel
from terarec.spec import CategoricalColumn, GraphLabel, GraphLayer, GraphSpec
from terarec.spec.dataset import MISSING_KEY
from terarec.train import evaluate
from terarec.train.evaluation import Evaluator
from tests.errors import at
from tests.hugectr.graphs import batch, embedding, layer, model, static
from tests.metrics.oracles import gauc
from tests.models.every import dataset

BATCHES = [batch(*[[[n % 7] for n in range(40)]] * 2, seed=seed) for seed in range(3)]


def test_a_graph_is_evaluated_as_its_predictions_are():
    """C5: AttributeError: 'dict' object has no attribute 'float'."""
    graph = model(embedding(static(t=7), slots=2))
    found = evaluate(graph, BATCHES)
    logits = torch.cat([graph(one)["logit"] for one in BATCHES]).detach()
    labels = torch.cat([one.label for one in BATCHES])
    assert found.rows == 120
    assert found.auc == AUC().update(logits, labels).compute()
    assert found.logloss == pytest.approx(LogLoss().update(logits, labels).compute())


def dense_graph(*layers: GraphLayer, labels: tuple[GraphLabel, ...]) -> GraphModel:
    return GraphModel(GraphSpec(labels=labels, dense_name="dense", dense_dim=2, layers=layers))


def test_the_logit_of_a_softmax_over_two_classes_is_their_difference():
    """C5: as probabilities of the second class have it."""
    graph = dense_graph(
        layer("inner_product", "dense", "x", num_output=2),
        layer("cross_entropy", "x label", "loss"),
        labels=(GraphLabel(name="label"),),
    )
    probabilities = torch.cat([graph.predict(one)[:, 1:] for one in BATCHES]).detach()
    labels = torch.cat([one.label for one in BATCHES])
    found = evaluate(graph, BATCHES)
    assert found.auc == pytest.approx(AUC().update(probabilities, labels).compute())
    assert found.logloss == pytest.approx(LogLoss().update(probabilities.logit(), labels).compute(), rel=1e-5)


def test_what_gives_no_logits_is_one_clear_line():
    """C5."""
    two = (GraphLabel(name="label"), GraphLabel(name="other"))
    graph = dense_graph(
        layer("inner_product", "dense", "x", num_output=1),
        layer("binary_cross_entropy", "x label", "loss"),
        labels=two,
    )
    wide = [type(one)(dense=one.dense, label=one.label.repeat(1, 2), sparse=one.sparse) for one in BATCHES]
    with pytest.raises(ConfigError, check=at("label 'other'")):
        evaluate(graph, wide)

    class Pairs(nn.Module):
        def forward(self, batch):
            return batch.label, batch.dense

    with pytest.raises(ConfigError, check=at("Pairs")):
        evaluate(Pairs(), BATCHES)


def test_the_mean_loss_is_a_metric_as_any_other():
    graph = model(embedding(static(t=7), slots=2))
    found = Evaluator(metrics=["average_loss", "auc"]).evaluate(graph, BATCHES)
    losses = [graph.loss(one).item() for one in BATCHES]
    assert found.value("average_loss") == pytest.approx(sum(losses) / 3)

    logits = torch.tensor([[0.5]] * 40)

    class Constant(nn.Module):
        def forward(self, batch):
            return logits

    found = Evaluator(metrics=["average_loss"]).evaluate(Constant(), BATCHES)
    expected = [binary_cross_entropy_with_logits(logits, one.label).item() for one in BATCHES]
    assert found.value("average_loss") == pytest.approx(sum(expected) / 3)
    assert found.rows == 120


def test_a_model_trains_again_at_once_where_an_evaluation_is_stopped():
    graph = model(embedding(static(t=7), slots=2)).train()

    def stop(samples):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        Evaluator().evaluate(graph, BATCHES, progress=stop)
    assert graph.training, stopped


@pytest.mark.parametrize(("workflow", "missing"), [("w", 0), (None, 0), (None, MISSING_KEY)])
def test_samples_without_a_group_do_not_count(workflow: str | None, missing: int) -> None:
    """With another order than in the groups, so that a group of them would change the mean."""
    column = CategoricalColumn(name="user", rows=None if missing else 4)
    columns = dataclasses.replace(dataset(dense=1, categorical=()), categorical=(column,), workflow=workflow)
    rng = np.random.default_rng(2)
    users, numbers = np.array([1, 2, 3, missing] * 10), rng.normal(size=(40, 1)).astype(np.float32)
    label = (numbers * np.where(users == missing, -1, 1)[:, None] + rng.normal(size=(40, 1)) > 0).astype(np.float32)

    class Numbers(nn.Module):
        def forward(self, batch):
            return batch.dense

    reader = Reader(InMemorySource(columns, label, numbers, [users]), batch_size=7)
    found = Evaluator(metrics=["gauc"], group="user", slices=["user"]).evaluate(Numbers(), reader)
    is_missing = (users == missing) & (workflow is not None or missing != 0)
    groups = [None if absent else user for user, absent in zip(users.tolist(), is_missing, strict=True)]
    weights = [1.0] * 40
    rows = list(zip(numbers[:, 0].tolist(), weights, label[:, 0].tolist(), weights, groups, strict=True))
    assert found.value("gauc") == pytest.approx(gauc(rows))
    assert {of_value.value for of_value in found.results.slices["user"].values} == set(groups)
