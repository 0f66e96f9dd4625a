# SPDX-License-Identifier: Apache-2.0
"""Training under ``torch.compile``: the same losses and metrics, and no compilation after the first shapes."""

import dataclasses
import math

import pytest
import torch
from torch._dynamo.utils import counters

from terarec.models import build_model
from terarec.spec import AdaGradSpec, AdamSpec, TrainingSpec
from terarec.train import Optimizers, Trainer
from tests.models.every import ALLOWED, MODELS, dataset, random_batch

COLUMNS = dataset()
IN_EVERY_RUN = {"deepfm"}
"""The models that the short suite trains. Sequences take twice as long."""


def make_trainer(spec, **training):
    torch.manual_seed(3)
    model = build_model(spec, COLUMNS, num_outputs=1, seed=1, allow_import=ALLOWED)
    return Trainer(model, TrainingSpec(**training), Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1)))


def train_epoch(trainer, seed):
    """Three batches of one size and a smaller last one, then an evaluation with a smaller last batch."""
    sizes = (12, 12, 12, 7)
    losses = [
        float(trainer.train_step(random_batch(COLUMNS, size, seed=10 * seed + index)))
        for index, size in enumerate(sizes)
    ]
    evaluation = trainer.evaluate([random_batch(COLUMNS, size, seed=100 + size) for size in (12, 12, 5)])
    return [*losses, evaluation.logloss, evaluation.auc]


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_every_model_trains_the_same_and_compiles_each_shape_once(name):
    spec = MODELS[name]
    if getattr(spec, "dropout", 0.0):
        spec = dataclasses.replace(spec, dropout=0.0)
    plain = make_trainer(spec)
    expected = [train_epoch(plain, seed) for seed in range(3)]

    torch.compiler.reset()
    counters.clear()
    # The stance leaves out the code generator, which takes long; what is traced and how often is the same.
    with torch.compiler.set_stance("default", force_backend="eager"):
        compiled = make_trainer(spec, compile=True)
        found = [train_epoch(compiled, seed) for seed in range(2)]
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        found.append(train_epoch(compiled, 2))
        assert counters["stats"]["unique_graphs"] == graphs
    torch.compiler.reset()
    assert found == [pytest.approx(epoch, rel=1e-5, nan_ok=True) for epoch in expected]
    assert not math.isnan(found[-1][-1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_code_gives_the_same_losses(precision):
    plain = make_trainer(MODELS["dlrm"], precision=precision)
    compiled = make_trainer(MODELS["dlrm"], precision=precision, compile=True)
    tolerance = 1e-5 if precision == "fp32" else 0.02
    assert train_epoch(compiled, 0)[:-1] == pytest.approx(train_epoch(plain, 0)[:-1], rel=tolerance)
    torch.compiler.reset()
