# SPDX-License-Identifier: Apache-2.0
"""Weights of classes are those of scikit-learn, for each label, and a run keeps what it has counted."""

import dataclasses

import numpy as np
import pytest
import torch

from terarec.batch import Batch, Jagged
from terarec.config.files import load_run
from terarec.errors import ConfigError
from terarec.spec import BinarySpec, PythonModelSpec
from terarec.train import build
from terarec.train import run as run_module
from terarec.train.class_weights import balanced_weights
from tests.errors import at
from tests.models.factories import SampledRanker
from tests.train.planted import make_labelled
from tests.train.small_run import changed


def balanced(labels):
    """scikit-learn's ``compute_class_weight("balanced")``, as its documentation has it, of the classes 0 and 1."""
    return tuple(len(labels) / (2 * np.bincount(labels)))


def batches(*labels):
    nothing = Jagged(names=(), keys=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64))
    return [
        Batch(dense=torch.empty(len(part), 0), label=torch.as_tensor(part).float(), sparse=nothing) for part in labels
    ]


def test_they_are_the_balanced_ones_of_scikit_learn():
    label = (np.random.default_rng(0).random((500, 2)) < [0.05, 0.7]).astype(int)
    found = balanced_weights(batches(label[:300], label[300:]), ["rare", "often"])
    for one, values in zip(found, label.T, strict=True):
        assert (one.negative, one.positive) == pytest.approx(balanced(values))


@pytest.mark.parametrize(
    ("label", "place"),
    [
        ([[0.0, 1.0], [0.0, 0.0]], ("label 'a'", "got 0 positive of 2")),
        ([[1.0, 1.0], [0.0, 1.0]], ("label 'b'", "got 2 positive of 2")),
        ([[1.0, 1.5], [0.0, 1.0]], ("label 'b'", "got 1.5")),
        ([[-1.0, 1.0], [0.0, 0.0]], ("label 'a'", "got -1")),
        ([[float("nan"), 1.0]], ("label 'a'", "got nan")),
    ],
)
def test_labels_of_one_class_or_none_are_rejected(label, place):
    with pytest.raises(ConfigError, check=at(*place)):
        balanced_weights(batches(label), ["a", "b"])


def test_a_run_counts_once_and_keeps_the_weights(tmp_path, spec, monkeypatch):
    rng, data = np.random.default_rng(2), tmp_path / "shop"
    data.mkdir()
    splits = {split: {"click": (rng.random(rows) < 0.1).astype(int)} for split, rows in (("train", 600), ("valid", 90))}
    make_labelled(data, splits)
    weighted = changed(
        dataclasses.replace(spec, data=str(data), objective=BinarySpec(positive_weight="auto")), epochs=2, max_steps=2
    )
    build(weighted, tmp_path / "run").fit()
    (one,) = load_run(tmp_path / "run/run.json").objective.class_weights
    assert (one.negative, one.positive) == pytest.approx(balanced(splits["train"]["click"]))

    def none(*_):
        raise AssertionError("counted again")

    monkeypatch.setattr("terarec.train.run.balanced_weights", none)
    more = build(changed(weighted, max_steps=3), tmp_path / "run")
    assert more.fit(resume=True).steps == 3


def test_a_loss_of_its_own_is_refused_before_the_split_is_read(tmp_path, spec, monkeypatch):
    """Finding Q: a model in Python with a loss of its own took none of the weights that were counted for it."""
    monkeypatch.setattr(run_module, "balanced_weights", None)
    model = PythonModelSpec(factory="tests.train.test_class_weights:OwnLoss")
    spec = dataclasses.replace(spec, model=model, objective=BinarySpec(positive_weight="auto"))
    with pytest.raises(ConfigError, check=at("RunSpec.objective", "has its own loss")):
        build(spec, tmp_path / "run", allow_import=("tests",)).fit()
    assert not (tmp_path / "run").exists()


class OwnLoss(SampledRanker):
    def training_loss(self, output, batch):
        return output.mean()
