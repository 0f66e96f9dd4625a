"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import dropout

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import number


class Dropout(Layer):
    """Zeroes elements at random while training and scales the others up; torch's own random state draws."""

    KIND = "dropout"
    OPTIONS = (number("rate", "probability of zeroing an element", default=0.5, low=0.0, below=1.0),)
    SHAPES = "any -> the same"
    FORMULA = "y = x mask / (1 - rate) while training, x otherwise"

    def __init__(self, shapes: Sequence[TensorShape], *, rate: float) -> None:
        super().__init__(shapes)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return dropout(x, self.rate, self.training)
