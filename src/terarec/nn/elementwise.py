"""Sums, differences and products of equal shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape


class _OfEqualShapes(Layer):
    BOTTOMS: ClassVar[tuple[int, int | None]] = (2, None)

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        self.require(len(set(shapes)) == 1, shapes, "equal shapes")
        super().__init__(shapes[:1])


class Add(_OfEqualShapes):
    """The sum of its inputs."""

    KIND = "add"
    SHAPES = "two or more equal -> the same"
    FORMULA = "y = x_1 + x_2 + ..."

    def forward(self, *inputs: Tensor) -> Tensor:
        """Any float type and shape."""
        return reduce(operator.add, inputs)


class Sub(_OfEqualShapes):
    """The first input less the second."""

    KIND = "sub"
    BOTTOMS = (2, 2)
    SHAPES = "two equal -> the same"
    FORMULA = "y = x_1 - x_2"

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Any float type and shape."""
        return left - right


class ElementwiseMultiply(_OfEqualShapes):
    """The product of its inputs, element by element."""

    KIND = "elementwise_multiply"
    SHAPES = "two or more equal -> the same"
    FORMULA = "y = x_1 x_2 ..."

    def forward(self, *inputs: Tensor) -> Tensor:
        """Any float type and shape."""
        return reduce(operator.mul, inputs)
