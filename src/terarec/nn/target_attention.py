"""Pooling of sequences by attention to a target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.nn.mlp import MLP


class TargetAttention(nn.Module):
    """The local activation unit of the Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978, eq. 3).

    The weight of a vector e of the history is a(e, t) = MLP(t, e, t - e, t * e); the output is the sum of a e. There is
    no padding: all vectors of all samples go through the MLP at once.

    Args:
        mlp: What gives a weight [n, 1] for inputs [n, 4 D].
        softmax: Whether the weights of a sample are normalized by a softmax; the paper leaves them as they are.
    """

    def __init__(self, mlp: MLP, *, softmax: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        self.softmax = softmax

    def forward(self, target: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Pool.

        Args:
            target: float[B, D].
            values: float[n, D], the vectors of all histories.
            offsets: int64[B + 1]; sample b has ``values[offsets[b] : offsets[b + 1]]``.

        Returns:
            float[B, D]; zeros for an empty history.
        """
        if not values.shape[0]:
            return torch.zeros_like(target) + values.sum(0)
        lengths = offsets.diff()
        sample = torch.repeat_interleave(lengths, output_size=values.shape[0])
        targets = target.index_select(0, sample)
        weights = self.mlp(torch.cat([targets, values, targets - values, targets * values], dim=1)).float()
        if self.softmax:
            highest = torch.segment_reduce(weights.detach(), "max", offsets=offsets, axis=0, initial=-torch.inf)
            weights = (weights - highest.index_select(0, sample)).exp()
            total = torch.segment_reduce(weights, "sum", offsets=offsets, axis=0, initial=0)
            weights = weights / total.index_select(0, sample)
        pooled: Tensor = torch.segment_reduce(weights * values.float(), "sum", offsets=offsets, axis=0, initial=0)
        return pooled.to(target.dtype)

    def padded(self, target: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Pool histories of as many places each, as an exported program has them.

        Args:
            target: float[B, D].
            values: float[B, K, D].
            mask: bool[B, K], the places that hold a vector.

        Returns:
            float[B, D], as `forward` gives it in evaluation.
        """
        targets = target.unsqueeze(1).expand_as(values)
        inputs = torch.cat([targets, values, targets - values, targets * values], dim=2)
        weights = self.mlp(inputs.flatten(0, 1)).float().unflatten(0, (-1, values.shape[1]))
        is_there = mask.unsqueeze(2)
        if self.softmax:
            highest = weights.masked_fill(~is_there, torch.finfo(weights.dtype).min).amax(1, keepdim=True)
            exponents = (weights - highest).exp().masked_fill(~is_there, 0.0)
            weights = exponents / exponents.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        pooled: Tensor = (weights * values.float()).masked_fill(~is_there, 0.0).sum(1)
        return pooled.to(target.dtype)
