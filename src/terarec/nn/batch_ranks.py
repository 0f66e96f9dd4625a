# SPDX-License-Identifier: Apache-2.0
"""Layers and losses that compare the samples of a batch, where several processes have a part of it each.

A loss is a sum over processes: each runs the backward pass of its own part. The exchanges in this module pass gradients
back, so that their sum is the gradient of the whole batch.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class BatchRanks(Protocol):
    """The processes that each have a part of a batch, such as `terarec.dist.Ranks`; all of them make the same calls.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    rank: int
    size: int

    def all_reduce_(self, what: str, values: Tensor, reduction: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Replace `values` on every process by their sum, maximum or minimum, and return them."""

    def gather_rows(self, what: str, values: Tensor) -> list[Tensor]:
        """Return the rows ``[n, ...]`` of every process, of any number each, in their order, on every process."""


class Normalized(NamedTuple):
    """Columns with mean 0 and variance 1 over the batch of all processes.

    Attributes:
        values: float32[n, C], of the samples of this process.
        mean: float32[C], of all samples; without gradient.
        var: float32[C], not corrected for the mean; without gradient.
        num_samples: Number of all samples.
    """

    values: Tensor
    mean: Tensor
    var: Tensor
    num_samples: int


def sum_over(ranks: BatchRanks, what: str, values: Tensor) -> Tensor:
    """Return the sum of numbers over the processes; no gradient goes through it."""
    # A copy, since the collective works in place.
    return ranks.all_reduce_(what, values.detach().clone())


def rows_of_all(ranks: BatchRanks, what: str, values: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes one after the other, through which gradients go back to each.

    Args:
        ranks: The processes.
        what: Name of the collective.
        values: Rows [n, ...] of this process.

    Returns:
        The rows, and the number of this process's first one among them.
    """
    # Keys and labels have no gradient, and so no backward with a collective of its own.
    if not values.requires_grad:
        parts = ranks.gather_rows(what, values)
        return torch.cat(parts), _first(ranks, parts)
    joined: tuple[Tensor, int] = _Rows.apply(values, ranks, what)  # type: ignore[no-untyped-call]
    return joined


def normalize(ranks: BatchRanks, what: str, x: Tensor, *, eps: float) -> Normalized:
    """Normalize the columns of the batch of all processes to mean 0 and variance 1.

    Args:
        ranks: The processes.
        what: Name of the layer, for errors.
        x: float[n, C], the samples of this process; n may be 0.
        eps: Number added to the variance.
    """
    values, mean, var, count = _Normalize.apply(x.float(), ranks, what, eps)  # type: ignore[no-untyped-call]
    return Normalized(values, mean, var, count)


def _first(ranks: BatchRanks, parts: list[Tensor]) -> int:
    return sum(part.shape[0] for part in parts[: ranks.rank])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: BatchRanks, what: str) -> tuple[Tensor, int]:
        parts = ranks.gather_rows(what, values.detach())
        ctx.ranks, ctx.what, ctx.first, ctx.count = ranks, what, _first(ranks, parts), values.shape[0]
        return torch.cat(parts), ctx.first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # Every process used these rows in its own loss, so their gradients are summed before each takes its part.
        total = ctx.ranks.all_reduce_(f"gradients of {ctx.what}", grad.contiguous().clone())
        return total[ctx.first : ctx.first + ctx.count], None, None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: BatchRanks, what: str, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
        # In float64, so that statistics hardly depend on how the samples are spread over ranks.
        own = x.double()
        # Each process sends its mean and the squares around it (Chan et al.): sums of squares themselves would cancel.
        # A rank may have no samples of an epoch's last batch. Their mean would be NaN, also times a count of 0.
        own_mean = own.mean(0) if x.shape[0] else own.new_zeros(x.shape[1])
        count = own.new_tensor([float(x.shape[0])])
        mine = torch.cat([count, own_mean, (own - own_mean).square().sum(0)])
        counts, means, squares = torch.split(
            torch.cat(ranks.gather_rows(what, mine[None])), [1, x.shape[1], x.shape[1]], dim=1
        )
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        var = (squares + counts * (means - mean).square()).sum(0) / total
        scale = (var + eps).rsqrt()
        values = ((own - mean) * scale).float()
        ctx.save_for_backward(values, scale)
        ctx.ranks, ctx.what, ctx.total = ranks, what, total
        # The running statistics read these; gradients go through `values` alone.
        center, deviation = mean.float(), var.float()
        ctx.mark_non_differentiable(center, deviation)
        return values, center, deviation, int(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        values, scale = ctx.saved_tensors
        # Mean and variance depend on every sample, so the two means over the batch below are sums over all ranks. Both
        # are sent in one collective, whose cost is its latency.
        sums = torch.stack([grad.sum(0, dtype=torch.float64), (grad * values).sum(0, dtype=torch.float64)])
        shift, slope = (ctx.ranks.all_reduce_(f"gradients of {ctx.what}", sums) / ctx.total).unbind()
        return (scale * (grad - shift - values * slope)).float(), None, None, None
