"""The exact row update: duplicates are summed first, then each touched row moves once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError, LaidGradient, RowRule
from terarec.kernels.ref.bag_lookup import spread_gradient


def row_update_(
    weights: Tensor, state: Sequence[Tensor], gradients: Sequence[LaidGradient], rule: RowRule, step: int
) -> None:
    """Update the touched rows of `weights` and `state` in place.

    Args:
        weights: [V, D], of any floating type.
        state: the rule's state, each [V, D] or [V].
        gradients: of one or more lookups in these weights.
        rule: what to do with a row's gradient.
        step: number of this update, from 1; Adam's bias correction needs it.

    Raises:
        BadKeyError: a key outside its table; nothing is changed.
        ConfigError: offsets that fall or do not cover the keys; nothing is changed.
    """
    spread = []
    for index, gradient in enumerate(gradients):
        try:
            spread.append(spread_gradient(*gradient))
        except BadKeyError as error:
            error.gradient = index
            raise
    rows, group = torch.unique(torch.cat([rows for rows, _ in spread]), return_inverse=True)
    grad = weights.new_zeros(rows.numel(), weights.shape[1])
    grad.index_add_(0, group, torch.cat([values.to(weights.dtype) for _, values in spread]))
    if rule.kind == "sgd":
        weights[rows] -= rule.lr * grad
    elif rule.kind == "adagrad":
        state[0][rows] += grad * grad
        weights[rows] -= rule.lr * (grad / (state[0][rows].sqrt() + rule.eps))
    elif rule.kind == "rowwise_adagrad":
        state[0][rows] += (grad * grad).mean(dim=1)
        weights[rows] -= (rule.lr / (state[0][rows].sqrt() + rule.eps))[:, None] * grad
    else:
        _adam(weights, state, rows, grad, rule, step)


def _adam(weights: Tensor, state: Sequence[Tensor], rows: Tensor, grad: Tensor, rule: RowRule, step: int) -> None:
    first, second = state
    first[rows] += (1.0 - rule.beta1) * (grad - first[rows])
    second[rows] = rule.beta2 * second[rows] + (1.0 - rule.beta2) * (grad * grad)
    root = second[rows].sqrt() / math.sqrt(1.0 - rule.beta2**step)
    weights[rows] -= rule.lr / (1.0 - rule.beta1**step) * (first[rows] / (root + rule.eps))
