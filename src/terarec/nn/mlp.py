"""A stack of fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from terarec.nn.activations import ReLUInPlace, dropout, new_activation, relu_dropout
from terarec.nn.initializers import Distribution, by_scheme, linear_distributions, scheme_option, uniform
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, transposed, whole
from terarec.nn.layer_option import choice, flag, integer, list_of
from terarec.nn.linear import new_linear
from terarec.nn.normalization import BatchNorm1d

ACTIVATIONS = ("relu", "none")


class MLP(nn.Module):
    """Linear layers with an activation between them; batch norm goes before it, dropout behind it.

    Args:
        in_width: width of the input.
        widths: width of each layer's output.
        generator: source of the first weights.
        relus: whether the activation follows each layer; by default all but the last.
        biases: whether each layer has a bias; by default all have.
        dropout: probability of zeroing a unit behind an activation while training.
        initial: (fan_in, fan_out) -> distributions of a layer's first weight and bias.
        activation: name of the activation, one of `terarec.nn.activations.ACTIVATIONS`.
        batch_norm: whether what goes into an activation is normalized over the batch.
    """

    def __init__(
        self,
        in_width: int,
        widths: Sequence[int],
        *,
        generator: torch.Generator,
        relus: Sequence[bool] | None = None,
        biases: Sequence[bool] | None = None,
        dropout: float = 0.0,
        initial: Callable[[int, int], tuple[Distribution, Distribution]] = linear_distributions,
        activation: str = "relu",
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.relus = [True] * (len(widths) - 1) + [False] if relus is None else list(relus)
        self.dropout = dropout
        self.layers = nn.ModuleList()
        has_bias = [True] * len(widths) if biases is None else biases
        for (fan_in, fan_out), with_bias in zip(pairwise((in_width, *widths)), has_bias, strict=True):
            weight, bias = initial(fan_in, fan_out)
            drawn = new_linear(fan_in, fan_out, weight=weight, bias=bias if with_bias else None, generator=generator)
            self.layers.append(drawn)
        active = [width if relu else None for width, relu in zip(widths, self.relus, strict=True)]
        self.norms = nn.ModuleList(
            BatchNorm1d(width) if batch_norm and width is not None else nn.Identity() for width in active
        )
        self.activations = nn.ModuleList(
            nn.Identity() if width is None else new_activation(activation, width) for width in active
        )

    def forward(self, x: Tensor) -> Tensor:
        """float[B, in_width] -> float[B, widths[-1]]."""
        for layer, norm, activation, relu in zip(self.layers, self.norms, self.activations, self.relus, strict=True):
            x = layer(x)
            if relu:
                x = norm(x)
                if not (self.training and self.dropout):
                    x = activation(x)
                elif isinstance(activation, ReLUInPlace):
                    x = relu_dropout(x, self.dropout)
                else:
                    x = dropout(activation(x), self.dropout)
        return x


class MLPLayer(WeightedLayer):
    """The MLP of the registry. A second input, HugeCTR's buffer for the gradient of an interaction, is not read."""

    KIND = "mlp"
    OPTIONS = (
        list_of(integer("num_outputs", "width of each layer's output")),
        list_of(choice("activations", "what follows each layer; relu everywhere if empty", ACTIVATIONS), default=()),
        list_of(flag("biases", "whether each layer has a bias; all have if empty"), default=()),
        scheme_option("weight_init", "first weights"),
        scheme_option("bias_init", "first biases"),
    )
    BOTTOMS = (1, 2)
    SHAPES = "[B, n] -> [B, num_outputs[-1]]"
    FORMULA = "x <- activation(x W_i + b_i), i = 1, 2, ...; W_i and b_i uniform within 1/sqrt(in)"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_outputs: tuple[int, ...],
        activations: tuple[str, ...],
        biases: tuple[bool, ...],
        weight_init: str,
        bias_init: str,
        generator: torch.Generator,
    ) -> None:
        self.require(len(num_outputs) >= 1, shapes, "at least one layer", num_outputs=num_outputs)
        count = len(num_outputs)
        for name, values in (("activations", activations), ("biases", biases)):
            self.require(len(values) in (0, count), shapes, f"{count} of {name}", **{name: values})
        super().__init__([TensorShape(shapes[0].rows, (*shapes[0].dims[:-1], num_outputs[-1]))])

        def initial(fan_in: int, fan_out: int) -> tuple[Distribution, Distribution]:
            own = uniform(1.0 / math.sqrt(fan_in))
            return (
                by_scheme(weight_init, default=own, fans=(fan_in, fan_out)),
                by_scheme(bias_init, default=own, fans=(fan_out, fan_out)),
            )

        self.mlp = MLP(
            shapes[0].dims[-1],
            num_outputs,
            generator=generator,
            relus=[name == "relu" for name in activations or ("relu",) * count],
            biases=biases or (True,) * count,
            initial=initial,
        )
        for index, width in enumerate(num_outputs):
            if self.mlp.layers[index].bias is None:
                self.register_buffer(f"unused_bias_{index}", torch.zeros(width))

    def file_tensors(self) -> list[FileTensor]:
        """W and b of each layer; where a layer has no bias the file holds one all the same, which is kept."""
        entries = []
        for index, layer in enumerate(self.mlp.layers):
            unused = self.get_buffer(f"unused_bias_{index}") if layer.bias is None else None
            bias = layer.get_parameter("bias") if unused is None else unused
            entries += [FileTensor(layer.get_parameter("weight"), transposed), FileTensor(bias, whole)]
        return entries

    def forward(self, x: Tensor, scratch: Tensor | None = None) -> Tensor:
        """float[B, n] -> float[B, num_outputs[-1]]."""
        out: Tensor = self.mlp(x)
        return out
