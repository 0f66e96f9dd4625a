"""Launcher of the exact row update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import RULE_KINDS, LaidGradient, RowRule
from terarec.kernels.cpu.host import _embedding
from terarec.kernels.cpu.reports import raise_if_bad

_MAX_KEYS = 2**32 - 1  # the core counts the gradients of a table in 32 bits


def row_update_(
    weights: Tensor, state: Sequence[Tensor], gradients: Sequence[LaidGradient], rule: RowRule, step: int
) -> None:
    """Update the touched rows of `weights` and `state` in place; the same bits for any number of threads.

    Args:
        weights: float32[V, D], contiguous.
        state: the rule's state, each float32[V, D] or float32[V], contiguous.
        gradients: of one or more lookups in these weights.
        rule: what to do with a row's gradient.
        step: number of this update, from 1; Adam's bias correction needs it.

    Raises:
        BadKeyError: a key outside its table; nothing is changed.
        ConfigError: offsets that fall or do not cover the keys; nothing is changed.
        KernelError: rows that are not contiguous, or 2^32 keys and more.
    """
    if not all(held.is_contiguous() for held in (weights, *state)):
        raise KernelError("row_update_: got weights or state that are not contiguous, expected contiguous tensors")
    if sum(gradient.keys.shape[0] for gradient in gradients) > _MAX_KEYS:
        raise KernelError(f"row_update_: got more than {_MAX_KEYS} keys, expected fewer in one update")
    held = [_plain(gradient) for gradient in gradients]  # keeps copies alive during the call
    first, second = (*(tensor.data_ptr() for tensor in state), 0, 0)[:2]
    report = _embedding.row_update(
        [weights.data_ptr(), first, second, weights.shape[1], torch.get_num_threads()],
        RULE_KINDS.index(rule.kind),
        _constants(rule, step),
        [_describe(gradient) for gradient in held],
    )
    raise_if_bad(report, [gradient.keys.shape[0] for gradient in held], [gradient.layout for gradient in held])


def _plain(gradient: LaidGradient) -> LaidGradient:
    grad = gradient.grad
    if grad.shape[1] > 1 and grad.stride(1) != 1:
        grad = grad.contiguous()
    return LaidGradient(gradient.keys.contiguous(), gradient.offsets.contiguous(), grad, gradient.layout)


def _describe(gradient: LaidGradient) -> list[int]:
    keys, offsets, grad, layout = gradient
    num_features = layout.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    return [
        keys.data_ptr(),
        keys.shape[0],
        offsets.data_ptr(),
        layout.data_ptr(),
        num_features,
        batch_size,
        grad.data_ptr(),
        grad.stride(0),
    ]


def _constants(rule: RowRule, step: int) -> list[float]:
    """lr, eps, beta2, 1 - beta1, 1 - beta2 and Adam's factor of the root, Adam's lr being corrected for its bias."""
    lr, second_scale = rule.lr, 1.0
    if rule.kind == "adam":
        lr /= 1.0 - rule.beta1**step
        second_scale = 1.0 / math.sqrt(1.0 - rule.beta2**step)
    return [lr, rule.eps, rule.beta2, 1.0 - rule.beta1, 1.0 - rule.beta2, second_scale]
