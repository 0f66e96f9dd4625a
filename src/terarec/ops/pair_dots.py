# SPDX-License-Identifier: Apache-2.0
"""`pair_dots`: the dots of all pairs of vectors of a sample, in bfloat16 or float32 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from terarec.kernels.registry import Op, choose
from terarec.ops.checks import is_traced


def supports_pair_dots(first: Tensor, others: Tensor) -> bool:
    """Return whether `pair_dots` has a kernel for these vectors.

    It has one for float32 vectors in host memory on a processor with fused multiply-add, where the first may be
    bfloat16 with AVX512-BF16, eagerly and in compiled graphs. Exporters and tracers see torch's operations.
    """
    if first.dtype not in (torch.bfloat16, torch.float32) or others.dtype is not torch.float32:
        return False
    if not first.device.type == others.device.type == "cpu":
        return False
    is_narrow = first.dtype is torch.bfloat16
    if is_compiling():
        if is_exporting():
            return False
        # Here, as it loads the compiler; while a graph is compiled that is loaded already.
        from terarec.ops.traced import has_pair_dots

        is_there: bool = has_pair_dots(is_narrow)
        return is_there
    return not is_traced(first) and torch._C._get_tracing_state() is None and _has_kernel(is_narrow)


def pair_dots(first: Tensor, others: Tensor, out_width: int, *, implementation: str = "auto") -> Tensor:
    """Return the first vector and the dots of all pairs of F vectors, with gradients.

    One pass reads the vectors, rounds them to bfloat16 if the first is, multiplies them and packs the dots, where torch
    takes five: in bfloat16 8192 samples of 27 x 64 took 7 ms instead of 16 forward and 13 instead of 17 backward, to
    the same bits (one Zen 4 core, torch 2.13); in float32 8 instead of 27, and 8 instead of 78 (two cores).

    Args:
        first: bfloat16 or float32[B, D].
        others: float32[B, (F - 1) * D], the other vectors side by side.
        out_width: Width of the result, at least D + F (F - 1) / 2.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        [B, out_width] of `first`'s type: `first`, the dots of vectors (1, 0), (2, 0), (2, 1), ..., and zeros.

    Raises:
        KernelError: An implementation requested by name that cannot run here.
    """
    out: Tensor = _pair_dots_op(first, others, out_width, implementation)
    return out


def _pair_dots(first: Tensor, others: Tensor, out_width: int, implementation: str) -> Tensor:
    out: Tensor = _kernel(Op.PAIR_DOTS, first, implementation)(first, others, out_width)
    return out


_pair_dots_op = torch.library.custom_op("terarec::pair_dots", mutates_args=())(_pair_dots)


@_pair_dots_op.register_fake
def _pair_dots_fake(first: Tensor, others: Tensor, out_width: int, implementation: str) -> Tensor:
    return first.new_empty(first.shape[0], out_width)


def _pair_gradients(grad: Tensor, first: Tensor, others: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    of_first, of_others = _kernel(Op.PAIR_GRADIENTS, first, implementation)(grad, first, others)
    return of_first, of_others


# An op of its own, so that a compiled graph can hold the backward pass as well.
_pair_gradients_op = torch.library.custom_op("terarec::pair_gradients", mutates_args=())(_pair_gradients)


@_pair_gradients_op.register_fake
def _pair_gradients_fake(grad: Tensor, first: Tensor, others: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    return first.new_empty(first.shape), others.new_empty(others.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, others, _, ctx.implementation = inputs
    ctx.save_for_backward(first, others)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    of_first, of_others = _pair_gradients_op(grad, *ctx.saved_tensors, ctx.implementation)
    return of_first, of_others, None, None


_pair_dots_op.register_autograd(_backward, setup_context=_save)


def _has_kernel(is_narrow: bool) -> bool:
    has_kernel: bool = choose(Op.HAS_PAIR_DOTS, "cpu")(is_narrow)
    return has_kernel


def _kernel(op: Op, first: Tensor, implementation: str) -> Any:
    # The compiled module has the op on every processor, but not every processor has its instructions.
    has_fast = _has_kernel(first.dtype is torch.bfloat16)
    return choose(op, "cpu", implementation, ("cpu", "ref") if has_fast else ("ref",))
