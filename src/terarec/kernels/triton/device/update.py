# SPDX-License-Identifier: Apache-2.0
"""The fused update: the sum of a row's gradients, then the row's step, without the sums passing through memory."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.row_rules import RULE_KINDS
from terarec.kernels.triton.device.rows import column_bits
from terarec.kernels.triton.device.segments import segment_gradients

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
HIDDEN_BIT = tl.constexpr(0x800000)


@triton.jit
def _to_bfloat16(magnitude, noise):
    rounded = tl.minimum((magnitude + (noise & 0xFFFF)) >> 16, 0x7F7F)
    not_finite = tl.where(magnitude == INFINITY, 0x7F80, 0x7FC0)
    return tl.where(magnitude >= INFINITY, not_finite, rounded.to(tl.int32))


@triton.jit
def _to_float16(magnitude, noise):
    exponent = (magnitude >> 23).to(tl.int32)
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    # Multiples of 2^-24: a float is its mantissa * 2^(exponent - 150). What lies below 2^-31 has no bit left to round.
    dropped = tl.minimum(tl.maximum(126 - exponent, 13), 31).to(tl.uint32)
    mantissa = tl.where(exponent > 94, (magnitude & (HIDDEN_BIT - 1)) | HIDDEN_BIT, 0)
    one = tl.full(magnitude.shape, 1, tl.uint32)
    small = (mantissa + (noise & ((one << dropped) - 1))) >> dropped
    rounded = tl.minimum(tl.where(exponent > 112, normal, small), 0x7BFF)
    not_finite = tl.where(magnitude == INFINITY, 0x7C00, 0x7E00)
    return tl.where(magnitude >= INFINITY, not_finite, rounded.to(tl.int32))


@triton.jit
def round_rows(values, row, column, stream, dtype: tl.constexpr):
    """Return ``values float32 [ROWS, BLOCK]`` of rows of these numbers as `dtype`, bfloat16 or float16."""
    noise = column_bits(stream, row, column)
    bits = values.to(tl.uint32, bitcast=True)
    magnitude, sign = bits & MAGNITUDE, (bits >> 16) & 0x8000
    rounded = _to_bfloat16(magnitude, noise) if dtype == tl.bfloat16 else _to_float16(magnitude, noise)
    return (sign.to(tl.int32) | rounded).to(tl.uint16).to(dtype, bitcast=True)


SGD = tl.constexpr(RULE_KINDS.index("sgd"))
MOMENTUM = tl.constexpr(RULE_KINDS.index("momentum"))
NESTEROV = tl.constexpr(RULE_KINDS.index("nesterov"))
ADAGRAD = tl.constexpr(RULE_KINDS.index("adagrad"))
ROWWISE_ADAGRAD = tl.constexpr(RULE_KINDS.index("rowwise_adagrad"))
RMSPROP = tl.constexpr(RULE_KINDS.index("rmsprop"))
ADAM = tl.constexpr(RULE_KINDS.index("adam"))
ADAMW = tl.constexpr(RULE_KINDS.index("adamw"))
FTRL = tl.constexpr(RULE_KINDS.index("ftrl"))


@triton.jit
def transform(grad, weight, grad_scale, clip_value, clip_norm, l1, l2):
    """Return the gradients that the formula uses: scaled, clipped, regularised; NaN stays NaN."""
    grad *= grad_scale
    # Not minimum and maximum, which would turn NaN into the bound.
    grad = tl.where(grad > clip_value, clip_value, tl.where(grad < -clip_value, -clip_value, grad))
    # (ROWS, BLOCK) -> (ROWS, 1). Columns behind the width are zeros and do not count.
    norm = tl.sqrt_rn(tl.sum(grad * grad, 1))[:, None]
    limit = tl.div_rn(clip_norm + tl.zeros_like(norm), tl.where(norm > clip_norm, norm, 1.0))
    grad *= tl.where(norm > clip_norm, limit, 1.0)
    sign = tl.where(weight > 0.0, 1.0, tl.where(weight < 0.0, -1.0, 0.0))
    return grad + (l2 * weight + l1 * sign)


@triton.jit
def power(one_less_base, exponent):
    """Return (1 - one_less_base) ** exponent in double, for bases near 1 and large exponents: float64 [ROWS, 1]."""
    # In float32 1 - beta would lose four digits, which a power of thousands of steps shows.
    exponent = exponent.to(tl.float64)
    base = 1.0 - (one_less_base + tl.zeros(exponent.shape, tl.float32)).to(tl.float64)
    # `tl` has no power of doubles; without the first case 0 * log2(0) would be NaN.
    return tl.where(exponent == 0.0, 1.0, tl.exp2(exponent * tl.log2(base)))


@triton.jit
def catch_up(
    weight,
    first,
    second,
    last,
    lr,
    step,
    eps,
    eps_hat,
    one_less_beta1,
    one_less_beta2,
    weight_decay,
    RULE: tl.constexpr,
):
    """Return (weight, first, second) after the steps that rows missed since ``last int32 [ROWS, 1]``."""
    missed = step - 1 - last
    if RULE == ADAMW:
        weight *= power(lr * weight_decay, missed).to(tl.float32)
    if RULE == RMSPROP:
        first *= power(one_less_beta2, missed).to(tl.float32)
    else:
        decay = power(one_less_beta1, missed)
        momenta = (1.0 - one_less_beta1) * ((1.0 - decay) / one_less_beta1).to(tl.float32)
        if RULE == NESTEROV:
            momenta *= 1.0 - one_less_beta1
        drift = momenta * first
        if (RULE == ADAM) | (RULE == ADAMW):
            seen = tl.maximum(last, 1)  # a row that no step touched has no momentum
            bias = (1.0 - power(one_less_beta1, seen)).to(tl.float32)
            root_bias = tl.sqrt(1.0 - power(one_less_beta2, seen)).to(tl.float32)
            root = tl.div_rn(tl.sqrt_rn(second) + eps_hat, root_bias + tl.zeros_like(second))
            drift = tl.where(last > 0, tl.div_rn(tl.div_rn(drift, bias + tl.zeros_like(drift)), root + eps), 0.0)
            second *= power(one_less_beta2, missed).to(tl.float32)
        weight -= lr * drift
        first *= decay.to(tl.float32)
    return weight, first, second


@triton.jit
def ftrl(weight, total, linear, grad, lr, eps, beta, l1, l2):
    """Return (weight, sum, linear) after FTRL's step."""
    before = tl.sqrt_rn(total + eps)
    total += grad * grad
    root = tl.sqrt_rn(total + eps)
    lr += tl.zeros_like(root)
    linear += grad - tl.div_rn(root - before, lr) * weight
    shrunk = tl.where(linear < 0.0, -l1, l1) - linear
    moved = tl.div_rn(shrunk, tl.div_rn(root + beta, lr) + l2)
    return tl.where(tl.abs(linear) <= l1, 0.0, moved), total, linear


@triton.jit
def move(
    weight, first, second, grad, lr, eps, eps_hat, beta1, beta2, one_less_beta1, one_less_beta2, first_scale,
    root_scale, weight_decay, beta, l1, l2, WIDTH: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Return (weight, first, second) after the rule's step; ``lr [ROWS, 1]``, states as the rule names them."""
    if RULE == SGD:
        weight -= lr * grad
    elif (RULE == MOMENTUM) | (RULE == NESTEROV):
        grad *= first_scale
        first = beta1 * first + grad
        weight -= lr * (first if RULE == MOMENTUM else grad + beta1 * first)
    elif RULE == ADAGRAD:
        first += grad * grad
        weight -= lr * tl.div_rn(grad, tl.sqrt_rn(first) + eps)
    elif RULE == ROWWISE_ADAGRAD:
        first += (tl.sum(grad * grad, 1) / WIDTH)[:, None]
        weight -= tl.div_rn(lr + tl.zeros_like(first), tl.sqrt_rn(first) + eps) * grad
    elif RULE == RMSPROP:
        first = beta2 * first + one_less_beta2 * (grad * grad)
        weight -= lr * tl.div_rn(grad, tl.sqrt_rn(first) + eps)
    elif RULE == FTRL:
        weight, first, second = ftrl(weight, first, second, grad, lr, eps, beta, l1, l2)
    else:
        if RULE == ADAMW:
            weight *= 1.0 - lr * weight_decay
        # As torch interpolates; beta1 m + (1 - beta1) g would round two products.
        first += one_less_beta1 * (grad - first)
        second = beta2 * second + one_less_beta2 * (grad * grad)
        root = tl.sqrt_rn(second) * root_scale + (eps + eps_hat * root_scale)
        weight -= lr * first_scale * tl.div_rn(first, root)
    return weight, first, second


@triton.jit
def _load_states(first_state, second_state, row, place, is_row, mask, RULE: tl.constexpr, STATES: tl.constexpr):
    """Return the states of a tile, float32 [SEGMENTS, BLOCK], or [SEGMENTS, 1] for one a row; zeros for others."""
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
    touched,  # uint8[V], if UPDATES_ALL: written by the first launch, read by those for the other rows
    grads,
    sources,
    scales,
    places,
    winners,
    factors,  # float32[N]: of the learning rate of each key's table, if HAS_FACTORS
    targets,  # int64[N]: the rows of weights and states in which the rows lie, if HAS_TARGETS
    numbers,  # int64[N], or int64[num_rows] if IS_REST: on which the roundings of rows depend, if HAS_NUMBERS
    sorted_rows,
    segments,
    starts,
    key_parts,
    part_parts,
    num_keys,
    no_row,
    first_row,  # if IS_REST
    num_rows,  # if IS_REST
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
    HAS_TARGETS: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
    IS_TRANSFORMED: tl.constexpr,
    CATCHES_UP: tl.constexpr,
    UPDATES_ALL: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """Update a tile of SEGMENTS whole rows: those of segments, or the others of a table.

    Programs past the last segment do nothing, so that the host does not wait for their number.
    """
    first = tl.program_id(0).to(tl.int64) * SEGMENTS
    one = tl.arange(0, SEGMENTS)
    column = tl.arange(0, BLOCK)
    # The last of the running numbers of segments is their count, read on the device.
    count = num_rows.to(tl.int64) if IS_REST else tl.load(segments + num_keys - 1).to(tl.int64)
    if first < count:
        is_row = first + one < count
        rate = lr + tl.zeros((SEGMENTS, 1), tl.float32)
        if IS_REST:
            row = first_row + first + one
            is_row = is_row & (tl.load(touched + row, mask=is_row, other=1) == 0)
            start = first + one
            grad = tl.zeros((SEGMENTS, BLOCK), tl.float32)
        else:
            start = tl.load(starts + first + one, mask=is_row, other=0)
            # All keys of a segment have the same row and factor: those of the first are read.
            row = tl.load(sorted_rows + start, mask=is_row, other=0).to(tl.int64)
            # The last segment may be that of bad keys and of frozen tables.
            is_row = is_row & (row != no_row)
            grad = segment_gradients(
                grads, sources, scales, places, winners, starts, key_parts, part_parts, first + one, is_row,
                WIDTH, BLOCK, SEGMENTS, IS_PLAIN, HAS_MAX,
            )  # fmt: skip
            if UPDATES_ALL:
                tl.store(touched + row, tl.full((SEGMENTS,), 1, tl.uint8), mask=is_row)
            if HAS_FACTORS:
                rate *= tl.load(factors + start, mask=is_row, other=1.0)[:, None]
        # Random bits depend on the row's number, not on where it lies: neither tiers nor ranks change a result.
        number = row
        if HAS_NUMBERS:
            number = tl.load(numbers + start, mask=is_row, other=0)
        target = row
        if HAS_TARGETS:
            target = tl.load(targets + start, mask=is_row, other=0)
        mask = is_row[:, None] & (column < WIDTH)[None, :]
        place = target[:, None] * WIDTH + column[None, :]
        weight = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
        one_state, other_state = _load_states(first_state, second_state, target, place, is_row, mask, RULE, STATES)
        if IS_TRANSFORMED:
            grad = transform(grad, weight, grad_scale, clip_value, clip_norm, coupled_l1, coupled_l2)
        if CATCHES_UP:
            last = tl.load(last_steps + target, mask=is_row, other=0)[:, None]
            weight, one_state, other_state = catch_up(
                weight, one_state, other_state, last, rate, step, eps, eps_hat, one_less_beta1, one_less_beta2,
                weight_decay, RULE,
            )  # fmt: skip
            # After the load above and by the same program: a row belongs to one segment, so no other reads it.
            tl.store(last_steps + target, tl.zeros((SEGMENTS,), tl.int32) + step, mask=is_row)
        weight, one_state, other_state = move(
            weight, one_state, other_state, grad, rate, eps, eps_hat, beta1, beta2, one_less_beta1, one_less_beta2,
            first_scale, root_scale, weight_decay, beta, l1, l2, WIDTH, RULE,
        )  # fmt: skip
        _store_states(first_state, second_state, one_state, other_state, target, place, is_row, mask, RULE, STATES)
        _store_weights(weights, weight, number, column, place, mask, stream)


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
    # One number a segment, which torch adds in a fixed order: atomic additions would differ from run to run.
    tl.store(squares + segment, tl.sum(grad * grad, 1), mask=is_row)
