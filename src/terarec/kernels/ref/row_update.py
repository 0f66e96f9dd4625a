"""The exact row update: duplicates are summed first, then each row that moves does so once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError, LaidGradient, RowRule
from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.ref.rounding import round_rows
from terarec.kernels.ref.row_rules import catch_up_, move_, transform
from terarec.kernels.swept_tables import swept_ranges


class _RowGradients(NamedTuple):
    """Distinct arena rows int64[n], the factor of the learning rate of each, and their gradients [n, D]."""

    rows: Tensor
    factors: Tensor
    grad: Tensor


def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
) -> None:
    """Update the rows of `weights` and `state` that move under `rule`, in place.

    Args:
        weights: [V, D], of any floating type.
        state: the rule's state, each [V, D] or [V].
        gradients: of one or more lookups in these weights.
        rule: which rows move, and how.
        step: number of this update, from 1.
        table_lr: float32[T] in host memory, factors of the learning rate by table of the layouts; 0: the table stays.
        rounding_seed: of the random bits with which weights of 16 bits are rounded.

    Raises:
        BadKeyError: a key outside its table; nothing is changed.
        ConfigError: offsets that fall or do not cover the keys; nothing is changed.
    """
    touched = _combined(weights, gradients, table_lr)
    if rule.sweeps:
        touched = _with_other_rows(touched, gradients, table_lr)
    rows, factors, grad = touched
    moved = weights[rows].to(grad.dtype)
    held = [tensor[rows] for tensor in state]
    lr = rule.rate * factors[:, None]
    grad = transform(grad, moved, rule)
    if rule.catches_up:
        catch_up_(moved, held, rule, lr, step)
    move_(moved, held, grad, rule, lr, step)
    is_narrow = weights.dtype in (torch.bfloat16, torch.float16)
    weights[rows] = round_rows(moved, weights.dtype, rows, seed=rounding_seed, step=step) if is_narrow else moved
    for tensor, values in zip(state, held, strict=True):
        tensor[rows] = values


def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[LaidGradient],
    rule: RowRule,
    table_lr: Tensor | None = None,
    first_row: int = 0,
) -> float:
    """The L2 norm over all rows' summed gradients times ``rule.grad_scale``; of tables with factor 0, none.

    Args:
        weights: as for `row_update_`; not changed.
        gradients: of one or more lookups in them.
        rule: for its `grad_scale`.
        table_lr: as for `row_update_`.
        first_row: arena rows before it do not count.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    rows, _, grad = _combined(weights, gradients, table_lr)
    return abs(rule.grad_scale) * float(grad[rows >= first_row].double().norm())


def _combined(weights: Tensor, gradients: Sequence[LaidGradient], table_lr: Tensor | None) -> _RowGradients:
    """The rows with a key in a table that learns, each with the sum of its gradients."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    all_rows, all_factors, all_values = [], [], []
    for index, gradient in enumerate(gradients):
        try:
            rows, values = spread_gradient(*gradient, weights=weights)
        except BadKeyError as error:
            error.gradient = index
            raise
        factors = _key_factors(gradient, table_lr)
        learns = factors != 0
        all_rows.append(rows[learns])
        all_factors.append(factors[learns])
        all_values.append(values[learns].to(dtype))
    rows, group = torch.unique(torch.cat(all_rows), return_inverse=True)
    values = torch.cat(all_values)
    grad = values.new_zeros(rows.numel(), values.shape[1]).index_add_(0, group, values)
    factors = grad.new_empty(rows.numel()).index_copy_(0, group, torch.cat(all_factors).to(dtype))
    return _RowGradients(rows, factors, grad)


def _key_factors(gradient: LaidGradient, table_lr: Tensor | None) -> Tensor:
    """The factor of the learning rate of each key's table, float32[N]."""
    if table_lr is None:
        return torch.ones(gradient.keys.shape, device=gradient.keys.device)
    num_features = gradient.layout.shape[0]
    batch_size = (gradient.offsets.numel() - 1) // num_features
    of_feature = table_lr[gradient.layout[:, 3].cpu()].to(gradient.keys.device)
    if batch_size == 0:
        return of_feature[:0]
    return of_feature.repeat_interleave(gradient.offsets[::batch_size].diff())


def _with_other_rows(
    touched: _RowGradients, gradients: Sequence[LaidGradient], table_lr: Tensor | None
) -> _RowGradients:
    """`touched`, and with gradients of zero all other rows of the tables that are looked up and learn."""
    ranges = swept_ranges(gradients, table_lr)
    if not ranges:
        return touched
    device = touched.rows.device
    everything = torch.cat([torch.arange(base, base + rows, device=device) for base, rows, _ in ranges])
    factors = torch.cat([torch.full((rows,), factor) for _, rows, factor in ranges]).to(touched.factors)
    rest = ~torch.isin(everything, touched.rows)
    zeros = touched.grad.new_zeros(int(rest.sum()), touched.grad.shape[1])
    return _RowGradients(
        torch.cat([touched.rows, everything[rest]]),
        torch.cat([touched.factors, factors[rest]]),
        torch.cat([touched.grad, zeros]),
    )
