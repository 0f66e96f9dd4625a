"""Launchers of bfloat16 kernels of dense layers, other than products."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.cpu.host import _embedding, empty_floats


def mask_gradient(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masked gradient and its column sums in one pass; the same bits for any number of threads.

    See `terarec.kernels.ref.dense`; the columns are added in another order than there.
    """
    masked, sums = torch.empty(part.shape, dtype=part.dtype), torch.empty(part.shape[1])
    _embedding.mask_gradient(grad, part, masked, sums, torch.get_num_threads())
    return masked, sums.to(part.dtype)


def has_pair_dots() -> bool:
    """Return whether the processor has AVX512-BF16, which `pair_dots` needs, and by which it is faster than torch."""
    return _embedding.has_pair_dots()


def pair_dots(first: Tensor, others: Tensor, out_width: int) -> Tensor:
    """Return the dots of all pairs of vectors; see `terarec.kernels.ref.dense`.

    Raises:
        KernelError: The processor has no AVX512-BF16.
    """
    _check_units("pair_dots")
    out = torch.empty(first.shape[0], out_width, dtype=first.dtype)
    _embedding.dot_pairs(first, others, out, torch.get_num_threads())
    return out


def pair_gradients(grad: Tensor, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `pair_dots`' inputs; see `terarec.kernels.ref.dense`.

    Raises:
        KernelError: The processor has no AVX512-BF16.
    """
    _check_units("pair_gradients")
    grad_first, grad_others = torch.empty(first.shape, dtype=first.dtype), empty_floats(*others.shape)
    _embedding.pair_gradients(grad, first, others, grad_first, grad_others, torch.get_num_threads())
    return grad_first, grad_others


def _check_units(op: str) -> None:
    if not has_pair_dots():
        raise KernelError(op, "the processor, or the set of TERAREC_CPU, has no AVX512-BF16, expected 'ref' for it")
