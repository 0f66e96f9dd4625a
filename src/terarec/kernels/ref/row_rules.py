"""The formulas of `terarec.kernels.contract.RowRule` on gathered rows: dense tensors, a row each, changed in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.kernels.contract import RowRule


def transform(grad: Tensor, weights: Tensor, rule: RowRule) -> Tensor:
    """The gradients [n, D] of rows `weights` as the rule's formula takes them: scaled, clipped, regularised."""
    if not rule.is_transformed:
        return grad
    grad = (grad * rule.grad_scale).clamp(-rule.clip_value, rule.clip_value)
    if rule.clip_norm < math.inf:
        norm = grad.square().sum(dim=1, keepdim=True).sqrt()
        grad = torch.where(norm > rule.clip_norm, grad * (rule.clip_norm / norm), grad)
    if rule.is_coupled:
        grad = grad + (rule.l2 * weights + rule.l1 * weights.sign())
    return grad


def catch_up_(weights: Tensor, state: Sequence[Tensor], rule: RowRule, lr: Tensor, step: int) -> None:
    """Make up for the steps that rows missed since ``state[-1] int32[n]``, and note that they are at `step`.

    Args:
        weights: [n, D].
        state: as the rule names it.
        rule: of mode "lazy_global".
        lr: the rule's rate for each row, [n, 1].
        step: the update that follows.
    """
    last = state[-1].to(weights.dtype)[:, None]
    missed = step - 1 - last
    if rule.kind == "adamw":
        weights *= (1.0 - lr * rule.weight_decay) ** missed
    if rule.kind == "rmsprop":
        state[0].mul_(rule.beta2**missed)
    else:
        weights -= lr * _drift(state, rule, last, missed)
        state[0].mul_(rule.beta1**missed)
    if rule.kind in ("adam", "adamw"):
        state[1].mul_(rule.beta2**missed)
    state[-1].fill_(step)


def _drift(state: Sequence[Tensor], rule: RowRule, last: Tensor, missed: Tensor) -> Tensor:
    """How far rows moved in the steps that they missed, for a learning rate of one."""
    momenta = rule.beta1 * (1.0 - rule.beta1**missed) / (1.0 - rule.beta1) * state[0]
    if rule.kind == "momentum":
        return momenta
    if rule.kind == "nesterov":
        return rule.beta1 * momenta
    seen = last.clamp(min=1)  # a row that no step touched has no momentum
    root = state[1].sqrt() / (1.0 - rule.beta2**seen).sqrt()
    eps = rule.eps + rule.eps_hat / (1.0 - rule.beta2**seen).sqrt()
    drift = momenta / (1.0 - rule.beta1**seen) / (root + eps)
    return torch.where(last > 0, drift, 0.0)


def move_(weights: Tensor, state: Sequence[Tensor], grad: Tensor, rule: RowRule, lr: Tensor, step: int) -> None:
    """Apply the rule's formula.

    Args:
        weights: [n, D].
        state: as the rule names it, each [n, D], or [n] for one number a row.
        grad: [n, D].
        rule: names the formula.
        lr: the rule's rate for each row, [n, 1].
        step: number of the update, from 1.
    """
    if rule.kind == "sgd":
        weights -= lr * grad
    elif rule.kind in ("momentum", "nesterov"):
        grad = rule.scales(step)[0] * grad
        state[0].mul_(rule.beta1).add_(grad)
        weights -= lr * (state[0] if rule.kind == "momentum" else grad + rule.beta1 * state[0])
    elif rule.kind == "adagrad":
        state[0].add_(grad * grad)
        weights -= lr * (grad / (state[0].sqrt() + rule.eps))
    elif rule.kind == "rowwise_adagrad":
        state[0].add_((grad * grad).mean(dim=1))
        weights -= lr / (state[0][:, None].sqrt() + rule.eps) * grad
    elif rule.kind == "rmsprop":
        state[0].mul_(rule.beta2).add_((1.0 - rule.beta2) * (grad * grad))
        weights -= lr * (grad / (state[0].sqrt() + rule.eps))
    elif rule.kind == "ftrl":
        _ftrl(weights, state, grad, rule, lr)
    else:
        _adam(weights, state, grad, rule, lr, step)


def _adam(weights: Tensor, state: Sequence[Tensor], grad: Tensor, rule: RowRule, lr: Tensor, step: int) -> None:
    first, second = state[:2]
    if rule.kind == "adamw":
        weights *= 1.0 - lr * rule.weight_decay
    first += (1.0 - rule.beta1) * (grad - first)
    second.mul_(rule.beta2).add_((1.0 - rule.beta2) * (grad * grad))
    first_scale, root_scale = rule.scales(step)
    eps = rule.eps + rule.eps_hat * root_scale
    weights -= lr * first_scale * (first / (second.sqrt() * root_scale + eps))


def _ftrl(weights: Tensor, state: Sequence[Tensor], grad: Tensor, rule: RowRule, lr: Tensor) -> None:
    total, linear = state
    before = (total + rule.eps).sqrt()
    total += grad * grad
    root = (total + rule.eps).sqrt()
    linear += grad - (root - before) / lr * weights
    shrunk = torch.where(linear < 0, -rule.l1, rule.l1) - linear
    moved = shrunk / ((root + rule.beta) / lr + rule.l2)
    weights.copy_(torch.where(linear.abs() <= rule.l1, 0.0, moved))
