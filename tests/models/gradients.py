# SPDX-License-Identifier: Apache-2.0
"""Gradients of models, of their tables too, against the slopes of formulas in NumPy."""

from collections.abc import Callable

import numpy as np
from torch import Tensor, nn

from terarec.models.artifact import tables
from terarec.optim import RowOptimizer
from terarec.spec import SGDSpec
from tests.models.formulas import Array, Weights


def rows_of(model: nn.Module) -> dict[str, Array]:
    return {name: table.weights.double().numpy() for name, table in tables(model).items()}


def gradients_of(model: nn.Module, loss: Tensor) -> Weights:
    """The gradients of a loss; those of the tables are what a step at the rate 1 takes from their rows."""
    before = rows_of(model)
    # Before the gradients, of which it takes over those of the rows.
    rows = RowOptimizer(model, SGDSpec(lr=1.0)) if before else None
    loss.backward()
    if rows is not None:
        rows.step()
    dense = {name: parameter.grad for name, parameter in model.named_parameters() if not name.endswith("rows")}
    after = rows_of(model)
    return Weights(
        {name: gradient.double().numpy() for name, gradient in dense.items() if gradient is not None},
        {name: before[name] - after[name] for name in before},
    )


def check_gradients(
    model: nn.Module, weights: Weights, loss: Tensor, formula: Callable[[Weights], float], tolerance: float = 2e-5
) -> None:
    """Compare a loss of a model, and its gradients, with the value and the slopes of a formula of the weights.

    The slopes are those along a random direction of all layers, and along one of all tables; `tolerance` is for these.
    """
    dense = {name: value.copy() for name, value in weights.dense.items()}
    names = [name for name, _ in model.named_parameters() if not name.endswith("rows")]
    gradients, random, step = gradients_of(model, loss), np.random.default_rng(0), 1e-6
    np.testing.assert_allclose(loss.item(), formula(Weights(dense, weights.tables)), rtol=2e-5, atol=2e-5)
    for of_tables in (False, True):
        values = weights.tables if of_tables else {name: dense[name] for name in names}
        given = gradients.tables if of_tables else gradients.dense
        ways = {name: random.normal(size=value.shape) for name, value in values.items()}
        ends = []
        for sign in (1.0, -1.0):
            moved = {name: values[name] + sign * step * way for name, way in ways.items()}
            ends.append(formula(Weights(dense, moved) if of_tables else Weights({**dense, **moved}, weights.tables)))
        slope = sum(float((given[name] * way).sum()) for name, way in ways.items() if name in given)
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=tolerance, atol=tolerance)
