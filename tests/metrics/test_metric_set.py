# SPDX-License-Identifier: Apache-2.0

import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from terarec.errors import ConfigError
from terarec.metrics import MetricSet, find_metric, metric_names
from tests.errors import at
from tests.metrics.oracles import expected
from tests.params import in_every_run

NAMES = [
    *("auc", "logloss", "ne", "rmse", "mae", "mse", "smape", "accuracy", "ece", "ece@3"),
    *("gauc", "ndcg@1", "ndcg@4", "recall@3", "precision@3", "hit_rate@2", "mrr", "mrr@2", "map", "map@3"),
]
STREAMED = NAMES[:10]
ROWS = 240


class Samples:
    """Samples of two labels with ties, unknown labels, soft labels, zero weights, and missing groups and slices."""

    def __init__(self, seed, *, labels=2, weighted=True):
        rng = np.random.default_rng(seed)
        self.logits = (rng.integers(-6, 7, (ROWS, labels)) / 4).astype(np.float32)
        self.scores = (1 / (1 + np.exp(-self.logits.astype(np.float64)))).astype(np.float32)
        self.labels = rng.choice([0.0, 0.25, 1.0, np.nan], (ROWS, labels), p=[0.5, 0.1, 0.3, 0.1]).astype(np.float32)
        self.weights = rng.choice([0.0, 0.5, 1.0, 3.25], ROWS).astype(np.float32) if weighted else None
        self.users = [None if user == 0 else f"user {user}" for user in rng.integers(0, 30, ROWS)]
        self.country = [None if value == 0 else int(value) * 10 for value in rng.zipf(1.7, ROWS).clip(max=9) - 1]

    def columns(self, chosen=slice(None)):
        return {"user": pa.array(self.users)[chosen], "country": pa.array(self.country, pa.int32())[chosen]}

    def rows(self, label, keep=lambda row: True):
        weights = [1.0] * ROWS if self.weights is None else self.weights.tolist()
        columns = (self.logits[:, label], self.scores[:, label], self.labels[:, label])
        lists = [column.astype(float).tolist() for column in columns]
        return [row for number, row in enumerate(zip(*lists, weights, self.users, strict=True)) if keep(number)]

    def give(self, held, batch):
        for start in range(0, ROWS, batch):
            part = slice(start, start + batch)
            held.update(
                logits=torch.from_numpy(self.logits[part]),
                scores=self.scores[part],
                labels=torch.from_numpy(self.labels[part]),
                weights=None if self.weights is None else self.weights[part],
                columns=self.columns(part),
            )
        return held.compute()


def check(found, samples, names, keep=lambda row: True):
    """Compare `MetricValues` with the definitions."""
    num_labels = samples.labels.shape[1]
    counts = np.ones(ROWS, bool) if samples.weights is None else samples.weights > 0
    kept = np.array([keep(row) for row in range(ROWS)]) & counts
    assert found.rows == kept.sum()
    assert list(found.values) == names
    for label in range(num_labels):
        of_label = found.labels[f"label {label}"]
        assert of_label.rows == (kept & ~np.isnan(samples.labels[:, label])).sum()
        wanted = {name: expected(name, samples.rows(label, keep)) for name in names}
        assert of_label.values == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    for name in names:
        mean = sum(of_label.values[name] for of_label in found.labels.values()) / num_labels
        assert found.values[name] == pytest.approx(mean, rel=1e-12, nan_ok=True)


def labels_of(samples):
    return [f"label {number}" for number in range(samples.labels.shape[1])]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_streamed_metrics_equal_their_definitions(weighted, labels):
    samples = Samples(0, weighted=weighted, labels=labels)
    results = samples.give(MetricSet(STREAMED, labels_of(samples), group="user"), 37)
    check(results.overall, samples, STREAMED)
    assert results.slices == {}


@pytest.mark.parametrize(
    ("batch", "weighted", "labels"),
    in_every_run([(41, True, 2), (41, False, 1)], itertools.product([41, ROWS], [True, False], [1, 2])),
)
def test_metrics_by_group_and_slice_equal_their_definitions(batch, weighted, labels):
    samples = Samples(1, weighted=weighted, labels=labels)
    held = MetricSet(NAMES, labels_of(samples), slices=["country", "user"], group="user")
    results = samples.give(held, batch)
    check(results.overall, samples, NAMES)
    for column, values in (("country", samples.country), ("user", samples.users)):
        found = results.slices[column]
        assert {of_value.value for of_value in found.values} == {
            value for row, value in enumerate(values) if samples.weights is None or samples.weights[row] > 0
        }
        assert found.other is None
        assert found.other_values == 0
        for of_value in found.values:
            check(of_value.metrics, samples, NAMES, lambda row, value=of_value.value, of=values: of[row] == value)
    assert [each.metrics.rows for each in results.slices["country"].values] == sorted(
        (each.metrics.rows for each in results.slices["country"].values), reverse=True
    )


def test_rare_values_are_taken_together():
    samples = Samples(2, labels=1, weighted=False)
    held = MetricSet(NAMES, labels_of(samples), slices=["country"], group="user", max_slices=2)
    found = samples.give(held, 50).slices["country"]
    counts = {value: samples.country.count(value) for value in set(samples.country)}
    frequent = sorted(counts, key=lambda value: -counts[value])[:2]
    assert [of_value.value for of_value in found.values] == frequent
    assert found.other_values == len(counts) - 2
    check(found.other, samples, NAMES, lambda row: samples.country[row] not in frequent)


def test_the_order_of_the_samples_has_no_effect():
    scores, labels = np.zeros(6, np.float32), np.array([1.0, 0, 0, 0, 1, 0], np.float32)
    users = np.array([1, 1, 1, 2, 2, 2])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 0, 2, 3, 5, 4]):
        held = MetricSet(["gauc", "mrr", "hit_rate@1"], ["click"], group="user")
        held.update(logits=scores[order], labels=labels[order], columns={"user": users[order]})
        # Equal scores never help: the relevant item comes last.
        assert held.compute().overall.values == {"gauc": 0.5, "mrr": pytest.approx(1 / 3), "hit_rate@1": 0.0}


def test_several_classes():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((60, 3)).astype(np.float32)
    labels = rng.integers(0, 3, 60).astype(np.float32)
    weights = rng.random(60).astype(np.float32)
    wide = logits.astype(np.float64)
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(60), labels.astype(int)]
    right = wide.argmax(axis=1) == labels
    slices = np.arange(60) % 2
    for columns in ((), ("half",)):
        held = MetricSet(["logloss", "accuracy"], ["kind"], slices=columns)
        held.update(logits=logits, scores=logits, labels=labels, weights=weights, columns={"half": slices})
        results = held.compute()
        assert results["logloss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
        assert results["accuracy"] == pytest.approx(np.average(right, weights=weights), rel=1e-6)
    for each in results.slices["half"].values:
        part = slices == each.value
        expected = np.average(right[part], weights=weights[part])
        assert each.metrics.values["accuracy"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, check=at("LogLoss.update")):
        held.update(logits=logits, scores=logits, labels=np.full(60, 3.0), columns={"half": slices})
    with pytest.raises(ConfigError, check=at("gauc")):
        MetricSet(["gauc"], ["kind"], group="u").update(logits=logits, labels=labels, columns={"u": slices})
    for name in ("auc", "ne", "rmse"):
        for columns in ((), ("half",)):
            held = MetricSet([name], ["kind"], slices=columns)
            with pytest.raises(ConfigError, check=lambda error: "3" in error.problem):  # the place differs by metric
                held.update(logits=logits, scores=logits, labels=labels, columns={"half": slices})


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array(["b", "a", "b", None]), ["b", "a", None]),
        (pa.array(["b", "a", "b", None], pa.large_string()), ["b", "a", None]),
        (pa.array(["b", "a", "b", None]).dictionary_encode(), ["b", "a", None]),
        (pa.chunked_array([["b", "a"], ["b", None]]), ["b", "a", None]),
        (pa.array([3, 1, 3, None], pa.uint8()), [3, 1, None]),
        (pa.array([True, False, True, None]), [True, False, None]),
        (np.array([0.5, 0.25, 0.5, math.nan]), [0.5, 0.25, None]),
        (torch.tensor([[0.5], [0.25], [0.5], [math.nan]], dtype=torch.bfloat16), [0.5, 0.25, None]),
        (torch.tensor([7, -7, 7, 0]), [7, -7, 0]),
        (np.array(["b", "a", "b", "c"]), ["b", "a", "c"]),
    ],
)
def test_columns_of_every_kind(values, shown):
    held = MetricSet(["mae"], ["x"], slices=["column"])
    for _ in range(2):  # the dictionaries of batches are joined
        held.update(scores=np.zeros(4), labels=np.arange(4), columns={"column": values})
    found = held.compute().slices["column"]
    assert [of_value.value for of_value in found.values] == shown
    assert [of_value.metrics.values["mae"] for of_value in found.values] == [1.0, *([1.0, 3.0])]


def test_a_column_has_one_type():
    held = MetricSet(["mae"], ["x"], slices=["column"])
    held.update(scores=np.zeros(1), labels=np.zeros(1), columns={"column": np.array([1])})
    with pytest.raises(ConfigError, check=at("column 'column'")):
        held.update(scores=np.zeros(1), labels=np.zeros(1), columns={"column": np.array([1.5])})


def test_the_results_are_json():
    samples = Samples(5)
    held = MetricSet(["auc", "average_loss"], labels_of(samples), slices=["country"])
    held.update(logits=samples.logits, labels=samples.labels, columns=samples.columns(), loss=torch.tensor(0.25))
    results = held.compute()
    assert results["average_loss"] == 0.25
    shown = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert shown["rows"] == ROWS
    assert shown["metrics"] == {"auc": results["auc"], "average_loss": 0.25}
    assert list(shown["labels"]) == labels_of(samples)
    assert {value["value"] for value in shown["slices"]["country"]["values"]} == set(samples.country)
    assert shown["slices"]["country"]["other"] is None


def test_without_samples_nothing_is_defined():
    for slices in ([], ["country"]):
        held = MetricSet([*NAMES, "average_loss"], ["x", "y"], slices=slices, group="user")
        results = held.compute()
        assert results.overall.rows == 0
        assert all(math.isnan(value) for value in results.overall.values.values())
        assert all(value is None for value in results.to_json()["metrics"].values())


def test_reset_forgets_and_buffers_may_be_reused():
    held = MetricSet(["auc", "mrr"], ["x"], group="user")
    logits, labels, users = np.zeros(2, np.float32), np.array([1, 0], np.float32), np.array([1, 1])
    held.update(logits=logits, labels=labels, columns={"user": users})
    held.reset()
    logits[:] = [1.0, 0.0]
    held.update(logits=logits, labels=labels, columns={"user": users})
    logits[:], labels[:], users[:] = 0, 0, [1, 2]
    assert held.compute().overall.values == {"auc": 1.0, "mrr": 1.0}


def test_what_is_needed_is_said():
    held = MetricSet(["rmse", "gauc", "average_loss"], ["x"], slices=["user", "shop"], group="user")
    assert held.reads == {"logits", "scores", "loss"}
    assert held.columns == ("user", "shop")
    assert MetricSet(["auc"], ["x"], group="user").columns == ()
    assert MetricSet(["auc"], ["x"]).reads == {"logits"}


GOOD = {"logits": np.zeros(2), "scores": np.zeros(2), "labels": np.array([0, 1])}
COLUMNS = {"user": np.array([1, 2])}


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"logits": None}, ("MetricSet.update", "got no logits")),
        ({"scores": None}, ("MetricSet.update", "got no scores")),
        ({"columns": None}, ("MetricSet.update", "got the columns none")),
        ({"columns": {"shop": np.zeros(2)}}, ("MetricSet.update", "got the columns shop")),
        ({"columns": {"user": np.zeros(3)}}, ("column 'user'", "got 3 values for 2 samples")),
        ({"columns": {"user": np.zeros((2, 2))}}, ("column 'user'", "got values [2, 2]")),
        ({"columns": {"user": pa.array([[1], [2]])}}, ("column 'user'", "got values of type list")),
        ({"labels": np.array([0, 2])}, ("gauc.update",)),
        (
            {"labels": np.zeros((2, 2)), "logits": np.zeros((2, 2)), "scores": np.zeros((2, 2))},
            ("MetricSet.update", "got 2 labels"),
        ),
        ({"logits": np.array([0, math.nan])}, ("MetricSet.update", "NaN as the score of row 1")),
        ({"weights": np.array([1, -1])}, ("MetricSet.update", "weight -1.0")),
    ],
)
def test_bad_batches_are_named(arguments, place):
    held = MetricSet(["gauc", "rmse"], ["x"], group="user")
    with pytest.raises(ConfigError, check=at(*place)):
        held.update(**(GOOD | {"columns": COLUMNS} | arguments))


@pytest.mark.parametrize(
    ("names", "options", "place"),
    [
        (["acu"], {}, ("metric", "'acu' (did you mean 'auc'?)")),
        (["auc@5"], {}, ("metric", "expected 'auc' alone")),
        (["ndcg"], {"group": "u"}, ("metric", "such as 'ndcg@10'")),
        (["ndcg@0"], {"group": "u"}, ("metric", "an integer >= 1 after 'ndcg@'")),
        (["mrr@x"], {"group": "u"}, ("metric", "an integer >= 1 after 'mrr@'")),
        (["auc", "gauc"], {}, ("metric 'gauc'",)),
        (["auc", "auc"], {}, ("metrics",)),
        (["auc"], {"slices": ["a", "a"]}, ("slices",)),
        (["auc"], {"max_slices": 0}, ("max_slices",)),
    ],
)
def test_bad_sets_are_named(names, options, place):
    with pytest.raises(ConfigError, check=at(*place)):
        MetricSet(names, ["x"], **options)


def test_the_direction_of_every_metric():
    falling = {"logloss", "ne", "rmse", "mae", "mse", "smape", "ece", "average_loss"}
    for shown in metric_names():
        name = shown.replace("[@K]", "").replace("@K", "@5")
        metric = find_metric(name)
        assert metric.name == name
        assert metric.higher_is_better == (name not in falling)
        assert metric.needs_group == (
            name.partition("@")[0] in {"gauc", "ndcg", "recall", "precision", "hit_rate", "mrr", "map"}
        )
