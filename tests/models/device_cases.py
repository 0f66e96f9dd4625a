# SPDX-License-Identifier: Apache-2.0
"""Every model, trained and evaluated on a device as on the CPU.

By plain gradients, since adaptive rules make much of rounding where a gradient is nearly zero.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from terarec.batch import to_device
from terarec.errors import TrainingError
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.spec import BinarySpec, DynamicTablesSpec, SGDSpec, TrainingSpec
from terarec.spec.model import ModelSpec
from terarec.train import Optimizers, Trainer, evaluate
from tests.errors import at
from tests.models.every import ALLOWED, MODELS, dataset, random_batch
from tests.on_device import CPU, Case, assert_equal, assert_near, assert_on
from tests.train.small_run import weights

COLUMNS = dataset()
BATCHES = [random_batch(COLUMNS, size, seed=size) for size in (16, 13, 9)]


def trained(spec: ModelSpec, device: torch.device, **training: Any) -> dict[str, Any]:
    """Return what three steps and an evaluation of a model give; the last step takes two batches."""
    model = build_model(spec, COLUMNS, num_outputs=1, seed=1, allow_import=ALLOWED).to(device)
    optimizers = Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1))
    trainer = Trainer(model, TrainingSpec(**training), optimizers, objective=build_objective(BinarySpec()))
    there = [to_device(batch, device) for batch in BATCHES]
    losses = [float(trainer.train_step(there[0])), float(trainer.train_step(*there[1:]))]
    assert_on(device, *model.state_dict().values())
    evaluation, copied = evaluate(model, there), evaluate(model, BATCHES)  # which copies batches itself
    assert evaluation.results == copied.results
    return {
        "losses": torch.tensor(losses),
        "logloss": evaluation.logloss,
        "weights": weights(model),
    }


def follows_the_cpu(spec: ModelSpec, training: dict[str, Any], device: torch.device) -> None:
    """Raise unless a model learns on `device` what it learns on the CPU."""
    assert_near(trained(spec, device, **training), trained(spec, CPU, **training), atol=1e-4)


def names_the_layer(training: dict[str, Any], device: torch.device) -> None:
    """Raise unless a loss that is not finite names the first such layer, and leaves weights as they were."""
    model = build_model(MODELS["deepfm"], COLUMNS, num_outputs=1, seed=1).to(device)
    optimizers = Optimizers.of(model, SGDSpec(lr=0.1), SGDSpec(lr=0.1))
    trainer = Trainer(model, TrainingSpec(**training), optimizers, objective=build_objective(BinarySpec()))
    first, second, third = (to_device(batch, device) for batch in BATCHES)
    trainer.train_step(first)
    wrong = dataclasses.replace(third, dense=torch.full_like(third.dense, torch.inf))
    name, layer = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    for batches, expected in (((second, wrong), "vectors (ColumnVectors)"), ((second,), f"{name} (Linear)")):
        before = {name: values.clone() for name, values in weights(model).items()}
        with pytest.raises(TrainingError, check=at("step 2 (epoch 1)", f", first in {expected}")):
            trainer.train_step(*batches)
        assert_equal(weights(model), before)
        with torch.no_grad():
            layer.weight[0] = torch.inf


def without_chance(spec: ModelSpec) -> ModelSpec:
    """Return a model without dropout and drawn negatives: devices have random numbers of their own."""
    names = {field.name for field in dataclasses.fields(spec)}
    changes: dict[str, Any] = {"dropout": 0.0} if "dropout" in names else {}
    if "negatives" in names and "loss" in names:
        changes["loss"] = "softmax"
    if "auxiliary" in names:
        changes["auxiliary"] = 0.0
    return dataclasses.replace(spec, **changes)


_DLRM = MODELS["dlrm"]
_DEEPFM = MODELS["deepfm"]
CASES: dict[str, Case] = {
    **{
        f"model {name}": partial(follows_the_cpu, without_chance(spec), {})
        for name, spec in MODELS.items()
        # Their training hides items at random, draws others, or draws latent vectors.
        if spec.kind not in ("bert4rec", "mf_bpr", "ncf", "mult_vae")
    },
    "model over dynamic tables": partial(follows_the_cpu, dataclasses.replace(_DLRM, tables=DynamicTablesSpec()), {}),
    "model with clipped gradients": partial(follows_the_cpu, _DLRM, {"clip_norm": 0.1}),
    "model with a scaled loss": partial(follows_the_cpu, _DLRM, {"loss_scale": "dynamic"}),
    "the layer of a loss that is not finite": partial(names_the_layer, {}),
    "the layer of a loss that is not finite in bf16": partial(names_the_layer, {"precision": "bf16"}),
    "model with dice": partial(follows_the_cpu, dataclasses.replace(_DEEPFM, activation="dice"), {}),
}
