# SPDX-License-Identifier: Apache-2.0
"""Holds a layer against a formula in NumPy: outputs, and the gradients of inputs and weights by finite differences."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.nn import Layer, TensorShape, build_layer
from terarec.nn.layer import WeightedLayer

Array = NDArray[np.float64]
_STEP = 1e-5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: str, dims: Sequence[Sequence[int]], options: dict[str, Any] | None = None, rows: int = 1) -> Layer:
    """A layer over inputs [B, *dims] in float64, with random weights (none is left at its constant)."""
    shapes = [TensorShape(rows, tuple(each)) for each in dims]
    layer = build_layer(kind, shapes, options or {}, generator=generator())
    layer = layer.double()
    if isinstance(layer, WeightedLayer):
        source = np.random.default_rng(5)
        layer.set_file_parameters(
            [torch.from_numpy(source.normal(size=tuple(weight.shape))) for weight in layer.file_parameters()]
        )
    return layer


def draw(batch_size: int, *dims: Sequence[int], seed: int = 1) -> list[Array]:
    source = np.random.default_rng(seed)
    return [source.normal(size=(batch_size, *each)) for each in dims]


def weights_of(layer: Layer) -> list[Array]:
    return [weight.numpy().copy() for weight in layer.file_parameters()] if isinstance(layer, WeightedLayer) else []


def compare(
    layer: Layer, formula: Callable[..., Any], inputs: Sequence[Array], rtol: float = 1e-7, gradient_atol: float = 1e-6
) -> None:
    """`layer` and ``formula(*inputs, *file_parameters)`` agree in outputs, shapes and all gradients."""
    arrays = [*inputs, *weights_of(layer)]
    expected = as_tuple(formula(*arrays))
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in inputs]
    got = as_tuple(layer(*tensors))
    assert len(got) == len(expected)
    for out, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(out.detach().numpy(), wanted, rtol=rtol, atol=1e-9)
    if inputs[0].shape[0]:
        check_shapes(layer, got, inputs[0].shape[0])
    cotangents = draw_like(expected)
    total = sum((out * torch.from_numpy(weight)).sum() for out, weight in zip(got, cotangents, strict=True))
    layer.zero_grad()
    assert isinstance(total, torch.Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    got_gradients = [tensor.grad for tensor in tensors]
    if isinstance(layer, WeightedLayer):
        got_gradients += [view(tensor.grad) for tensor, view in layer.file_tensors()]
    for index, gradient in enumerate(got_gradients):
        wanted = finite_differences(formula, arrays, index, cotangents)
        assert gradient is not None
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-5, atol=gradient_atol)


def check_shapes(layer: Layer, outputs: Sequence[torch.Tensor], first_length: int) -> None:
    """The outputs have the declared shapes, for one number of samples."""
    declared = layer.output_shapes
    samples = {out.shape[0] // shape.rows for out, shape in zip(outputs, declared, strict=True)}
    assert len(samples) == 1
    for out, shape in zip(outputs, declared, strict=True):
        assert tuple(out.shape) == (samples.copy().pop() * shape.rows, *shape.dims)


def finite_differences(
    formula: Callable[..., Any], arrays: Sequence[Array], index: int, cotangents: Sequence[Array]
) -> Array:
    """The gradient of sum(cotangent * output) with respect to ``arrays[index]``, by central differences."""
    gradient = np.zeros_like(arrays[index])
    for place in np.ndindex(arrays[index].shape):
        sides = []
        for step in (_STEP, -_STEP):
            moved = [array.copy() for array in arrays]
            moved[index][place] += step
            outputs = as_tuple(formula(*moved))
            sides.append(sum((out * weight).sum() for out, weight in zip(outputs, cotangents, strict=True)))
        gradient[place] = (sides[0] - sides[1]) / (2 * _STEP)
    return gradient


def draw_like(arrays: Sequence[Array]) -> list[Array]:
    source = np.random.default_rng(9)
    return [source.normal(size=array.shape) for array in arrays]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def assert_gradcheck(layer: Layer, inputs: Sequence[Array]) -> None:
    """Autograd's gradients of the inputs are the numerical ones of the layer itself."""
    tensors = tuple(torch.from_numpy(array.copy()).requires_grad_() for array in inputs)
    assert torch.autograd.gradcheck(layer, tensors)
