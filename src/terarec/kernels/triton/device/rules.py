"""How a tile of rows moves: the formulas of `terarec.kernels.contract.RowRule` on float32 [ROWS, BLOCK].

Roots and quotients are rounded as IEEE asks (the fast ones of a GPU are not), so that results stay within rounding of
the plain kernels'; the rows' way through memory hides their cost.
"""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.contract import RULE_KINDS

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
    """The gradients as the formula takes them: scaled, clipped, regularised; NaN stays NaN."""
    grad *= grad_scale
    grad = tl.where(grad > clip_value, clip_value, tl.where(grad < -clip_value, -clip_value, grad))
    norm = tl.sqrt_rn(tl.sum(grad * grad, 1))[:, None]
    limit = tl.div_rn(clip_norm + tl.zeros_like(norm), tl.where(norm > clip_norm, norm, 1.0))
    grad *= tl.where(norm > clip_norm, limit, 1.0)
    sign = tl.where(weight > 0.0, 1.0, tl.where(weight < 0.0, -1.0, 0.0))
    return grad + (l2 * weight + l1 * sign)


@triton.jit
def power(one_less_base, exponent):
    """(1 - one_less_base) ** exponent in double, for bases near 1 and large exponents: float64 [ROWS, 1]."""
    exponent = exponent.to(tl.float64)
    base = 1.0 - (one_less_base + tl.zeros(exponent.shape, tl.float32)).to(tl.float64)
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
    """(weight, first, second) after the steps that rows missed since ``last int32 [ROWS, 1]``."""
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
    """(weight, sum, linear) after FTRL's step."""
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
    """(weight, first, second) after the rule's step; ``lr [ROWS, 1]``, states as the rule names them."""
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
        first += one_less_beta1 * (grad - first)
        second = beta2 * second + one_less_beta2 * (grad * grad)
        root = tl.sqrt_rn(second) * root_scale + (eps + eps_hat * root_scale)
        weight -= lr * first_scale * tl.div_rn(first, root)
    return weight, first, second
