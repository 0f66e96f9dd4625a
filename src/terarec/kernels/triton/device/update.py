"""The fused update: the sum of a row's gradients, then the row's step, without the sums passing through memory."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device import rules
from terarec.kernels.triton.device.segments import segment_gradients

SGD = tl.constexpr(rules.SGD)
ADAGRAD = tl.constexpr(rules.ADAGRAD)
ROWWISE_ADAGRAD = tl.constexpr(rules.ROWWISE_ADAGRAD)


@triton.jit(do_not_specialize=["num_keys", "no_row"])
def update_kernel(
    weights,  # [V, WIDTH]
    first_state,  # float32[V, WIDTH] or float32[V]
    second_state,  # float32[V, WIDTH]
    grads,
    order,
    sources,
    scales,
    sorted_rows,
    segments,
    starts,
    key_parts,
    part_parts,
    num_keys,
    no_row,
    lr,
    eps,
    beta2,
    one_less_beta1,
    one_less_beta2,
    root_scale,
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    """Update the rows of a tile of SEGMENTS whole rows; programs past the last segment do nothing."""
    first_segment = tl.program_id(0).to(tl.int64) * SEGMENTS
    num_segments = tl.load(segments + num_keys - 1).to(tl.int64)
    if first_segment < num_segments:
        segment = first_segment + tl.arange(0, SEGMENTS)
        is_segment = segment < num_segments
        start = tl.load(starts + segment, mask=is_segment, other=0)
        row = tl.load(sorted_rows + start, mask=is_segment, other=0).to(tl.int64)
        is_row = is_segment & (row != no_row)
        column = tl.arange(0, BLOCK)
        mask = is_row[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        grad = segment_gradients(
            grads, order, sources, scales, starts, key_parts, part_parts, segment, is_row,
            WIDTH, BLOCK, SEGMENTS, IS_PLAIN,
        )  # fmt: skip
        weight = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
        if RULE == SGD:
            weight -= lr * grad
        elif RULE == ADAGRAD:
            total = tl.load(first_state + place, mask=mask, other=0.0)
            weight, total = rules.adagrad(weight, total, grad, lr, eps)
            tl.store(first_state + place, total, mask=mask)
        elif RULE == ROWWISE_ADAGRAD:
            total = tl.load(first_state + row, mask=is_row, other=0.0)
            weight, total = rules.rowwise_adagrad(weight, total, grad, lr, eps, WIDTH)
            tl.store(first_state + row, total, mask=is_row)
        else:
            first = tl.load(first_state + place, mask=mask, other=0.0)
            second = tl.load(second_state + place, mask=mask, other=0.0)
            weight, first, second = rules.adam(
                weight, first, second, grad, lr, eps, beta2, one_less_beta1, one_less_beta2, root_scale
            )
            tl.store(first_state + place, first, mask=mask)
            tl.store(second_state + place, second, mask=mask)
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=mask)
