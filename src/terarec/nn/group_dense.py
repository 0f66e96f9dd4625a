"""HugeCTR's group of fused fully connected layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, transposed, whole
from terarec.nn.layer_option import choice, integer, list_of
from terarec.nn.mlp import ACTIVATIONS, MLP


class GroupDense(WeightedLayer):
    """Two or more fully connected layers with ReLU between them; first weights as `inner_product`'s."""

    KIND = "group_dense"
    OPTIONS = (
        list_of(integer("num_outputs", "width of each layer's output")),
        choice("last_activation", "what follows the last layer", ACTIVATIONS, default="relu"),
    )
    BOTTOMS = (1, 2)
    SHAPES = "[B, n] -> [B, num_outputs[-1]]"
    FORMULA = "x <- max(0, x W_i + b_i), i = 1, 2, ...; the last one with its own activation"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_outputs: tuple[int, ...],
        last_activation: str,
        generator: torch.Generator,
    ) -> None:
        shape = shapes[0]
        self.require(len(shape.dims) == 1, shapes, "an input of two dimensions")
        self.require(len(num_outputs) >= 2, shapes, "at least two layers", num_outputs=num_outputs)
        super().__init__([TensorShape(shape.rows, num_outputs[-1:])])
        relus = [True] * (len(num_outputs) - 1) + [last_activation == "relu"]
        self.mlp = MLP(shape.dims[0], num_outputs, generator=generator, relus=relus)

    def file_tensors(self) -> list[FileTensor]:
        """W and b of each layer."""
        views = ("weight", transposed), ("bias", whole)
        return [FileTensor(getattr(layer, name), view) for layer in self.mlp.layers for name, view in views]

    def forward(self, x: Tensor, scratch: Tensor | None = None) -> Tensor:
        """float[B, n] -> float[B, num_outputs[-1]]."""
        out: Tensor = self.mlp(x)
        return out
