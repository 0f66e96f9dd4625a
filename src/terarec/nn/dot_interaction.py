"""Pairwise dot products of feature vectors (Naumov et al. 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# The next layer's GEMM reads rows of this many floats at a time: 415 columns instead of 416 made its gradient
# 1.5 times slower (73 against 47 ms for 8192 x 415 x 1024, MKL 2024.2 on 2 Zen 3 cores).
_ALIGNMENT = 16


class DotInteraction(nn.Module):
    """The dots of all pairs of F vectors, behind the first vector itself.

    Args:
        num_vectors: number F of vectors a sample.
        width: length D of a vector.
        num_zeros: columns of zeros at the end; by default as many as make the width a multiple of 16.
    """

    _lower: Tensor
    _pair_of: Tensor

    def __init__(self, num_vectors: int, width: int, *, num_zeros: int | None = None) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        pair_of = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of[rows, columns] = pair_of[columns, rows] = torch.arange(rows.numel())
        self.register_buffer("_lower", rows * num_vectors + columns, persistent=False)
        self.register_buffer("_pair_of", pair_of.flatten(), persistent=False)
        self.num_vectors = num_vectors
        self.width = width
        self.num_zeros = -(width + rows.numel()) % _ALIGNMENT if num_zeros is None else num_zeros

    @property
    def out_width(self) -> int:
        """D + F (F - 1) / 2 + num_zeros."""
        return self.width + self._lower.numel() + self.num_zeros

    def forward(self, first: Tensor, others: Tensor) -> Tensor:
        """Interact.

        Args:
            first: float[B, D]; under autocast bfloat16.
            others: float[B, (F - 1) * D], the other vectors side by side.

        Returns:
            [B, out_width] of `first`'s type: `first`, then the dots of vectors (1, 0), (2, 0), (2, 1), ..., then zeros.
        """
        out: Tensor = _Interact.apply(  # type: ignore[no-untyped-call]
            first, others, self._lower, self._pair_of, self.out_width
        )
        return out

    def extra_repr(self) -> str:
        """The shape."""
        return f"num_vectors={self.num_vectors}, width={self.width}, out_width={self.out_width}"


class _Interact(torch.autograd.Function):
    """One `bmm` forward and one backward: the gradient of all pairs is a symmetric matrix S a sample, and S T theirs.

    Autograd's own backward takes two `bmm`, a sum and a scatter. The products are of the narrower type of the two
    inputs: with bfloat16 the vectors of 8192 samples, 27 x 64, took 12 ms both ways and 44 with float32 (1 Zen 5 core).
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor, lower: Tensor, pair_of: Tensor, out_width: int) -> Tensor:
        batch_size, width = first.shape
        num_pairs = lower.numel()
        num_vectors = 1 + others.shape[1] // width
        dtype = min(first.dtype, others.dtype, key=lambda dtype: dtype.itemsize)
        vectors = torch.empty(batch_size, num_vectors, width, dtype=dtype, device=others.device)
        vectors[:, 0] = first
        vectors[:, 1:] = others.view(batch_size, num_vectors - 1, width)
        with torch.autocast(first.device.type, enabled=False):
            dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        out = first.new_empty(batch_size, out_width)
        out[:, :width] = first
        out[:, width : width + num_pairs] = dots.gather(1, lower.expand(batch_size, -1))
        out[:, width + num_pairs :] = 0
        ctx.save_for_backward(vectors, pair_of)
        ctx.others_dtype = others.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        vectors, pair_of = ctx.saved_tensors
        batch_size, num_vectors, width = vectors.shape
        by_pair = grad[:, width:].to(vectors.dtype)
        # As integers, which torch gathers twice as fast as 16-bit floats; Inductor has no such view.
        if by_pair.element_size() == 2 and not torch.compiler.is_compiling():
            symmetric = by_pair.view(torch.int16).gather(1, pair_of.expand(batch_size, -1)).view(vectors.dtype)
        else:
            symmetric = by_pair.gather(1, pair_of.expand(batch_size, -1))
        symmetric = symmetric.view(batch_size, num_vectors, num_vectors)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        with torch.autocast(grad.device.type, enabled=False):
            of_vectors = torch.bmm(symmetric, vectors)
        grad_first = of_vectors[:, 0].to(grad.dtype) + grad[:, :width]
        # Contiguous, so that a leaf or a row optimizer takes it without a copy.
        grad_others = of_vectors[:, 1:].to(ctx.others_dtype).contiguous()
        return grad_first, grad_others.flatten(1), None, None, None
