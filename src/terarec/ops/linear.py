# SPDX-License-Identifier: Apache-2.0
"""`linear`: the product of a fully connected layer, by the faster of torch's two libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn.functional import linear as by_torch

from terarec.kernels.registry import Op, choose
from terarec.ops.checks import is_traced
from terarec.ops.onednn import (
    LEAST_PRODUCTS,
    choice_and_range,
    has_bfloat16,
    may_replace_torch,
    multiplies_weight_gradients,
)

_LEAST_WIDTH = 8
"""Products with fewer columns than 4 took oneDNN up to 1.3 times as long as MKL (Zen 5, torch 2.13)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product y = x W^T + b of a fully connected layer, with gradients.

    Large products of float32 run by oneDNN where `linear_choice` says so, in compiled graphs too. All others, and those
    under an exporter, autocast, `torch.func` or forward-mode differentiation, are `torch.nn.functional.linear`. The
    choice depends on the processor and the shapes alone: the same machine gives the same bits on the same number of
    threads.

    Args:
        x: float[..., n].
        weight: float[m, n].
        bias: float[m].

    Returns:
        float[..., m].
    """
    if is_compiling():
        is_own = not torch.is_autocast_enabled("cpu") and _is_in_graph(x, weight)
        return _linear_op(x, weight, bias, "none") if is_own else by_torch(x, weight, bias)
    return _by_onednn(x, weight, bias, "none") if _is_by_onednn(x, weight, bias) else by_torch(x, weight, bias)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute max(0, x W^T + b), with gradients.

    Where oneDNN multiplies, it adds the bias and takes the maximum while it writes the product: in bfloat16 1024 x 1024
    weights and 8192 samples took 41 ms instead of 46 (2 Zen 4 cores, torch 2.13). It multiplies what `linear` says, and
    bfloat16 under autocast on a CPU with bfloat16 instructions. All else is `linear` and `torch.relu`.

    Args:
        x: float[..., n].
        weight: float[m, n].
        bias: float[m].

    Returns:
        float[..., m].
    """
    if torch.is_autocast_enabled("cpu"):
        if not _is_fused_in_bfloat16(x, weight):
            return torch.relu_(linear(x, weight, bias))
        inputs = [None if tensor is None else tensor.to(torch.bfloat16) for tensor in (x, weight, bias)]
        if is_compiling():
            compiled: Tensor = _linear_op(*inputs, "relu")
            return compiled
        out: Tensor = _Linear.apply(*inputs, "relu")  # type: ignore[no-untyped-call]
        return out
    if is_compiling():
        return _linear_op(x, weight, bias, "relu") if _is_in_graph(x, weight) else by_torch(x, weight, bias).relu()
    if not _is_by_onednn(x, weight, bias):
        return torch.relu_(by_torch(x, weight, bias))
    return _by_onednn(x, weight, bias, "relu")


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Linear.apply(rows, weight, bias, activation)  # type: ignore[no-untyped-call]
    else:
        out = _product(rows, weight, bias, activation)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """A product with its activation, "none" or "relu", in float32 or bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        out = _product(x, weight, bias, activation)
        # The output shows where the ReLU was positive, so that its input need not be kept.
        ctx.save_for_backward(x, weight, out if activation == "relu" else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, part = ctx.saved_tensors
        has_x, has_weight, has_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: torch's products have gradients themselves
            grad = grad if part is None else grad * (part > 0)
            grad_bias = grad.sum(0) if has_bias else None
            return grad.mm(weight) if has_x else None, grad.t().mm(x) if has_weight else None, grad_bias, None
        grad_bias = None
        if part is None:
            # The gradient of a sum is expanded, with strides of 0: copied once here instead of by each product.
            grad = grad.contiguous()
            grad_bias = grad.sum(0) if has_bias else None
        elif has_bias:
            # One pass: in bfloat16 8192 x 1024 took 4.0 ms where torch's two took 7.5 (one Zen 4 core, torch 2.13).
            grad, grad_bias = choose(Op.MASK_GRADIENT, grad.device)(grad, part)
        else:
            grad = torch.ops.aten.threshold_backward(grad, part, 0)
        grad_x = _input_gradient(grad, weight) if has_x else None
        return grad_x, _weight_gradient(grad, x) if has_weight else None, grad_bias, None


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return [B, n]. Products of bfloat16 are oneDNN's by torch's own choice."""
    return _product(grad, weight.t()) if grad.dtype is torch.float32 else grad.mm(weight)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return [m, n]. The narrow side is the left one: for [4096, 13] and [4096, 512] 0.5 ms against 1.8 (Zen 5)."""
    if grad.dtype is not torch.float32 or not multiplies_weight_gradients(x.shape[1]):
        return grad.t().mm(x)
    if x.shape[1] < grad.shape[1]:
        # (n, B) by (B, m), then turned: contiguous, since a gradient is to have the layout of its weight.
        return _product(x.t(), grad.t()).t().contiguous()
    return _product(grad.t(), x.t())


# The same as ops in a compiled graph, which has no gradients of gradients.
def _linear_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _product(x, weight, bias, activation)


_linear_op = torch.library.custom_op("terarec::linear", mutates_args=())(_linear_in_graph)


@_linear_op.register_fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_weight_gradient_op = torch.library.custom_op("terarec::weight_gradient", mutates_args=())(_weight_gradient)


@_weight_gradient_op.register_fake
def _weight_gradient_fake(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _mask_gradient(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    masked, sums = choose(Op.MASK_GRADIENT, grad.device)(grad, part)
    return masked, sums


_mask_gradient_op = torch.library.custom_op("terarec::mask_gradient", mutates_args=())(_mask_gradient)


@_mask_gradient_op.register_fake
def _mask_gradient_fake(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    return part.new_empty(part.shape), part.new_empty(part.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, activation = inputs
    ctx.save_for_backward(x, weight, output if activation == "relu" else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    x, weight, part = ctx.saved_tensors
    has_x, has_weight, has_bias, _ = ctx.needs_input_grad
    grad_bias = None
    if part is not None:
        grad, grad_bias = _mask_gradient_op(grad, part)
    elif has_bias:
        grad_bias = grad.sum(0)
    is_float = grad.dtype is torch.float32
    grad_x = grad_weight = None
    if has_x:
        grad_x = _linear_op(grad, weight.t(), None, "none") if is_float else grad.mm(weight)
    if has_weight:
        grad_weight = _weight_gradient_op(grad, x) if is_float else grad.t().mm(x)
    return grad_x, grad_weight, grad_bias if has_bias else None, None


_linear_op.register_autograd(_backward, setup_context=_save)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """Return oneDNN's x W^T + b. It takes transposed and sliced matrices, but reads a bias as a contiguous one."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, activation, [], "")
    return out


def _is_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a product runs by oneDNN; cheap conditions first, as most products of small models are small."""
    if not _is_eager_matrix(x, weight):
        return False
    width, in_width = weight.shape
    count = x.numel() * width
    if count < LEAST_PRODUCTS or width < _LEAST_WIDTH or in_width < _LEAST_WIDTH:
        return False
    if not (_is_plain(x) and _is_plain(weight) and x.shape[-1] == in_width):
        return False
    if bias is not None and not (_is_plain(bias) and bias.shape == (width,)):
        return False
    if torch.is_autocast_enabled("cpu") or not may_replace_torch():
        return False
    _, products = choice_and_range()
    return products is not None and count >= products.smallest(in_width)


def _is_fused_in_bfloat16(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product runs under bfloat16 autocast, and is large enough to be worth a call of oneDNN.

    Exporters and tracers see torch's operations.
    """
    if torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return False
    if is_compiling():
        return _is_in_graph(x, weight)
    if not _is_eager_matrix(x, weight) or x.dim() != 2 or not x.device.type == weight.device.type == "cpu":
        return False
    return x.numel() * weight.shape[0] >= LEAST_PRODUCTS and may_replace_torch() and has_bfloat16()


def _is_in_graph(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product of a graph that is being compiled runs by oneDNN, in bfloat16 under autocast."""
    if is_exporting() or x.dim() != 2 or not x.device.type == weight.device.type == "cpu":
        return False
    # Here, as it loads the compiler; while a graph is compiled that is loaded already.
    from terarec.ops.traced import least_products

    is_narrow = torch.is_autocast_enabled("cpu")
    if is_narrow:
        if torch.get_autocast_dtype("cpu") is not torch.bfloat16:
            return False
    elif not x.dtype is weight.dtype is torch.float32 or min(weight.shape) < _LEAST_WIDTH:
        return False
    least: int = least_products(is_narrow, weight.shape[1])
    return least > 0 and x.shape[0] * weight.numel() >= least


def _is_eager_matrix(x: Tensor, weight: Tensor) -> bool:
    """Return whether no compiler or tracer sees the product, and `weight` is a matrix of torch's own classes."""
    if is_traced(x) or torch._C._get_tracing_state() is not None:
        return False
    return type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
