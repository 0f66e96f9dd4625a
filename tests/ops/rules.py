# SPDX-License-Identifier: Apache-2.0
"""Rules with numbers, their states, and the same optimizers on whole tables in float64."""

import dataclasses

import torch
from torch import Tensor, nn

from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.row_rules import number_names, rule_class
from terarec.ops import bag_lookup
from terarec.ops.row_update import BagGradient, RowRule, row_rule, state_dtype, state_shapes
from tests.ops.bags import make_layout, make_lookup

NUMBERS = {
    "ftrl": {"lr": 0.3, "beta": 0.7, "l1": 0.02, "l2": 0.1, "eps": 1e-7},
    "adamw": {"lr": 0.05, "eps": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}
MISSING = {"lr": 0.05, "eps": 1e-3, "beta1": 0.9, "beta2": 0.99}


def known(kind, **numbers):
    """The numbers that the rule has."""
    names = number_names(rule_class(kind))
    return {name: value for name, value in numbers.items() if name in names}


def make_rule(kind, mode="local", **changes):
    return row_rule(kind, mode=mode, **known(kind, **{**NUMBERS.get(kind, MISSING), **changes}))


def make_state(rule, weights, fill=0.01):
    """The rule's state, numbers at `fill` and counters at zero."""
    state = []
    for name, shape in state_shapes(rule.kind, *weights.shape, mode=rule.mode):
        dtype = state_dtype(name)
        state.append(torch.full(shape, fill if dtype.is_floating_point else 0, dtype=dtype))
    return tuple(state)


def make_gradients(width, pooling, batch, hotness, seed=1):
    """Weights, and two gradients of different batches, as two lookups in a step give."""
    layout = make_layout(width, pooling)
    held = [make_lookup(layout, batch, hotness, seed=seed), make_lookup(layout, batch + 2, hotness, seed=seed + 1)]
    generator = torch.Generator().manual_seed(seed + 2)
    gradients = []
    for one in held:
        shape = bag_lookup(one.weights, one.keys, one.offsets, layout, implementation="ref").shape
        gradients.append(BagGradient(one.keys, one.offsets, torch.randn(shape, generator=generator), layout))
    return held[0].weights, gradients


def dense_gradient(weights, gradients):
    """The gradient of the whole arena in float64, and which rows have a key."""
    dense = torch.zeros(weights.shape, dtype=torch.float64)
    touched = torch.zeros(weights.shape[0], dtype=torch.bool)
    for held in gradients:
        rows, values = spread_gradient(held.keys, held.offsets, held.grad.double(), held.layout.array)
        dense.index_add_(0, rows, values)
        touched[rows] = True
    return dense, touched


class DenseReference:
    """An optimizer on whole tables in float64: torch's where it has the rule; rows can be left as they were."""

    def __init__(self, weights: Tensor, rule: RowRule, fill: float = 0.0) -> None:
        self.weights = nn.Parameter(weights.double())
        self.rule = rule
        self.torch = _torch_optimizer(self.weights, rule, fill)
        self.sums = torch.full((weights.shape[0],) if rule.kind == "rowwise_adagrad" else weights.shape, fill).double()
        self.linear = torch.full(weights.shape, fill).double()

    def step(self, grad: Tensor, moves: Tensor) -> None:
        """Move the rows in the mask `moves`."""
        before = [tensor.clone() for tensor in self._tensors()]
        if self.torch is not None:
            self.weights.grad = grad
            self.torch.step()
        else:
            with torch.no_grad():
                getattr(self, f"_{self.rule.kind}")(grad + self._coupled())
        tensors = self._tensors()
        before += [torch.zeros_like(tensor) for tensor in tensors[len(before) :]]  # state that this step made
        with torch.no_grad():
            for tensor, held in zip(tensors, before, strict=True):
                tensor[~moves] = held[~moves]

    def _coupled(self) -> Tensor | float:
        rule = self.rule
        return rule.l2 * self.weights + rule.l1 * self.weights.sign() if rule.is_coupled else 0.0

    def _tensors(self) -> list[Tensor]:
        held = self.torch.state[self.weights] if self.torch is not None else {}
        of_rows = [value for value in held.values() if isinstance(value, Tensor) and value.shape == self.weights.shape]
        return [self.weights.data, self.sums, self.linear, *of_rows]

    def _rowwise_adagrad(self, grad: Tensor) -> None:
        self.sums += grad.square().mean(dim=1)
        self.weights -= self.rule.lr * grad / (self.sums.sqrt() + self.rule.eps)[:, None]

    def _ftrl(self, grad: Tensor) -> None:
        rule, old = self.rule, self.sums.clone()
        self.sums += grad.square()
        root = (self.sums + rule.eps).sqrt()
        self.linear += grad - (root - (old + rule.eps).sqrt()) / rule.lr * self.weights
        moved = (self.linear.sign() * rule.l1 - self.linear) / ((root + rule.beta) / rule.lr + rule.l2)
        self.weights.copy_(torch.where(self.linear.abs() <= rule.l1, 0.0, moved))


def _torch_optimizer(weights: nn.Parameter, rule: RowRule, fill: float) -> torch.optim.Optimizer | None:
    def momentum() -> dict[str, float | bool]:
        return {"momentum": rule.beta1, "nesterov": rule.kind == "nesterov"}

    def adam() -> dict[str, tuple[float, float] | float]:
        return {"betas": (rule.beta1, rule.beta2), "eps": rule.eps}

    made = {
        "sgd": lambda: torch.optim.SGD([weights], rule.lr, weight_decay=rule.l2),
        "momentum": lambda: torch.optim.SGD([weights], rule.lr, weight_decay=rule.l2, **momentum()),
        "nesterov": lambda: torch.optim.SGD([weights], rule.lr, weight_decay=rule.l2, **momentum()),
        "adagrad": lambda: torch.optim.Adagrad(
            [weights], rule.lr, eps=rule.eps, initial_accumulator_value=fill, weight_decay=rule.l2
        ),
        "rmsprop": lambda: torch.optim.RMSprop(
            [weights], rule.lr, alpha=rule.beta2, eps=rule.eps, weight_decay=rule.l2
        ),
        "adam": lambda: torch.optim.Adam([weights], rule.lr, weight_decay=rule.l2, **adam()),
        "adamw": lambda: torch.optim.AdamW([weights], rule.lr, weight_decay=rule.weight_decay, **adam()),
    }
    return made[rule.kind]() if rule.kind in made else None


def with_numbers(rule: RowRule, **changes: float) -> RowRule:
    return dataclasses.replace(rule, **changes)
