"""`linear`: the product of a fully connected layer, by the faster of torch's two libraries."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting
from torch.nn.functional import linear as by_torch

from terarec.errors import KernelError
from terarec.kernels.environment import forced_linear
from terarec.kernels.registry import Choice, choose
from terarec.ops.checks import is_traced

_FIRST_FAMILY = 26
"""Zen 5, the first of AMD's processors that multiply 512 bits in one step.

MKL takes its AVX2 code on all of them: 93 GFLOP/s a core against 210 by oneDNN (EPYC of Zen 5, torch 2.13). Those
before have units of 256 bits, which AVX2 fills; on Intel's, MKL takes AVX-512 itself.
"""
_LEAST_PRODUCTS = 1 << 22
_LEAST_WIDTH = 8
"""Smaller products are as fast or faster by MKL: a call of oneDNN takes 13 us, one of MKL 2 (Zen 5, torch 2.13).

With so many multiplications oneDNN takes 0.4 to 1.2 of MKL's time, with less than 4 columns up to 1.3.
"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product y = x W^T + b of a fully connected layer, with gradients.

    Large products of float32 run by oneDNN where `linear_choice` says so. All others, and those under a compiler, an
    exporter, autocast, `torch.func` or forward-mode differentiation, are `torch.nn.functional.linear`. The choice
    depends on the processor and the shapes alone: the same machine gives the same bits on the same number of threads.

    Args:
        x: float[..., n].
        weight: float[m, n].
        bias: float[m].

    Returns:
        float[..., m].
    """
    if not _is_by_onednn(x, weight, bias):
        return by_torch(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        out = _product(rows, weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute max(0, x W^T + b), with gradients.

    Under bfloat16 autocast on a CPU with bfloat16 instructions, oneDNN adds the bias and takes the maximum while it
    writes the product: 1024 x 1024 weights and 8192 samples took 41 ms instead of 46 (2 Zen 4 cores, torch 2.13). All
    else is `linear` and `torch.relu`.

    Args:
        x: float[..., n].
        weight: float[m, n].
        bias: float[m].

    Returns:
        float[..., m].
    """
    if not _is_fused_in_bfloat16(x, weight):
        return torch.relu_(linear(x, weight, bias))
    inputs = [None if tensor is None else tensor.to(torch.bfloat16) for tensor in (x, weight, bias)]
    if is_compiling():
        compiled: Tensor = _linear_relu_op(*inputs)
        return compiled
    out: Tensor = _LinearReLU.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


@functools.cache
def linear_choice() -> Choice:
    """Return the library that large products of float32 run by on the CPU, "onednn" or "torch", and why.

    Raises:
        KernelError: ``TERAREC_LINEAR`` has an unknown value, or asks for oneDNN, which cannot run here.
    """
    forced, lack = forced_linear(), _lack()
    if forced == "onednn" and lack:
        raise KernelError("TERAREC_LINEAR", f"got 'onednn', which cannot run here: {lack}")
    if forced is not None:
        return Choice(implementation=forced, why="TERAREC_LINEAR asks for it")
    if reason := lack or _why_mkl_is_fast():
        return Choice(implementation="torch", why=reason)
    return Choice(implementation="onednn", why="MKL leaves half of this processor's AVX-512 units idle")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        has_x, has_weight, has_bias = ctx.needs_input_grad
        grad_bias = grad.sum(0) if has_bias else None
        if torch.is_grad_enabled():  # create_graph=True: torch's products have gradients themselves
            return grad.mm(weight) if has_x else None, grad.t().mm(x) if has_weight else None, grad_bias
        grad = grad.contiguous()
        grad_x = _product(grad, weight.t()) if has_x else None
        return grad_x, _weight_gradient(grad, x) if has_weight else None, grad_bias


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _product(x, weight, bias, activation="relu")
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, out = ctx.saved_tensors
        has_x, has_weight, has_bias = ctx.needs_input_grad
        grad_bias = None
        if torch.is_grad_enabled():  # create_graph=True goes through the product, which has a gradient itself
            grad = grad * (out > 0)
            grad_bias = grad.sum(0) if has_bias else None
        elif has_bias:
            # One pass: 8192 x 1024 took 4.0 ms where torch's two took 7.5 (one Zen 4 core, torch 2.13).
            grad, grad_bias = choose("mask_gradient", grad.device)(grad, out)
        else:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        return grad.mm(weight) if has_x else None, grad.t().mm(x) if has_weight else None, grad_bias


# The same as ops in a compiled graph, which has no gradients of gradients.
def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias, activation="relu")


_linear_relu_op = torch.library.custom_op("terarec::linear_relu", mutates_args=())(_linear_relu)


@_linear_relu_op.register_fake
def _linear_relu_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _mask_gradient(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    masked, sums = choose("mask_gradient", grad.device)(grad, part)
    return masked, sums


_mask_gradient_op = torch.library.custom_op("terarec::mask_gradient", mutates_args=())(_mask_gradient)


@_mask_gradient_op.register_fake
def _mask_gradient_fake(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    return part.new_empty(part.shape), part.new_empty(part.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight, out = ctx.saved_tensors
    has_x, has_weight, has_bias = ctx.needs_input_grad
    grad, sums = _mask_gradient_op(grad, out)
    return grad.mm(weight) if has_x else None, grad.t().mm(x) if has_weight else None, sums if has_bias else None


_linear_relu_op.register_autograd(_backward, setup_context=_save)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """float32[m, n]. The narrow side is the left one: for [4096, 13] and [4096, 512] 0.5 ms against 1.8 (Zen 5)."""
    if x.shape[1] < grad.shape[1]:
        return _product(x.t(), grad.t()).t().contiguous()
    return _product(grad.t(), x.t())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """OneDNN's x W^T + b. It takes transposed and sliced matrices as they are, but reads a bias as a contiguous one."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, activation, [], "")
    return out


def _is_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product runs by oneDNN. What is decided first costs least: most products of small models are small."""
    if not _is_eager_matrix(x, weight):
        return False
    width, in_width = weight.shape
    if x.numel() * width < _LEAST_PRODUCTS or width < _LEAST_WIDTH or in_width < _LEAST_WIDTH:
        return False
    if not (_is_plain(x) and _is_plain(weight) and x.shape[-1] == in_width):
        return False
    if bias is not None and not (_is_plain(bias) and bias.shape == (width,)):
        return False
    if torch.is_autocast_enabled("cpu") or not _may_replace_torch():
        return False
    return linear_choice().implementation == "onednn"


def _is_fused_in_bfloat16(x: Tensor, weight: Tensor) -> bool:
    """Whether a product runs under bfloat16 autocast, and is large enough to be worth a call of oneDNN.

    Exporters and tracers see torch's operations.
    """
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return False
    if is_compiling():
        return _is_fused_in_graph(x, weight)
    if not _is_eager_matrix(x, weight) or x.dim() != 2 or not x.device.type == weight.device.type == "cpu":
        return False
    return x.numel() * weight.shape[0] >= _LEAST_PRODUCTS and _may_replace_torch() and has_bfloat16()


def _is_fused_in_graph(x: Tensor, weight: Tensor) -> bool:
    if is_exporting() or x.dim() != 2 or not x.device.type == weight.device.type == "cpu":
        return False
    if x.shape[0] * weight.numel() < _LEAST_PRODUCTS:
        return False
    from terarec.ops.traced import has_onednn_bfloat16

    is_fast: bool = has_onednn_bfloat16()
    return is_fast


@functools.cache
def has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor by instructions for it or by AVX-512."""
    if _lack() or not hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported"):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_eager_matrix(x: Tensor, weight: Tensor) -> bool:
    """Whether no compiler, exporter or tracer sees the product, and `weight` is a matrix of torch's own classes."""
    if is_traced(x) or torch._C._get_tracing_state() is not None:
        return False
    return type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2


def _may_replace_torch() -> bool:
    """Return whether nothing but autograd's backward watches a product, and oneDNN is not turned off."""
    return not (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not torch.backends.mkldnn.enabled
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _lack() -> str:
    """Return the reason why oneDNN's product cannot run; empty if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no product of oneDNN with plain weights"
    return ""


def _why_mkl_is_fast() -> str:
    """Why `torch.nn.functional.linear` is no slower than oneDNN; empty where it is slower."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no MKL, and multiplies by another library"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "torch does not take AVX-512"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "the processor is unknown"
    family = re.search(r"^vendor_id\s*:\s*AuthenticAMD$.*?^cpu family\s*:\s*(\d+)$", text, re.MULTILINE | re.DOTALL)
    if family is None or int(family.group(1)) < _FIRST_FAMILY:
        return "MKL is fast on this processor"
    return ""
