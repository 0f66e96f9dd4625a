"""Self-attention among the vectors of a sample's columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from terarec.nn.dropout import dropout
from terarec.nn.initializers import Distribution
from terarec.nn.linear import new_linear


class SelfAttention(nn.Module):
    """An interacting layer of AutoInt (Song et al. 2019, arXiv 1810.11921, eq. 5 to 8).

    For each head: softmax(Q K^T) V with Q, K, V = x W_q, x W_k, x W_v. The heads lie side by side; the input, projected
    where its width is another, is added; then come layer norm on request and ReLU.

    Args:
        in_width: Length of the vectors that come in.
        width: Length of those that go out, all heads together.
        heads: Number of heads.
        generator: Source of the first weights.
        initial: (fan_in, fan_out) -> distributions of first weights; there are no biases.
        residual: Whether the input is added.
        scale: Whether scores are divided by the root of a head's width (the paper does not).
        layer_norm: Whether the sum is normalized.
        dropout: Probability of zeroing an attention weight in training.
    """

    def __init__(
        self,
        in_width: int,
        width: int,
        heads: int,
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
        residual: bool = True,
        scale: bool = False,
        layer_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.factor = (width // heads) ** -0.5 if scale else 1.0
        self.dropout = dropout
        self.adds_input = residual

        def projection() -> nn.Linear:
            return new_linear(in_width, width, weight=initial(in_width, width)[0], bias=None, generator=generator)

        self.query, self.key, self.value = projection(), projection(), projection()
        self.projection = projection() if residual and in_width != width else nn.Identity()
        self.norm = nn.LayerNorm(width) if layer_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """float[B, m, in_width] -> float[B, m, width]."""
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(2, 3) * self.factor).softmax(3)
        if self.training and self.dropout:
            weights = dropout(weights, self.dropout)
        mixed = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
        if self.adds_input:
            mixed = mixed + self.projection(x)
        out: Tensor = self.norm(mixed).relu()
        return out
