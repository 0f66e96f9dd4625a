# SPDX-License-Identifier: Apache-2.0
"""The kernels of dense layers, other than products, in plain PyTorch. T is bfloat16 or float32."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_gradient(grad: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input of a ReLU, and the sums of its columns.

    Args:
        grad: T[B, n], the gradient of `part`.
        part: T[B, n], the positive part.

    Returns:
        T[B, n]; T[n], added in float32.
    """
    # The backward of ReLU by its output, as autograd calls it: NaN in `part` passes the gradient on.
    masked = torch.ops.aten.threshold_backward(grad, part, 0)
    return masked, masked.sum(0, dtype=torch.float32).to(grad.dtype)


def has_pair_dots(is_narrow: bool) -> bool:
    """Return whether `pair_dots` is faster than torch's operations: no."""
    return False


def pair_dots(first: Tensor, others: Tensor, out_width: int) -> Tensor:
    """Return the first vector and the dots of all pairs of F vectors.

    Args:
        first: T[B, D].
        others: float32[B, (F - 1) * D]; rounded to T before the products, which are added in float32.
        out_width: At least D + F (F - 1) / 2.

    Returns:
        T[B, out_width]: `first`, the dots of vectors (1, 0), (2, 0), (2, 1), ..., and zeros.
    """
    vectors = _vectors(first, others)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]
    used = torch.cat([first, dots], dim=1)
    return torch.nn.functional.pad(used, (0, out_width - used.shape[1]))


def pair_gradients(grad: Tensor, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `pair_dots`' inputs.

    Args:
        grad: T[B, out_width], the gradient of the result.
        first: Vectors as for `pair_dots`.
        others: Vectors as for `pair_dots`.

    Returns:
        T[B, D]; float32[B, (F - 1) * D]. The gradients through the dots are rounded to T.
    """
    vectors = _vectors(first, others)
    batch_size, num_vectors, width = vectors.shape
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    symmetric = grad.new_zeros(batch_size, num_vectors, num_vectors)
    # d(v_i . v_j) goes to both vectors: with the symmetric matrix one product (B, F, F) x (B, F, D) sums all pairs.
    symmetric[:, rows, columns] = symmetric[:, columns, rows] = grad[:, width : width + rows.numel()]
    of_vectors = torch.bmm(symmetric, vectors)
    return of_vectors[:, 0] + grad[:, :width], of_vectors[:, 1:].flatten(1).float()


def _vectors(first: Tensor, others: Tensor) -> Tensor:
    """Return the vectors T[B, F, D]."""
    batch_size, width = first.shape
    side_by_side = torch.cat([first, others.to(first.dtype)], dim=1)
    return side_by_side.view(batch_size, side_by_side.shape[1] // width, width)
