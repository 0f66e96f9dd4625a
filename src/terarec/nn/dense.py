# SPDX-License-Identifier: Apache-2.0
"""Fully connected layers: the linear layer that models are made of, MLPs, and the layers of the registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from terarec.nn.activations import dropout, new_activation, relu_dropout
from terarec.nn.initializers import (
    Distribution,
    by_scheme,
    linear_distributions,
    scheme_option,
    uniform,
    xavier_uniform,
)
from terarec.nn.layer import (
    FileTensor,
    LayerOption,
    TensorShape,
    WeightedLayer,
    as_is,
    choice,
    flag,
    integer,
    list_of,
    transposed,
)
from terarec.nn.normalization import BatchNorm1d
from terarec.ops.linear import linear, linear_relu


# A subclass instead of a new module: names in a state_dict, quantization and exporters all know `nn.Linear`.
class Linear(nn.Linear):
    """`torch.nn.Linear`, multiplied by the faster of torch's libraries on a CPU (`terarec.ops.linear`).

    Attributes:
        relu: Whether the layer returns the positive part of its product.
    """

    relu = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply and add the bias: float[..., n] -> float[..., m]."""
        product = linear_relu if self.relu else linear
        return product(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the widths, and whether an activation follows."""
        return super().extra_repr() + (", relu=True" if self.relu else "")


def new_linear(
    fan_in: int, fan_out: int, *, weight: Distribution, bias: Distribution | None, generator: torch.Generator
) -> Linear:
    """Return a fully connected layer with initial weights from `generator` alone; without bias if `bias` is None."""
    # On "meta", so that torch draws no weights of its own from the global generator.
    layer = Linear(fan_in, fan_out, bias=bias is not None, device="meta").to_empty(device="cpu")
    weight.fill_(layer.weight, generator)
    if bias is not None:
        bias.fill_(layer.bias, generator)
    return layer


LINEAR_OPTIONS = (
    integer("num_output", "width of the output"),
    scheme_option("weight_init", "initial weights W"),
    scheme_option("bias_init", "initial biases b"),
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

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return W [n, num_output] and b [num_output]."""
        return [FileTensor(self.linear.weight, transposed), FileTensor(self.linear.bias, as_is)]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b: float[B, ..., n] -> float[B, ..., num_output]."""
        out: Tensor = self.linear(x)
        return out


class FusedInnerProduct(InnerProduct):
    """A fully connected layer with its activation; it needs no other tensor than its input."""

    KIND = "fused_inner_product"
    OPTIONS = (*LINEAR_OPTIONS, choice("activation", "activation", ("relu", "none"), default="relu"))
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
        self.linear.relu = activation == "relu"


ACTIVATIONS = ("relu", "none")


class MLP(nn.Module):
    """Linear layers with an activation between them; batch norm goes before it, dropout after it.

    Args:
        in_width: Width of the input.
        widths: Width of each layer's output.
        generator: Source of the initial weights.
        relus: Whether the activation follows each layer; by default all but the last.
        biases: Whether each layer has a bias; by default all have.
        dropout: Probability of zeroing a unit after an activation in training.
        initial: (fan_in, fan_out) -> distributions of a layer's initial weight and bias.
        activation: Name of the activation, one of `terarec.nn.activations.ACTIVATIONS`.
        batch_norm: Whether the input of an activation is normalized over the batch.
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
        self.is_relu = activation == "relu"
        is_fused = self.is_relu and not batch_norm and not dropout
        has_bias = [True] * len(widths) if biases is None else biases
        shapes = pairwise((in_width, *widths))
        for (fan_in, fan_out), with_bias, relu in zip(shapes, has_bias, self.relus, strict=True):
            weight, bias = initial(fan_in, fan_out)
            drawn = new_linear(fan_in, fan_out, weight=weight, bias=bias if with_bias else None, generator=generator)
            # A norm goes between product and activation, and dropout has a kernel with the activation of its own.
            drawn.relu = is_fused and relu
            self.layers.append(drawn)
        active = [width if relu else None for width, relu in zip(widths, self.relus, strict=True)]
        # Identities keep the lists of one length: `forward` walks them together, and a layer has one index in all.
        self.norms = nn.ModuleList(
            BatchNorm1d(width) if batch_norm and width is not None else nn.Identity() for width in active
        )
        self.activations = nn.ModuleList(
            nn.Identity() if width is None or is_fused else new_activation(activation, width) for width in active
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers: float[B, in_width] -> float[B, widths[-1]]."""
        for layer, norm, activation, relu in zip(self.layers, self.norms, self.activations, self.relus, strict=True):
            x = layer(x)
            if relu:
                x = norm(x)
                # One kernel for activation and dropout keeps the result alone for its backward, and no mask.
                if not (self.training and self.dropout):
                    x = activation(x)
                elif self.is_relu:
                    x = relu_dropout(x, self.dropout)
                else:
                    x = dropout(activation(x), self.dropout)
        return x


class MLPLayer(WeightedLayer):
    """The MLP of the registry. A second input, HugeCTR's buffer for the gradient of an interaction, is not read."""

    KIND = "mlp"
    OPTIONS = (
        list_of(integer("num_outputs", "width of each layer's output")),
        list_of(choice("activations", "activation of each layer; relu everywhere if empty", ACTIVATIONS), default=()),
        list_of(flag("biases", "whether each layer has a bias; all have if empty"), default=()),
        scheme_option("weight_init", "initial weights"),
        scheme_option("bias_init", "initial biases"),
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

        # HugeCTR's MLP starts like `torch.nn.Linear`, other than its InnerProduct.
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
                # HugeCTR's files have a bias for every layer; a model that is loaded and saved has to return it.
                # A buffer, not a parameter, since optimizers and penalties must not see it.
                self.register_buffer(f"unused_bias_{index}", torch.zeros(width))

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return W and b of each layer; files hold a bias for layers without one, too, and it is kept."""
        entries = []
        for index, layer in enumerate(self.mlp.layers):
            unused = self.get_buffer(f"unused_bias_{index}") if layer.bias is None else None
            bias = layer.get_parameter("bias") if unused is None else unused
            entries += [FileTensor(layer.get_parameter("weight"), transposed), FileTensor(bias, as_is)]
        return entries

    def forward(self, x: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Apply all layers: float[B, n] -> float[B, num_outputs[-1]]."""
        out: Tensor = self.mlp(x)
        return out


class GroupDense(WeightedLayer):
    """Two or more fully connected layers with ReLU between them; initial weights as `inner_product`'s."""

    KIND = "group_dense"
    OPTIONS = (
        list_of(integer("num_outputs", "width of each layer's output")),
        choice("last_activation", "activation of the last layer", ACTIVATIONS, default="relu"),
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

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return W and b of each layer."""
        views = ("weight", transposed), ("bias", as_is)
        return [FileTensor(getattr(layer, name), view) for layer in self.mlp.layers for name, view in views]

    def forward(self, x: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Apply all layers: float[B, n] -> float[B, num_outputs[-1]]."""
        out: Tensor = self.mlp(x)
        return out


class WeightMultiply(WeightedLayer):
    """Turns each of s numbers into a vector: the number times the weights of its column."""

    KIND = "weight_multiply"
    OPTIONS = (
        list_of(integer("weight_dims", "columns s and length d of their vectors"), length=2),
        scheme_option("weight_init", "initial weights"),
    )
    SHAPES = "[B, s] -> [B, s*d]"
    FORMULA = "y[b, s*d + j] = x[b, s] w[s, j]; w Xavier-uniform with fans s and s*d"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        weight_dims: tuple[int, int],
        weight_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        columns, length = weight_dims
        self.require(shape.dims == (columns,), shapes, f"[B, {columns}]", weight_dims=weight_dims)
        super().__init__([TensorShape(shape.rows, (columns * length,))])
        self.weight = nn.Parameter(torch.empty(columns, length))
        # The fans are those of HugeCTR's initializer, not of a matrix product.
        fans = (columns, columns * length)
        distribution = by_scheme(
            weight_init, default=xavier_uniform(*fans), uniform=uniform(1.0 / sum(fans)), fans=fans
        )
        distribution.fill_(self.weight, generator)

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return the matrix w [s, d]."""
        return [FileTensor(self.weight, as_is)]

    def forward(self, x: Tensor) -> Tensor:
        """Scale the vector of each column by its number: float[B, s] -> float[B, s*d]."""
        return (x.unsqueeze(2) * self.weight).flatten(1)
