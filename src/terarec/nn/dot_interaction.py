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
    """

    _lower: Tensor
    _pair_of: Tensor

    def __init__(self, num_vectors: int, width: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        pair_of = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of[rows, columns] = pair_of[columns, rows] = torch.arange(rows.numel())
        self.register_buffer("_lower", rows * num_vectors + columns, persistent=False)
        self.register_buffer("_pair_of", pair_of.flatten(), persistent=False)
        self.num_vectors = num_vectors
        self.width = width

    @property
    def out_width(self) -> int:
        """D + F (F - 1) / 2, rounded up to a multiple of 16."""
        return -(-(self.width + self._lower.numel()) // _ALIGNMENT) * _ALIGNMENT

    def forward(self, first: Tensor, others: Tensor) -> Tensor:
        """Interact.

        Args:
            first: float[B, D].
            others: float[B, (F - 1) * D], the other vectors side by side.

        Returns:
            [B, out_width] of `first`'s type: `first`, then the dots of vectors (1, 0), (2, 0), (2, 1), ..., then zeros.
        """
        joined = torch.cat([first, others.to(first.dtype)], dim=1)
        vectors = joined.view(-1, self.num_vectors, self.width)
        out: Tensor = _Interact.apply(vectors, self._lower, self._pair_of, self.out_width)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """The shape."""
        return f"num_vectors={self.num_vectors}, width={self.width}, out_width={self.out_width}"


class _Interact(torch.autograd.Function):
    """One `bmm` each way: the gradient of all pairs is one symmetric matrix a sample.

    Autograd's own backward takes two `bmm` and a scatter that adds: see benchmarks/results/dlrm_step.csv.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, lower: Tensor, pair_of: Tensor, out_width: int) -> Tensor:
        batch_size, _, width = vectors.shape
        num_pairs = lower.numel()
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        out = vectors.new_empty(batch_size, out_width)
        out[:, :width] = vectors[:, 0]
        out[:, width : width + num_pairs] = dots.gather(1, lower.expand(batch_size, -1))
        out[:, width + num_pairs :] = 0
        ctx.save_for_backward(vectors, pair_of)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        vectors, pair_of = ctx.saved_tensors
        batch_size, num_vectors, width = vectors.shape
        symmetric = grad[:, width:].gather(1, pair_of.expand(batch_size, -1))
        symmetric = symmetric.view(batch_size, num_vectors, num_vectors)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        out = torch.bmm(symmetric, vectors)
        out[:, 0] += grad[:, :width]
        return out, None, None, None
