# SPDX-License-Identifier: Apache-2.0
"""Optimizers in float64 on whole tables, with the gradients of an id's occurrences summed first."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass
class Formula:
    """An optimizer of a table.

    Attributes:
        step: Function step(weights, gradient, states, rows, t) that changes weights and states in place; `rows` are
            those with a gradient.
        initial: Initial values of the states.
        t: Number of the last step.
    """

    step: Callable[[Floats, Floats, list[Floats], NDArray[np.bool_], int], None]
    initial: tuple[float, ...] = ()
    states: list[Floats] = field(default_factory=list)
    t: int = 0

    def apply(self, weights: Floats, gradient: Floats, rows: NDArray[np.bool_]) -> None:
        if self.t == 0:
            self.states = [np.full_like(weights, value) for value in self.initial]
        self.t += 1
        self.step(weights, gradient, self.states, rows, self.t)


def sgd(lr: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        w -= lr * g

    return Formula(step)


def momentum(lr: float, beta: float, *, nesterov: bool = False) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        (m,) = states
        m[rows] = beta * m[rows] - lr * g[rows]
        w[rows] += beta * m[rows] - lr * g[rows] if nesterov else m[rows]

    return Formula(step, (0.0,))


def adam(lr: float, beta1: float, beta2: float, eps: float, *, lazy: bool, decay: float = 0.0) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        m, v = states
        at = rows if lazy else np.full_like(rows, True)
        m[at] = beta1 * m[at] + (1 - beta1) * g[at]
        v[at] = beta2 * v[at] + (1 - beta2) * g[at] ** 2
        rate = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        w[at] -= lr * decay * w[at] + rate * m[at] / (np.sqrt(v[at]) + eps)

    return Formula(step, (0.0, 0.0))


def nadam(lr: float, beta1: float, beta2: float, eps: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        m, v = states
        m[rows] = beta1 * m[rows] + (1 - beta1) * g[rows]
        v[rows] = beta2 * v[rows] + (1 - beta2) * g[rows] ** 2
        momenta = beta1 * (1 - 0.5 * 0.96 ** np.arange(1, t + 2))
        of_moment = momenta[t] * m[rows] / (1 - momenta.prod())
        of_gradient = (1 - momenta[t - 1]) * g[rows] / (1 - momenta[:t].prod())
        w[rows] -= lr * (of_moment + of_gradient) / (np.sqrt(v[rows] / (1 - beta2**t)) + eps)

    return Formula(step, (0.0, 0.0))


def adamax(lr: float, beta1: float, beta2: float, eps: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        m, u = states
        m[rows] = beta1 * m[rows] + (1 - beta1) * g[rows]
        u[rows] = np.maximum(beta2 * u[rows], np.abs(g[rows]))
        w[rows] -= lr / (1 - beta1**t) * m[rows] / (u[rows] + eps)

    return Formula(step, (0.0, 0.0))


def adadelta(lr: float, rho: float, eps: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        of_grads, of_steps = states
        of_grads[rows] = rho * of_grads[rows] + (1 - rho) * g[rows] ** 2
        moved = np.sqrt(of_steps[rows] + eps) / np.sqrt(of_grads[rows] + eps) * g[rows]
        of_steps[rows] = rho * of_steps[rows] + (1 - rho) * moved**2
        w[rows] -= lr * moved

    return Formula(step, (0.0, 0.0))


def adagrad(lr: float, initial: float, eps: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        (s,) = states
        s += g**2
        w -= lr * g / np.sqrt(s + eps)

    return Formula(step, (initial,))


def ftrl(lr: float, initial: float, l1: float, l2: float, beta: float) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        n, z = states
        before = np.sqrt(n[rows])
        n[rows] += g[rows] ** 2
        z[rows] += g[rows] - (np.sqrt(n[rows]) - before) / lr * w[rows]
        moved = (np.sign(z[rows]) * l1 - z[rows]) / ((np.sqrt(n[rows]) + beta) / lr + 2 * l2)
        w[rows] = np.where(np.abs(z[rows]) > l1, moved, 0.0)

    return Formula(step, (initial, 0.0))


def rmsprop(lr: float, rho: float, eps: float, *, lazy: bool) -> Formula:
    def step(w: Floats, g: Floats, states: list[Floats], rows: NDArray[np.bool_], t: int) -> None:
        (v,) = states
        at = rows if lazy else np.full_like(rows, True)
        v[at] = rho * v[at] + (1 - rho) * g[at] ** 2
        w[at] -= lr * g[at] / np.sqrt(v[at] + eps)

    return Formula(step, (0.0,))
