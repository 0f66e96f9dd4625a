# SPDX-License-Identifier: Apache-2.0
"""Every model, trained and evaluated on a device as on the CPU.

By plain gradients, since adaptive rules make much of rounding where a gradient is nearly zero.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from terarec.batch import to_device
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.spec import BinarySpec, DynamicTablesSpec, SGDSpec, TrainingSpec
from terarec.spec.model import ModelSpec
from terarec.train import Optimizers, Trainer, evaluate
from tests.models.every import ALLOWED, MODELS, dataset, random_batch
from tests.on_device import CPU, Case, assert_near, assert_on
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
    "model with dice": partial(follows_the_cpu, dataclasses.replace(_DEEPFM, activation="dice"), {}),
}
