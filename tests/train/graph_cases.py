# SPDX-License-Identifier: Apache-2.0
"""Graphs trained on a device, held against float32 on the CPU: by tests, and by benchmarks/gpu.py where a GPU is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from terarec.batch import to_device
from terarec.nn.precision import Precision
from terarec.spec import AdamSpec, GraphEmbedding
from tests.hugectr.graphs import batch, dynamic, embedding, evaluated, layer, model, new_trainer, static
from tests.train.small_run import assert_same, weights

STEPS = 5
BATCHES = [batch(*[[[(n * (step + 1)) % 7] for n in range(64)]] * 2, seed=step) for step in range(STEPS)]


def losses(device: torch.device, tables: GraphEmbedding, precision: Precision, loss_scale: float) -> list[float]:
    """Return the losses of a small model over `tables`, and of an evaluation behind them."""
    layers = [layer("mlp", "input", "crossed", num_outputs=[8, 4]), layer("layer_norm", "crossed", "x")]
    made = model(tables, layers=layers).to(device)
    adam = AdamSpec(lr=0.05)
    trainer = new_trainer(made, adam, {"default": adam}, precision=precision, loss_scale=loss_scale)
    found = [float(trainer.train_step(to_device(one, device))) for one in BATCHES]
    loss, tensors = evaluated(made, to_device(BATCHES[0], device))
    assert {tensor.device.type for tensor in tensors.values()} == {device.type}
    return [*found, float(loss)]


def follows_the_cpu(
    tables: GraphEmbedding, precision: Precision, loss_scale: float, tolerance: float, device: torch.device
) -> None:
    """Raise unless training on `device` gives the losses of the CPU in float32."""
    expected = losses(torch.device("cpu"), tables, "fp32", 1.0)
    found = losses(device, tables, precision, loss_scale)
    worst = max(abs(mine - theirs) for mine, theirs in zip(found, expected, strict=True))
    assert worst <= tolerance, f"losses {found} differ by {worst} from {expected}, expected at most {tolerance}"


def skips_what_is_not_finite(tables: GraphEmbedding, device: torch.device) -> None:
    """Raise unless a dynamic loss scale skips a step whose loss is not finite, and training goes on behind it."""
    made = model(tables, layers=[layer("mlp", "input", "x", num_outputs=[8, 4])]).to(device)
    adam = AdamSpec(lr=0.05)
    trainer = new_trainer(made, adam, {"default": adam}, loss_scale="dynamic")
    good = to_device(BATCHES[0], device)
    trainer.train_step(good)
    before = weights(made)
    trainer.train_step(dataclasses.replace(good, dense=torch.full_like(good.dense, torch.inf)))
    assert_same(weights(made), before)
    assert torch.isfinite(trainer.train_step(good))


_GROWING, _FIXED = embedding(dynamic("t"), slots=2), embedding(static(t=7), slots=2)
CASES: dict[str, Callable[[torch.device], None]] = {
    "graph over a dynamic table": partial(follows_the_cpu, _GROWING, "fp32", 1.0, 1e-4),
    "graph over a static table, scaled loss": partial(follows_the_cpu, _FIXED, "fp32", 1024.0, 1e-4),
    "graph in fp16": partial(follows_the_cpu, _FIXED, "fp16", 1024.0, 0.02),
    "graph in bf16": partial(follows_the_cpu, _GROWING, "bf16", 1.0, 0.02),
    "a step that a dynamic loss scale skips": partial(skips_what_is_not_finite, _FIXED),
}
