"""Softmax, with a mask on request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import number


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """exp(z_i) / (sum of exp(z_j) + 1e-6) over the last dimension, z = x - 10000 (1 - mask) less its maximum.

    The gradient takes the maximum for a constant, as HugeCTR's does.

    Args:
        x: float[..., n].
        mask: 1 where an element counts and 0 where it does not; broadcast against `x`.
    """
    shifted = x - (1.0 - mask) * 10000.0
    exponents = (shifted - shifted.amax(-1, keepdim=True).detach()).exp()
    return exponents / (exponents.sum(-1, keepdim=True) + 1e-6)


class Softmax(Layer):
    """Softmax over the last dimension; a second input masks elements out."""

    KIND = "softmax"
    OPTIONS = (number("factor", "scale of the input, where there is a mask", default=1.0),)
    BOTTOMS = (1, 2)
    SHAPES = "[B, ..., n] [, mask that broadcasts to it] -> [B, ..., n]"
    FORMULA = "y = softmax(x); with a mask exp(z) / (sum exp(z) + 1e-6), z = factor x - 10000 (1 - mask) - max"

    def __init__(self, shapes: Sequence[TensorShape], *, factor: float) -> None:
        first = shapes[0]
        self.require(len(first.dims) >= 1, shapes, "at least two dimensions")
        if len(shapes) == 2:
            mask = shapes[1]
            good = mask.rows == first.rows and len(mask.dims) == len(first.dims)
            good = good and all(length in (1, full) for length, full in zip(mask.dims, first.dims, strict=False))
            self.require(good, shapes, "a mask that broadcasts to the first input")
        super().__init__([first])
        self.factor = factor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """float[B, ..., n] and its mask -> float[B, ..., n]."""
        return x.softmax(-1) if mask is None else masked_softmax(x * self.factor, mask)
