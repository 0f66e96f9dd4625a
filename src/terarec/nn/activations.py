# SPDX-License-Identifier: Apache-2.0
"""Activations: modules by name for dense networks, and layers of the registry; dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terarec.nn.batch_ranks import BatchRanks, normalize
from terarec.nn.layer import Layer, TensorShape, choice, number
from terarec.nn.normalization import BatchNorm1d


class ReLUInPlace(nn.Module):
    """The positive part, written over the input: for the output of a linear layer or a norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Overwrite `x`, of any float type and shape, by its positive part and return it."""
        return nn.functional.relu_(x)


class Dice(nn.Module):
    """The data-adaptive activation of the Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978, eq. 3).

    y = p x + (1 - p) alpha x with p = 1 / (1 + exp(-(x - mean) / sqrt(var + eps))). Mean and variance of a column are
    those of the batch in training and running ones in evaluation, so that a score does not depend on the other samples
    of its batch; `alpha` is learned for each column. (`PReLUDice` is HugeCTR's form, which has neither.)

    Args:
        width: Number of columns n.
        eps: Number added to the variance.
        momentum: Weight of a batch in the running statistics.
    """

    def __init__(self, width: int, *, eps: float = 1e-8, momentum: float = 0.01) -> None:
        super().__init__()
        self.norm = BatchNorm1d(width, eps=eps, momentum=momentum, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the columns by their gates: float[B, n] -> float[B, n]."""
        gate: Tensor = self.norm(x).sigmoid()
        return x * (self.alpha + (1 - self.alpha) * gate)


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    # In place saves a tensor of the batch's size: a linear layer's backward reads its input and weight, not its output.
    "relu": lambda _: ReLUInPlace(),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "prelu": nn.PReLU,
    "dice": Dice,
}
"""Name -> function that makes the activation for a number of columns."""


def new_activation(name: str, width: int) -> nn.Module:
    """Return the activation `name` of ``ACTIVATIONS`` for [B, width]."""
    return ACTIVATIONS[name](width)


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ReLU(Layer):
    """The positive part."""

    KIND = "relu"
    SHAPES = "any -> the same"
    FORMULA = "y = max(0, x)"

    def forward(self, x: Tensor) -> Tensor:
        """Return the positive part of `x`, of any float type and shape."""
        return x.relu()


class Sigmoid(Layer):
    """The logistic function."""

    KIND = "sigmoid"
    SHAPES = "any -> the same"
    FORMULA = "y = 1 / (1 + exp(-x))"

    def forward(self, x: Tensor) -> Tensor:
        """Return the logistic function of `x`, of any float type and shape."""
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
        """Return the exponential linear unit of `x`, of any float type and shape."""
        return nn.functional.elu(x, self.alpha)


class Cast(Layer):
    """A conversion of numbers to another type."""

    KIND = "cast"
    OPTIONS = (choice("dtype", "type of the output", tuple(_DTYPES), default="float32"),)
    SHAPES = "any -> the same"
    FORMULA = "y = x, rounded"

    def __init__(self, shapes: Sequence[TensorShape], *, dtype: str) -> None:
        super().__init__(shapes)
        self.dtype = _DTYPES[dtype]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of any float type and shape, in the layer's type."""
        return x.to(self.dtype)


class PReLUDice(Layer):
    """A leaky unit whose gate adapts to the data (Zhou et al. 2018).

    Mean and variance are those of the current batch, of each column, in evaluation too: there is no state. The gradient
    is that of the formula, the statistics included.
    """

    KIND = "prelu_dice"
    OPTIONS = (
        number("alpha", "slope where the gate is shut", default=1.0),
        number("eps", "added to the variance", default=1e-5, low=0.0),
    )
    SHAPES = "[B, ...] -> the same"
    FORMULA = "y = p x + (1 - p) alpha x; p = 1 / (1 + exp((mean - x) / sqrt(var + eps)))"

    batch_ranks: BatchRanks | None = None
    """The processes that have a part of each batch; None for this one alone."""

    def __init__(self, shapes: Sequence[TensorShape], *, alpha: float, eps: float) -> None:
        super().__init__(shapes)
        self.alpha = alpha
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the elements by their gates: float[B, ...] -> float[B, ...]."""
        if self.batch_ranks is not None:
            columns = x.reshape(x.shape[0], x.shape[1:].numel())
            # `normalize` takes [n, C]: each element of a sample is a column, as in the formula below.
            normalized = normalize(self.batch_ranks, "statistics of prelu_dice", columns, eps=self.eps)
            gate = normalized.values.view(x.shape).sigmoid().to(x.dtype)
        else:
            var, mean = torch.var_mean(x, dim=0, correction=0)
            gate = ((x - mean) * (var + self.eps).rsqrt()).sigmoid()
        return x * (self.alpha + (1 - self.alpha) * gate)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero elements of `x` with probability `rate` and scale the others by 1 / (1 - rate).

    On a CPU a 64-bit draw from torch's global random state decides for 8 elements where 256 * rate is a whole number,
    else for 4, with `rate` rounded to a multiple of 2^-16. Torch's own dropout draws once an element: for 4096 x 400
    floats it takes 18.6 ms, this 1.5 (one Zen 5 core, torch 2.13).
    """
    # Only a CPU draws serially, and a compiler fuses torch's function with the surrounding operations.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.nn.functional.dropout(x, rate)
    out: Tensor = _Dropout.apply(x, rate)  # type: ignore[no-untyped-call]
    return out


def relu_dropout(x: Tensor, rate: float) -> Tensor:
    """Return the `dropout` of the positive part of `x`; its backward reads the result alone, so no mask is kept."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.nn.functional.dropout(torch.relu(x), rate)
    out: Tensor = _ReLUDropout.apply(x, rate)  # type: ignore[no-untyped-call]
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        # The draws are kept rather than a mask of floats, as they take one or two bytes an element.
        draws, ctx.least, ctx.scale = _draw(x, rate)
        ctx.save_for_backward(draws)
        return _masked(x, draws, ctx.least).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (draws,) = ctx.saved_tensors
        return _masked(grad, draws, ctx.least).mul_(ctx.scale), None


class _ReLUDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        draws, least, ctx.scale = _draw(x, rate)
        out = _masked(x, draws, least).relu_().mul_(ctx.scale)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        # A unit is 0 in `out` if it was dropped or not positive, and neither has a gradient.
        return torch.ops.aten.threshold_backward(grad, out, 0).mul_(ctx.scale), None


def _draw(x: Tensor, rate: float) -> tuple[Tensor, int, float]:
    """Return a random integer for each element, the least integer that keeps it, and the scale of kept elements."""
    dtype = torch.int8 if (256 * rate).is_integer() else torch.int16
    smallest, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    num_values = largest - smallest + 1
    # At least one value keeps an element, so that the scale is finite for rates that round to 1.
    num_dropped = min(round(rate * num_values), num_values - 1)
    # `random_` with no upper end draws all 64 bits; a smaller type would take one draw of the generator an element.
    draws = torch.empty(-(-x.numel() * dtype.itemsize // 8), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    draws = draws.view(dtype)[: x.numel()].view(x.shape)
    return draws, smallest + num_dropped, num_values / (num_values - num_dropped)


def _masked(x: Tensor, draws: Tensor, least: int) -> Tensor:
    """Return the product with 1 where a draw keeps an element, else 0.

    The comparison writes floats at once: for 4096 x 400 of them 0.15 ms. To make flags takes 0.53 ms and the product
    of floats and flags 0.86 (Zen 5, torch 2.13).
    """
    return torch.ge(draws, least, out=torch.empty_like(x)).mul_(x)


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
        """Return the `dropout` of `x` in training, and `x` itself in evaluation."""
        return dropout(x, self.rate) if self.training and self.rate else x
