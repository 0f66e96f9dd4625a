# SPDX-License-Identifier: Apache-2.0
"""The exact row update: duplicates are summed first, then each touched row is updated once.

Rows of bfloat16 and float16 are rounded stochastically, with bits that depend on counters alone: `mix` being
SplitMix64's finalizer and STEP its increment, as in `terarec.kernels.ref.rows`, update number `step` has
``stream = mix(mix(seed) + step * STEP)``, its row of number r ``stream_r = mix(stream + (r + 1) * STEP)``, and columns
2 j and 2 j + 1 of the row take the high and the low half of ``mix(stream_r + (j + 1) * STEP)``.

Of the bits that the narrow type has no room for, as many random bits are added before they are cut off: a value
between two neighbours becomes the upper one with the probability of its distance from the lower, so the mean is the
value. Finite values stay finite: what would round past the largest number becomes that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError, KernelGradient, full_update_ranges
from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.row_rules import RowRule

_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HIDDEN_BIT = 0x800000


def round_rows(values: Tensor, dtype: torch.dtype, rows: Tensor, *, seed: int, step: int) -> Tensor:
    """Return `values` as `dtype`, rounded up or down at random without bias.

    Args:
        values: float32[n, D].
        dtype: `torch.bfloat16` or `torch.float16`.
        rows: Numbers int64[n] of the rows, on which the random bits depend.
        seed: Any integer.
        step: Number of the update.

    Returns:
        dtype[n, D].
    """
    noise = _noise(rows, values.shape[1], seed, step)
    # In int64, since torch has no shifts of unsigned 32 bits: the sign bit must not spread.
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    magnitude, sign = bits & _MAGNITUDE, (bits >> 16) & 0x8000
    rounded = _to_bfloat16(magnitude, noise) if dtype == torch.bfloat16 else _to_float16(magnitude, noise)
    return (sign | rounded).to(torch.int32).to(torch.int16).view(dtype)


def _to_bfloat16(magnitude: Tensor, noise: Tensor) -> Tensor:
    # Adding to the bits of the magnitude carries into the exponent, which is rounding up to the next power of two.
    rounded = ((magnitude + (noise & 0xFFFF)) >> 16).clamp(max=0x7F7F)
    # Beyond infinity are the NaNs, of which any becomes the quiet one: cutting bits off could make infinity of it.
    not_finite = torch.where(magnitude == _INFINITY, 0x7F80, 0x7FC0)
    return torch.where(magnitude >= _INFINITY, not_finite, rounded)


def _to_float16(magnitude: Tensor, noise: Tensor) -> Tensor:
    exponent = magnitude >> 23
    # Exponents of float16 have the bias 15 instead of 127.
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    # Multiples of 2^-24: a float is its mantissa * 2^(exponent - 150). What lies below 2^-31 has no bit left to round.
    dropped = (126 - exponent).clamp(13, 31)
    mantissa = torch.where(exponent > 94, (magnitude & (_HIDDEN_BIT - 1)) | _HIDDEN_BIT, 0)
    small = (mantissa + (noise & ((1 << dropped) - 1))) >> dropped
    rounded = torch.where(exponent > 112, normal, small).clamp(max=0x7BFF)
    not_finite = torch.where(magnitude == _INFINITY, 0x7C00, 0x7E00)
    return torch.where(magnitude >= _INFINITY, not_finite, rounded)


def _noise(rows: Tensor, width: int, seed: int, step: int) -> Tensor:
    """Return 32 random bits for each column of each row, int64[n, width]."""
    # The products and sums of int64 tensors wrap modulo 2^64 as those of uint64 do; only shifts differ.
    stream = _mix(_mix(torch.tensor(_wrapped(seed))) + _wrapped(step * _STEP))
    of_row = _mix(stream.to(rows.device) + (rows + 1) * _wrapped(_STEP))
    pairs = torch.arange(1, (width + 1) // 2 + 1, device=rows.device) * _wrapped(_STEP)
    bits = _mix(of_row[:, None] + pairs)
    # One draw serves two columns; of an odd width the last half is cut off.
    halves = torch.stack([_shifted(bits, 32), bits & 0xFFFFFFFF], dim=2)
    return halves.flatten(1)[:, :width]


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _wrapped(_FACTORS[0])
    bits = (bits ^ _shifted(bits, 27)) * _wrapped(_FACTORS[1])
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Return an unsigned shift to the right of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _wrapped(value: int) -> int:
    """Return `value` modulo 2^64 as an int64."""
    return (value + 2**63) % 2**64 - 2**63


def transform(grad: Tensor, weights: Tensor, rule: RowRule) -> Tensor:
    """Return the gradients [n, D] of rows `weights` as the rule's formula takes them: scaled, clipped, regularised."""
    if not rule.is_transformed:
        return grad
    grad = (grad * rule.grad_scale).clamp(-rule.clip_value, rule.clip_value)
    if rule.clip_norm < math.inf:
        norm = grad.square().sum(dim=1, keepdim=True).sqrt()
        grad = torch.where(norm > rule.clip_norm, grad * (rule.clip_norm / norm), grad)
    if rule.is_coupled:
        grad = grad + (rule.l2 * weights + rule.l1 * weights.sign())
    return grad


class _RowGradients(NamedTuple):
    """Distinct arena rows int64[n], where they lie, the factors of their learning rates, and gradients [n, D]."""

    rows: Tensor
    places: Tensor
    factors: Tensor
    grad: Tensor


def row_update_(
    weights: Tensor,
    state: Sequence[Tensor],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    step: int,
    table_lr: Tensor | None = None,
    rounding_seed: int = 0,
    row_numbers: Tensor | None = None,
) -> None:
    """Update the rows of `weights` and `state` that move under `rule`, in place.

    Args:
        weights: [V, D], of any floating type.
        state: The rule's state, each [V, D] or [V].
        gradients: Gradients of one or more lookups in these weights.
        rule: Which rows move, and how.
        step: Number of this update, from 1.
        table_lr: float32[T] in host memory, factors of the learning rate by table of the layouts; 0: the table stays.
        rounding_seed: Seed of the random bits that round weights of 16 bits.
        row_numbers: Numbers of the rows on which these bits depend; see `rounding_numbers`.

    Raises:
        BadKeyError: A key outside its table; nothing is changed.
        ConfigError: Offsets that decrease or do not cover the keys; nothing is changed.
    """
    touched = _combined(weights, gradients, table_lr)
    if rule.updates_all_rows:
        touched = _with_other_rows(touched, gradients, table_lr)
    rows, places, factors, grad = touched
    # Copies: indexing gathers, and only the finished rows are written back.
    moved = weights[places].to(grad.dtype)
    state_of_rows = [tensor[places] for tensor in state]
    lr = rule.rate * factors[:, None]
    grad = transform(grad, moved, rule)
    # The steps that a row missed come before this one, so its gradient has no part in them.
    if rule.catches_up:
        last = state_of_rows[-1].to(moved.dtype)[:, None]
        rule.catch_up_(moved, state_of_rows, lr, last, step - 1 - last)
        # Written below with the other states, to the rows of this step alone.
        state_of_rows[-1].fill_(step)
    rule.update_(moved, state_of_rows, grad, lr, step)
    is_narrow = weights.dtype in (torch.bfloat16, torch.float16)
    if is_narrow:
        # By number, not by position, so that a row in a slot of a fast tier, or on another rank, gets the same bits.
        numbers = rounding_numbers(rows, row_numbers)
        moved = round_rows(moved, weights.dtype, numbers, seed=rounding_seed, step=step)
    weights[places] = moved
    for tensor, values in zip(state, state_of_rows, strict=True):
        tensor[places] = values


def rounding_numbers(rows: Tensor, row_numbers: Tensor | None) -> Tensor:
    """Return the numbers int64[n] of ``rows int64[n]`` of an arena on which the bits of their rounding depend.

    Args:
        rows: Arena rows.
        row_numbers: int64[V], the numbers of all rows; or int64[S, 3], the first row of each of S segments, rising
            from 0, and the factor and the shift that make numbers of rows; or None for the rows themselves.
    """
    if row_numbers is None:
        return rows
    if row_numbers.dim() == 1:
        return row_numbers[rows]
    first, factor, shift = row_numbers.T.contiguous().unbind()
    segment = torch.searchsorted(first, rows, right=True) - 1
    return rows * factor[segment] + shift[segment]


def row_gradient_norm(
    weights: Tensor,
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    table_lr: Tensor | None = None,
    first_row: int = 0,
) -> float:
    """Return the L2 norm over all rows' summed gradients times ``rule.grad_scale``; of tables with factor 0, none.

    Args:
        weights: Weights as in `row_update_`; not changed.
        gradients: Gradients of one or more lookups in these weights.
        rule: Update rule, of which only `grad_scale` is used.
        table_lr: Factors as in `row_update_`.
        first_row: Arena rows before it do not count.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    rows, _, _, grad = _combined(weights, gradients, table_lr)
    # In double: squares of many rows overflow float32 or lose the small ones.
    return abs(rule.grad_scale) * float(grad[rows >= first_row].double().norm())


def _combined(weights: Tensor, gradients: Sequence[KernelGradient], table_lr: Tensor | None) -> _RowGradients:
    """Return the rows with a key in a trained table, each with the sum of its gradients."""
    # Sums and formulas are in float32 for narrow rows, and in float64 for tests of gradients.
    dtype = torch.promote_types(weights.dtype, torch.float32)
    all_rows, all_places, all_factors, all_values = [], [], [], []
    for index, gradient in enumerate(gradients):
        try:
            rows, values = spread_gradient(*gradient[:5], weights=weights, places=gradient.places)
        except BadKeyError as error:
            error.gradient = index
            raise
        factors = _key_factors(gradient, table_lr)
        is_trained = factors != 0
        all_rows.append(rows[is_trained])
        all_places.append((rows if gradient.places is None else gradient.places)[is_trained])
        all_factors.append(factors[is_trained])
        all_values.append(values[is_trained].to(dtype))
    # Over all gradients at once: features and lookups that share a row give it one update, not several.
    rows, group = torch.unique(torch.cat(all_rows), return_inverse=True)
    values = torch.cat(all_values)
    grad = values.new_zeros(rows.numel(), values.shape[1]).index_add_(0, group, values)
    # All keys of a row have the same factor and place, so that it does not matter which of them is copied.
    factors = grad.new_empty(rows.numel()).index_copy_(0, group, torch.cat(all_factors).to(dtype))
    places = torch.empty_like(rows).index_copy_(0, group, torch.cat(all_places))
    return _RowGradients(rows, places, factors, grad)


def _key_factors(gradient: KernelGradient, table_lr: Tensor | None) -> Tensor:
    """Return the factor of the learning rate of each key's table, float32[N]."""
    if table_lr is None:
        return torch.ones(gradient.keys.shape, device=gradient.keys.device)
    num_features = gradient.layout.shape[0]
    batch_size = (gradient.offsets.numel() - 1) // num_features
    of_feature = table_lr[gradient.layout[:, 3].cpu()].to(gradient.keys.device)
    # A step of 0 is not allowed in the slice below.
    if batch_size == 0:
        return of_feature[:0]
    return of_feature.repeat_interleave(gradient.offsets[::batch_size].diff())


def _with_other_rows(
    touched: _RowGradients, gradients: Sequence[KernelGradient], table_lr: Tensor | None
) -> _RowGradients:
    """Return `touched`, and with gradients of zero all other rows of the tables that are looked up and learn."""
    ranges = full_update_ranges(gradients, table_lr)
    if not ranges:
        return touched
    device = touched.rows.device
    everything = torch.cat([torch.arange(base, base + rows, device=device) for base, rows, _ in ranges])
    factors = torch.cat([torch.full((rows,), factor) for _, rows, factor in ranges]).to(touched.factors)
    # Rows with a gradient are in `touched` already; a second entry would update them twice.
    rest = ~torch.isin(everything, touched.rows)
    zeros = touched.grad.new_zeros(int(rest.sum()), touched.grad.shape[1])
    rows = torch.cat([touched.rows, everything[rest]])
    return _RowGradients(
        rows,
        rows,
        torch.cat([touched.factors, factors[rest]]),
        torch.cat([touched.grad, zeros]),
    )
