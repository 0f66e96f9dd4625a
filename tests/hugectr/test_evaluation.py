# SPDX-License-Identifier: Apache-2.0
"""Metrics of evaluations: several labels, unknown labels, two classes, and what several labels do not have."""

import pytest
import torch

import terarec.hugectr as hugectr
from terarec.batch import slice_samples
from terarec.dist import Ranks
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.evaluation import SolverMetrics
from tests.dist.launch import run_ranks
from tests.errors import at
from tests.hugectr.graphs import batch, dynamic, embedding, model

AUC, LOSS, HIT = hugectr.MetricsType.AUC, hugectr.MetricsType.AverageLoss, hugectr.MetricsType.HitRate


def column(*values):
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def test_several_labels_have_an_auc_each_and_their_mean():
    found = SolverMetrics({AUC: 1.0}, num_labels=2)
    scores = {"a": column(0.1, 0.9, 0.4), "b": column(0.1, 0.9, 0.4)}
    found.update(torch.tensor(0.5), scores, {"a": column(0, 1, 0), "b": column(1, 0, 0)})
    assert found.finish() == [("AUC", 0.5)]
    assert found.class_aucs == (1.0, 0.0)


def test_labels_that_are_not_known_do_not_count():
    found = SolverMetrics({AUC: 1.0}, num_labels=1)
    found.update(torch.tensor(0.5), {"a": column(0.1, 0.9, 0.99)}, {"a": column(0, 1, -1)})
    assert found.finish() == [("AUC", 1.0)]


def test_labels_of_generated_files_lie_between_the_classes():
    found = SolverMetrics({AUC: 1.0}, num_labels=1)
    found.update(torch.tensor(0.5), {"a": column(0.2, 0.8)}, {"a": column(0.25, 0.75)})
    assert found.finish() == [("AUC", 0.75)]


def test_a_metric_without_a_value_is_named_once(caplog):
    """Finding N4: HugeCTR's line has nan; a warning says why, and no target is above it."""
    found = SolverMetrics({AUC: 0.5, HIT: 0.8}, num_labels=1)
    for _ in range(2):
        found.update(torch.tensor(0.5), {"a": column(0.1, 0.2)}, {"a": column(0, 0)})
        assert not any(value > 0.0 for _, value in found.finish())
    assert [record.args[0] for record in caplog.records] == ["AUC", "HitRate"]


def test_of_two_classes_the_second_counts():
    found = SolverMetrics({HIT: 0.8, LOSS: 0.0}, num_labels=1)
    softmax = torch.tensor([[0.1, 0.9], [0.95, 0.05]])
    found.update(torch.tensor(0.25), {"a": softmax}, {"a": column(1, 1)})
    found.update(torch.tensor(0.75), {"a": softmax}, {"a": column(0, 0)})
    # As HugeCTR's `std::map<metrics::Type, float>` is sorted, not as the script's dict is.
    assert found.finish() == [("AverageLoss", 0.5), ("HitRate", 0.5)]


def test_each_finish_starts_again():
    found = SolverMetrics({LOSS: 0.0}, num_labels=1)
    for loss in (1.0, 3.0):
        found.update(torch.tensor(loss), {"a": column(0.5)}, {"a": column(1)})
        assert found.finish() == [("AverageLoss", loss)]


def test_several_labels_have_no_other_metrics():
    with pytest.raises(WrongInputError, check=at("metrics_spec")):
        SolverMetrics({AUC: 1.0, HIT: 0.8}, num_labels=2)


KEYS = [[7], [3], [5], [2], [7]]


def scored(ranks, ends):
    """Evaluate this rank's span of five samples; return metrics, scores and labels of all."""
    samples = batch(KEYS, KEYS, seed=3)
    own = slice_samples(samples, ends[ranks.rank], ends[ranks.rank + 1])
    found = SolverMetrics({AUC: 1.0, LOSS: 0.0}, num_labels=1, ranks=ranks)
    found.score(model(embedding(dynamic("e"), slots=2)), own, "fp32", total=5)
    return dict(found.finish()), found.predictions["label"].tolist(), found._labels.tolist()


def scored_by_spans(ranks):
    return [scored(ranks, ends) for ends in ((0, 2, 5), (0, 4, 5), (0, 5, 5))]


def test_ranks_with_spans_of_any_size_find_what_one_process_does():
    metrics, scores, labels = scored(Ranks(), (0, 5))
    results = [result for of_rank in run_ranks(2, scored_by_spans) for result in of_rank]
    for found, predicted, truth in results:
        assert found == pytest.approx(metrics, rel=1e-6)
        assert torch.allclose(torch.tensor(predicted), torch.tensor(scores), atol=1e-6)
        assert truth == labels
