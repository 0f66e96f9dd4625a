# SPDX-License-Identifier: Apache-2.0
"""Layers, objectives and metrics of tensors on a device against the CPU."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terarec.batch import to_device
from terarec.metrics import AUC, MetricSet, evaluate_retrieval
from terarec.nn.objectives import build_objective
from terarec.ragged import Ragged
from terarec.spec import BinarySpec, MultiClassSpec, PairwiseSpec, RegressionSpec, SampledSoftmaxSpec
from terarec.spec.run import ObjectiveSpec
from tests.metrics.test_metric_set import NAMES, Samples
from tests.nn.test_objectives import B, batch
from tests.nn.test_registry import EXAMPLES, HAS_NO_GRADIENT, example, flat
from tests.on_device import CPU, Case, assert_near, assert_on, keep_in

CASES: dict[str, Case] = {}
case = keep_in(CASES)


def passed(kind: str, device: torch.device, *, is_trained: bool, precision: torch.dtype | None) -> dict[str, Tensor]:
    """Return the outputs of a layer, the gradients of inputs and weights, and its state."""
    layer, inputs = example(kind)
    layer = layer.to(device).train(is_trained)
    leaves = [value.to(device).requires_grad_() for value in inputs]
    with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
        outputs = flat(layer(*leaves))
    assert_on(device, *outputs)
    found = {f"output {number}": out.detach().float() for number, out in enumerate(outputs)}
    # cuDNN has no backward pass of a GRU in evaluation.
    if kind not in HAS_NO_GRADIENT and (is_trained or kind != "gru"):
        torch.stack([out.float().square().sum() for out in outputs]).sum().backward()
        gradients = {f"input {number}": leaf.grad for number, leaf in enumerate(leaves)}
        gradients |= {f"weight {name}": weight.grad for name, weight in layer.named_parameters()}
        found |= {name: grad for name, grad in gradients.items() if grad is not None}
    return found | {f"state {name}": value for name, value in layer.state_dict().items()}


def follows_the_cpu(kind: str, device: torch.device) -> None:
    """Raise unless a layer gives on `device` what it gives on the CPU, and in bfloat16 nearly so."""
    for is_trained in (True, False):
        if kind == "dropout" and is_trained:
            layer, _ = example(kind)
            out = layer.to(device)(torch.ones(1000, device=device))
            assert 300 < int((out == 0).sum()) < 700
            continue
        expected = passed(kind, CPU, is_trained=is_trained, precision=None)
        tolerance = 0.01 if kind == "gru" else 1e-4  # cuDNN multiplies in TF32
        found = passed(kind, device, is_trained=is_trained, precision=None)
        assert_near(found, expected, rtol=tolerance, atol=tolerance)
        narrow = passed(kind, device, is_trained=is_trained, precision=torch.bfloat16)
        outputs = [name for name in expected if name.startswith("output")]
        for name in outputs:
            assert_near(narrow[name], expected[name], rtol=0.06, atol=0.06)


CASES |= {f"layer {kind}": partial(follows_the_cpu, kind) for kind in EXAMPLES}

_RNG = np.random.default_rng(4)
_OBJECTIVES: dict[str, tuple[ObjectiveSpec, Any, Any]] = {
    "binary": (BinarySpec(label_weights=(0.5, 2.0)), _RNG.normal(size=(B, 2)), _RNG.random((B, 2))),
    "classes": (MultiClassSpec(classes=4, label_smoothing=0.1), _RNG.normal(size=(B, 4)), _RNG.integers(0, 4, B)),
    **{
        kind: (RegressionSpec(loss=kind, delta=0.5), _RNG.normal(size=(B, 2)), _RNG.normal(size=(B, 2)))  # type: ignore[arg-type]
        for kind in ("mse", "mae", "huber")
    },
    **{
        f"pairs of {group}": (PairwiseSpec(group=group), _RNG.normal(size=(B, 1)), _RNG.integers(0, 3, (B, 1)))
        for group in (None, "query", "item")
    },
    "sampled": (SampledSoftmaxSpec(temperature=0.5), _RNG.normal(size=(B, 5)), np.ones(B)),
}


def objective_follows_the_cpu(name: str, device: torch.device) -> None:
    """Raise unless loss, gradient and scores on `device` are those of the CPU."""
    spec, logits, label = _OBJECTIVES[name]
    objective = build_objective(spec)
    for weighted in (True, False):
        found = []
        for target in (CPU, device):
            held = to_device(batch(label, weighted=weighted), target)
            given = torch.from_numpy(logits).float().to(target).requires_grad_()
            loss = objective.loss(given, held)
            loss.backward()  # type: ignore[no-untyped-call]
            assert given.grad is not None
            scores = objective.scores(given.detach())
            assert_on(target, loss, given.grad, scores)
            found.append({"loss": loss.detach(), "grad": given.grad, "scores": scores})
        assert_near(found[1], found[0])


CASES |= {f"objective {name}": partial(objective_follows_the_cpu, name) for name in _OBJECTIVES}


@case
def metrics_of_tensors_on_the_device(device: torch.device) -> None:
    samples = Samples(3)
    results = []
    for target in (CPU, device):
        held = MetricSet([*NAMES, "average_loss"], ["0", "1"], group="user", slices=["country"])
        known = {"country": torch.tensor([-1 if value is None else value for value in samples.country])}
        users = torch.tensor([0 if user is None else int(user.split()[1]) for user in samples.users])
        for dtype in (torch.float32, torch.bfloat16):
            assert samples.weights is not None
            held.update(
                logits=torch.from_numpy(samples.logits).to(target, dtype),
                scores=torch.from_numpy(samples.scores).to(target),
                labels=torch.from_numpy(samples.labels).to(target),
                weights=torch.from_numpy(samples.weights).to(target),
                columns={"user": users.to(target), "country": known["country"].to(target)},
                loss=torch.tensor(0.5, device=target),
            )
        results.append(held.compute().to_json())
    assert results[0] == results[1]
    logits, labels = (torch.from_numpy(part).to(device) for part in (samples.logits, samples.labels))
    one = AUC().update(logits[:, 0], labels[:, 0].nan_to_num()).compute()
    assert math.isclose(one, AUC().update(samples.logits[:, 0], np.nan_to_num(samples.labels[:, 0])).compute())


@case
def retrieval_of_vectors_on_the_device(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    users, items = (torch.randint(-3, 4, (count, 5), generator=generator).float() for count in (9, 40))
    lists = [
        Ragged(torch.randint(0, 40, (27,), generator=generator), torch.arange(0, 28, 3)),
        Ragged(torch.randint(0, 40, (45,), generator=generator), torch.arange(0, 46, 5)),
    ]
    expected = evaluate_retrieval(users, items, lists[0], k=(1, 5), seen=lists[1])
    there = [Ragged(part.values.to(device), part.offsets.to(device)) for part in lists]
    for size in (10**6, 200):
        found = evaluate_retrieval(
            users.to(device), items.to(device), there[0], k=(1, 5), seen=there[1], block_bytes=size
        )
        assert dataclasses.asdict(found) == dataclasses.asdict(expected)
