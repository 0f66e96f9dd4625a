"""A fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from terarec.nn.initializers import linear_distributions, scheme_option
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, transposed, whole
from terarec.nn.layer_option import LayerOption, choice, integer
from terarec.nn.linear import new_linear

LINEAR_OPTIONS = (
    integer("num_output", "width of the output"),
    scheme_option("weight_init", "first weights W"),
    scheme_option("bias_init", "first biases b"),
)


class InnerProduct(WeightedLayer):
    """y = x W + b over the last dimension."""

    KIND = "inner_product"
    OPTIONS: ClassVar[tuple[LayerOption, ...]] = LINEAR_OPTIONS
    SHAPES = "[B, ..., n] -> [B, ..., num_output]"
    FORMULA = "y = x W + b; W [n, num_output] Xavier-normal, b normal with variance 1/num_output"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_output: int,
        weight_init: str,
        bias_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) >= 1, shapes, "at least two dimensions")
        super().__init__([TensorShape(shape.rows, (*shape.dims[:-1], num_output))])
        weight, bias = linear_distributions(shape.dims[-1], num_output, weight_init, bias_init)
        self.linear = new_linear(shape.dims[-1], num_output, weight=weight, bias=bias, generator=generator)

    def file_tensors(self) -> list[FileTensor]:
        """W [n, num_output], b [num_output]."""
        return [FileTensor(self.linear.weight, transposed), FileTensor(self.linear.bias, whole)]

    def forward(self, x: Tensor) -> Tensor:
        """float[B, ..., n] -> float[B, ..., num_output]."""
        out: Tensor = self.linear(x)
        return out


class FusedInnerProduct(InnerProduct):
    """A fully connected layer with its activation; what HugeCTR passes between several of them is left out."""

    KIND = "fused_inner_product"
    OPTIONS = (*LINEAR_OPTIONS, choice("activation", "what follows", ("relu", "none"), default="relu"))
    SHAPES = "[B, n] -> [B, num_output]"
    FORMULA = "y = max(0, x W + b), or x W + b without activation; weights as inner_product"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_output: int,
        weight_init: str,
        bias_init: str,
        activation: str,
        generator: torch.Generator,
    ) -> None:
        super().__init__(
            shapes, num_output=num_output, weight_init=weight_init, bias_init=bias_init, generator=generator
        )
        self.has_relu = activation == "relu"

    def forward(self, x: Tensor) -> Tensor:
        """float[B, n] -> float[B, num_output]."""
        out = super().forward(x)
        return out.relu_() if self.has_relu else out
