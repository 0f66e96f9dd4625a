# SPDX-License-Identifier: Apache-2.0
"""Calls of the Triton kernels next to those of the plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from terarec.kernels.contract import KernelGradient
from terarec.kernels.ref import row_update as ref_update
from terarec.kernels.row_rules import LAST_UPDATE, RowRule, row_rule
from terarec.kernels.triton.bag_lookup import bag_lookup
from terarec.kernels.triton.row_update import row_update_
from terarec.ops import BagLayout
from terarec.ops.row_update import state_shapes
from tests.ops.bags import make_layout, make_lookup
from tests.ops.rules import known

WIDTHS = (1, 3, 16, 48, 128)
POOLINGS = ("sum", "none", ("mean", "sum", "sqrtn", "mean"), ("max", "sum", "max", "sqrtn"))


def layouts(device: torch.device) -> list[BagLayout]:
    """Every width with every pooling; interpreted, which takes long, every width and every pooling twice or once."""
    if device.type == "cpu":
        return [make_layout(WIDTHS[number % len(WIDTHS)], POOLINGS[number % len(POOLINGS)]) for number in range(8)]
    return [make_layout(width, pooling) for width in WIDTHS for pooling in POOLINGS]


def looked_up(
    device: torch.device,
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    key_weights: Tensor | None = None,
) -> Tensor:
    there = [weights.to(device), keys.to(device), offsets.to(device)]
    key_weights = None if key_weights is None else key_weights.to(device)
    return bag_lookup(*there, layout.array, layout.is_pooled, key_weights).cpu()


def random_key_weights(count: int) -> Tensor:
    """Some of them zero, some below."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return torch.where(numbers.abs() < 0.2, 0.0, numbers)


def updated(
    device: torch.device,
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    steps: Iterable[int],
    table_lr: Tensor | None = None,
    numbers: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Weights and state after some steps; the arguments stay as they are."""
    weights, state = weights.clone().to(device), [held.clone().to(device) for held in state]
    there = [moved(gradient, device) for gradient in gradients]
    numbers = None if numbers is None else numbers.to(device)
    for step in steps:
        row_update_(weights, state, there, rule, step, table_lr, 7, numbers)
    return weights.cpu(), [held.cpu() for held in state]


def expected_update(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    steps: Iterable[int],
    table_lr: Tensor | None = None,
    numbers: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    weights, state = weights.clone(), [held.clone() for held in state]
    for step in steps:
        ref_update.row_update_(weights, state, gradients, rule, step, table_lr, 7, numbers)
    return weights, state


def moved(gradient: KernelGradient, device: torch.device) -> KernelGradient:
    parts = {name: part.to(device) for name, part in gradient._asdict().items() if part is not None}
    return KernelGradient(**{**parts, "layout": gradient.layout})


def gradient_of(layout: BagLayout, batch: int, hotness: int, seed: int) -> KernelGradient:
    held = make_lookup(layout, batch, hotness, seed)
    shape = (batch, 4 * layout.width) if layout.is_pooled else (held.keys.shape[0], layout.width)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return KernelGradient(held.keys, held.offsets, grad, layout.array)


def rule_of(kind: str, **more: Any) -> RowRule:
    mode = more.pop("mode", "local")
    numbers = known(kind, eps=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, beta=0.5)
    return row_rule(kind, mode=mode, **{"lr": 0.05, **numbers, **more})


def compare_weights(device: torch.device, weights: Tensor, gradients: Sequence[KernelGradient]) -> None:
    rule = row_rule("sgd", lr=0.5)
    result, _ = updated(device, weights, [], gradients, rule, [1])
    torch.testing.assert_close(result, expected_update(weights, [], gradients, rule, [1])[0], equal_nan=True)


def compare_updates(
    device: torch.device,
    layout: BagLayout,
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    steps: Iterable[int],
    table_lr: Tensor | None = None,
) -> None:
    weights = make_lookup(layout, 0, 1).weights
    shapes = state_shapes(rule.kind, *weights.shape, mode=rule.mode)
    state = [
        torch.full(shape, 0.01) if name != LAST_UPDATE else torch.zeros(shape, dtype=torch.int32)
        for name, shape in shapes
    ]
    result = updated(device, weights, state, gradients, rule, steps, table_lr)
    expected = expected_update(weights, state, gradients, rule, steps, table_lr)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
