"""How a tile of rows moves: float32 [ROWS, BLOCK] weights and states with the sums of their gradients.

Roots and quotients are rounded as IEEE asks (the fast ones of a GPU are not), so that results stay within rounding of
the plain kernels'; the rows' way through memory hides their cost.
"""

from __future__ import annotations

import triton
import triton.language as tl

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = (tl.constexpr(number) for number in range(4))


@triton.jit
def adagrad(weight, total, grad, lr, eps):
    """(weight, sum) after AdaGrad's step."""
    total += grad * grad
    return weight - lr * tl.div_rn(grad, tl.sqrt_rn(total) + eps), total


@triton.jit
def rowwise_adagrad(weight, total, grad, lr, eps, WIDTH: tl.constexpr):
    """(weight, sum [ROWS]) after row-wise AdaGrad's step."""
    total += tl.sum(grad * grad, 1) / WIDTH
    rate = tl.div_rn(lr + tl.zeros_like(total), tl.sqrt_rn(total) + eps)
    return weight - rate[:, None] * grad, total


@triton.jit
def adam(weight, first, second, grad, lr, eps, beta2, one_less_beta1, one_less_beta2, root_scale):
    """(weight, first, second) after Adam's step; `lr` and `root_scale` are corrected for the moments' bias."""
    first += one_less_beta1 * (grad - first)
    second = beta2 * second + one_less_beta2 * (grad * grad)
    return weight - lr * tl.div_rn(first, tl.sqrt_rn(second) * root_scale + eps), first, second
