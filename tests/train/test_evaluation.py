# SPDX-License-Identifier: Apache-2.0
"""Evaluation of graphs, of losses, and of what is no model of logits."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from terarec.errors import ConfigError
from terarec.metrics import AUC
from terarec.metrics.means import LogLoss
from terarec.models import GraphModel
from terarec.spec import GraphLabel, GraphLayer, GraphSpec
from terarec.train import evaluate
from terarec.train.evaluation import Evaluator
from tests.errors import at
from tests.hugectr.graphs import batch, embedding, layer, model, static

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
