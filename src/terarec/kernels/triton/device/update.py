"""The fused update: the sum of a row's gradients, then the row's step, without the sums passing through memory."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device import rules
from terarec.kernels.triton.device.rounding import round_rows
from terarec.kernels.triton.device.segments import segment_gradients

ROWWISE_ADAGRAD = tl.constexpr(rules.ROWWISE_ADAGRAD)


@triton.jit
def _load_states(first_state, second_state, row, place, is_row, mask, RULE: tl.constexpr, STATES: tl.constexpr):
    """The states of a tile, float32 [SEGMENTS, BLOCK], or [SEGMENTS, 1] of one a row; zeros in the place of others."""
    first = tl.zeros(place.shape, tl.float32)
    second = first
    if RULE == ROWWISE_ADAGRAD:
        first = tl.load(first_state + row[:, None], mask=is_row[:, None], other=0.0)
    elif STATES > 0:
        first = tl.load(first_state + place, mask=mask, other=0.0)
    if STATES > 1:
        second = tl.load(second_state + place, mask=mask, other=0.0)
    return first, second


@triton.jit
def _store_states(
    first_state, second_state, first, second, row, place, is_row, mask, RULE: tl.constexpr, STATES: tl.constexpr
):
    if RULE == ROWWISE_ADAGRAD:
        tl.store(first_state + row[:, None], first, mask=is_row[:, None])
    elif STATES > 0:
        tl.store(first_state + place, first, mask=mask)
    if STATES > 1:
        tl.store(second_state + place, second, mask=mask)


@triton.jit
def _store_weights(weights, weight, row, column, place, mask, stream):
    """Write a tile of weights in the arena's type, narrow ones rounded stochastically."""
    if (weights.dtype.element_ty == tl.bfloat16) | (weights.dtype.element_ty == tl.float16):
        narrow = round_rows(weight, row, column, stream.to(tl.int64), weights.dtype.element_ty)
        tl.store(weights + place, narrow, mask=mask)
    else:
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_keys", "no_row", "step", "stream", "first_row", "num_rows"])
def update_kernel(
    weights,  # [V, WIDTH]
    first_state,  # float32[V, WIDTH] or float32[V]
    second_state,  # float32[V, WIDTH]
    last_steps,  # int32[V], if CATCHES_UP
    touched,  # uint8[V], if SWEEPS: written by the first pass, read by the sweeps
    grads,
    sources,
    scales,
    places,
    winners,
    factors,  # float32[N]: of the learning rate of each key's table, if HAS_FACTORS
    sorted_rows,
    segments,
    starts,
    key_parts,
    part_parts,
    num_keys,
    no_row,
    first_row,  # of a sweep
    num_rows,  # of a sweep
    step,
    stream,  # int64: of the roundings
    lr,
    eps,
    eps_hat,
    beta1,
    beta2,
    one_less_beta1,
    one_less_beta2,
    first_scale,
    root_scale,
    weight_decay,
    beta,
    l1,
    l2,
    grad_scale,
    clip_value,
    clip_norm,
    coupled_l1,
    coupled_l2,
    RULE: tl.constexpr,
    STATES: tl.constexpr,  # of the rule, last_steps aside
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    HAS_MAX: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    IS_TRANSFORMED: tl.constexpr,
    CATCHES_UP: tl.constexpr,
    SWEEPS: tl.constexpr,
    IS_SWEEP: tl.constexpr,
):
    """Update a tile of SEGMENTS whole rows: those of segments, or in a sweep those that no key touched.

    Programs past the last segment do nothing, so that the host need not know how many there are.
    """
    first = tl.program_id(0).to(tl.int64) * SEGMENTS
    one = tl.arange(0, SEGMENTS)
    column = tl.arange(0, BLOCK)
    count = num_rows.to(tl.int64) if IS_SWEEP else tl.load(segments + num_keys - 1).to(tl.int64)
    if first < count:
        is_row = first + one < count
        rate = lr + tl.zeros((SEGMENTS, 1), tl.float32)
        if IS_SWEEP:
            row = first_row + first + one
            is_row = is_row & (tl.load(touched + row, mask=is_row, other=1) == 0)
            grad = tl.zeros((SEGMENTS, BLOCK), tl.float32)
        else:
            start = tl.load(starts + first + one, mask=is_row, other=0)
            row = tl.load(sorted_rows + start, mask=is_row, other=0).to(tl.int64)
            is_row = is_row & (row != no_row)
            grad = segment_gradients(
                grads, sources, scales, places, winners, starts, key_parts, part_parts, first + one, is_row,
                WIDTH, BLOCK, SEGMENTS, IS_PLAIN, HAS_MAX,
            )  # fmt: skip
            if SWEEPS:
                tl.store(touched + row, tl.full((SEGMENTS,), 1, tl.uint8), mask=is_row)
            if HAS_FACTORS:
                rate *= tl.load(factors + start, mask=is_row, other=1.0)[:, None]
        mask = is_row[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        weight = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
        one_state, other_state = _load_states(first_state, second_state, row, place, is_row, mask, RULE, STATES)
        if IS_TRANSFORMED:
            grad = rules.transform(grad, weight, grad_scale, clip_value, clip_norm, coupled_l1, coupled_l2)
        if CATCHES_UP:
            last = tl.load(last_steps + row, mask=is_row, other=0)[:, None]
            weight, one_state, other_state = rules.catch_up(
                weight, one_state, other_state, last, rate, step, eps, eps_hat, one_less_beta1, one_less_beta2,
                weight_decay, RULE,
            )  # fmt: skip
            tl.store(last_steps + row, tl.zeros((SEGMENTS,), tl.int32) + step, mask=is_row)
        weight, one_state, other_state = rules.move(
            weight, one_state, other_state, grad, rate, eps, eps_hat, beta1, beta2, one_less_beta1, one_less_beta2,
            first_scale, root_scale, weight_decay, beta, l1, l2, WIDTH, RULE,
        )  # fmt: skip
        _store_states(first_state, second_state, one_state, other_state, row, place, is_row, mask, RULE, STATES)
        _store_weights(weights, weight, row, column, place, mask, stream)


@triton.jit(do_not_specialize=["num_keys", "no_row", "first_row"])
def squares_kernel(
    grads,
    sources,
    scales,
    places,
    winners,
    sorted_rows,
    segments,
    starts,
    key_parts,
    part_parts,
    squares,  # float64[N], zeros: of a segment the sum of the squares of its row's gradient
    num_keys,
    no_row,
    first_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    HAS_MAX: tl.constexpr,
):
    """Square the summed gradients of a tile of segments; rows before `first_row` do not count."""
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    is_row = segment < tl.load(segments + num_keys - 1).to(tl.int64)
    start = tl.load(starts + segment, mask=is_row, other=0)
    row = tl.load(sorted_rows + start, mask=is_row, other=0).to(tl.int64)
    is_row = is_row & (row != no_row) & (row >= first_row)
    grad = segment_gradients(
        grads, sources, scales, places, winners, starts, key_parts, part_parts, segment, is_row,
        WIDTH, BLOCK, SEGMENTS, IS_PLAIN, HAS_MAX,
    ).to(tl.float64)  # fmt: skip
    tl.store(squares + segment, tl.sum(grad * grad, 1), mask=is_row)
