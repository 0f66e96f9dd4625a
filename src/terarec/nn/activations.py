"""Activations that look at one element at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import choice, number

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ReLU(Layer):
    """The positive part."""

    KIND = "relu"
    SHAPES = "any -> the same"
    FORMULA = "y = max(0, x)"

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return x.relu()


class Sigmoid(Layer):
    """The logistic function."""

    KIND = "sigmoid"
    SHAPES = "any -> the same"
    FORMULA = "y = 1 / (1 + exp(-x))"

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return x.sigmoid()


class ELU(Layer):
    """Exponential linear unit (Clevert et al. 2016)."""

    KIND = "elu"
    OPTIONS = (number("alpha", "value at minus infinity, negated", default=1.0),)
    SHAPES = "any -> the same"
    FORMULA = "y = x for x >= 0, alpha (exp(x) - 1) otherwise"

    def __init__(self, shapes: Sequence[TensorShape], *, alpha: float) -> None:
        super().__init__(shapes)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return nn.functional.elu(x, self.alpha)


class Cast(Layer):
    """The same numbers in another type."""

    KIND = "cast"
    OPTIONS = (choice("dtype", "type of the output", tuple(_DTYPES), default="float32"),)
    SHAPES = "any -> the same"
    FORMULA = "y = x, rounded"

    def __init__(self, shapes: Sequence[TensorShape], *, dtype: str) -> None:
        super().__init__(shapes)
        self.dtype = _DTYPES[dtype]

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return x.to(self.dtype)
