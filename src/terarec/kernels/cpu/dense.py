# SPDX-License-Identifier: Apache-2.0
"""Launchers of the kernels of dense layers, other than products, in bfloat16 and float32."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.cpu.host import _embedding, empty_floats


def mask_gradient(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masked gradient and its column sums in one pass; the same bits for any number of threads.

    See `terarec.kernels.ref.dense`; the columns are added in another order than there.
    """
    # In float32 for any type: a column sums thousands of rows, of which bfloat16 would keep 8 bits.
    masked, sums = torch.empty(part.shape, dtype=part.dtype), torch.empty(part.shape[1])
    kernel = _embedding.mask_bfloat16 if part.dtype is torch.bfloat16 else _embedding.mask_float
    kernel(grad, part, masked, sums, torch.get_num_threads())
    return masked, sums.to(part.dtype)


def has_pair_dots(is_narrow: bool) -> bool:
    """Return whether `pair_dots` runs on this processor and is faster than torch; for bfloat16 if `is_narrow`.

    bfloat16 needs AVX512-BF16; float32 needs fused multiply-add, which all sets but the generic ones of x86 have.
    """
    return _embedding.has_pair_dots(is_narrow)


def pair_dots(first: Tensor, others: Tensor, out_width: int) -> Tensor:
    """Return the dots of all pairs of vectors; see `terarec.kernels.ref.dense`.

    Raises:
        KernelError: The processor has no instructions for it.
    """
    kernel = _embedding.dot_bfloat16_pairs if _is_narrow(first, "pair_dots") else _embedding.dot_float_pairs
    out = torch.empty(first.shape[0], out_width, dtype=first.dtype)
    kernel(first, others, out, torch.get_num_threads())
    return out


def pair_gradients(grad: Tensor, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `pair_dots`' inputs; see `terarec.kernels.ref.dense`.

    Raises:
        KernelError: The processor has no instructions for it.
    """
    is_narrow = _is_narrow(first, "pair_gradients")
    kernel = _embedding.bfloat16_pair_gradients if is_narrow else _embedding.float_pair_gradients
    grad_first, grad_others = torch.empty(first.shape, dtype=first.dtype), empty_floats(*others.shape)
    kernel(grad, first, others, grad_first, grad_others, torch.get_num_threads())
    return grad_first, grad_others


def _is_narrow(first: Tensor, op: str) -> bool:
    is_narrow = first.dtype is torch.bfloat16
    if not has_pair_dots(is_narrow):
        units = "AVX512-BF16" if is_narrow else "fused multiply-add"
        raise KernelError(op, f"the processor, or the set of TERAREC_CPU, has no {units}, expected 'ref' for it")
    return is_narrow
