# SPDX-License-Identifier: Apache-2.0
"""Factors of columns, hidden units and experts that a sample itself gives; probabilities of the steps of a funnel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from terarec.nn.activations import dropout, new_activation
from terarec.nn.dense import MLP, Linear, new_linear
from terarec.nn.initializers import Distribution

Initial = Callable[[int, int], tuple[Distribution, Distribution]]
"""(fan_in, fan_out) -> distributions of a layer's initial weight and bias."""


class SqueezeExcitation(nn.Module):
    """Vectors times a factor each: v_i a_i, a = relu(W_2 relu(W_1 z)), z_i the mean of v_i (Huang et al. 2019).

    Args:
        num_vectors: Number m of vectors a sample.
        reduction: Divisor of m that gives the width of the hidden layer.
        generator: Source of the initial weights.
        initial: Distributions of initial weights; there are no biases.
    """

    def __init__(self, num_vectors: int, reduction: int, *, generator: torch.Generator, initial: Initial) -> None:
        super().__init__()
        hidden = max(1, num_vectors // reduction)

        def layer(fan_in: int, fan_out: int) -> Linear:
            drawn = new_linear(fan_in, fan_out, weight=initial(fan_in, fan_out)[0], bias=None, generator=generator)
            drawn.relu = True
            return drawn

        self.squeeze = layer(num_vectors, hidden)
        self.excite = layer(hidden, num_vectors)

    def forward(self, vectors: Tensor) -> Tensor:
        """Weigh the vectors: float[B, m, D] -> float[B, m, D]."""
        factors: Tensor = self.excite(self.squeeze(vectors.mean(2)))
        return vectors * factors.to(vectors.dtype).unsqueeze(2)


class VectorNorm(nn.Module):
    """Each vector normalized over its elements, with a scale and a shift of its own (Ba et al. 2016).

    Args:
        num_vectors: Number m of vectors a sample.
        width: Length D of a vector.
    """

    def __init__(self, num_vectors: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_vectors, width))
        self.bias = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalize the vectors: float[B, m, D] -> float[B, m, D]."""
        return nn.functional.layer_norm(vectors, vectors.shape[2:]) * self.weight + self.bias


class MaskBlock(nn.Module):
    """A hidden layer of a masked input: act(norm(W (x * mask))), mask = W_2 relu(W_1 e + b_1) + b_2.

    The mask depends on the vectors e of the sample (Wang et al. 2021, arXiv 2102.07619); the norm is over
    the units of a sample.

    Args:
        guide_width: Width n of e.
        in_width: Width k of the input x.
        out_width: Width h of the output.
        mask_width: Width of the mask's hidden layer.
        activation: Name of the activation.
        dropout: Probability of zeroing an output in training.
        generator: Source of the initial weights.
        initial: Distributions of a layer's initial weight and bias.
    """

    def __init__(
        self,
        guide_width: int,
        in_width: int,
        out_width: int,
        *,
        mask_width: int,
        activation: str,
        dropout: float,
        generator: torch.Generator,
        initial: Initial,
    ) -> None:
        super().__init__()
        self.mask = MLP(guide_width, (mask_width, in_width), generator=generator, initial=initial)
        weight, _ = initial(in_width, out_width)
        # Without a bias, which the norm has.
        self.layer = new_linear(in_width, out_width, weight=weight, bias=None, generator=generator)
        self.norm = nn.LayerNorm(out_width)
        self.activation = new_activation(activation, out_width)
        self.dropout = dropout

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        """Return the outputs: float[B, k], float[B, n] -> float[B, h]."""
        out: Tensor = self.activation(self.norm(self.layer(x * self.mask(guide))))
        return dropout(out, self.dropout) if self.training and self.dropout else out


class ContextGate(nn.Module):
    """An input times 2 sigmoid(g), g an MLP of a context, or learned weights (Mao et al. 2023, arXiv 2304.00902).

    Args:
        width: Width n of the input.
        mlp: Module that makes g float[B, n] from a context; None for learned weights, which start at 0: a gate of ones.
    """

    def __init__(self, width: int, mlp: MLP | None) -> None:
        super().__init__()
        self.mlp = mlp
        self.weights = nn.Parameter(torch.zeros(width)) if mlp is None else None

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Gate an input: float[B, n], and the context float[B, k], which learned weights do not read."""
        gate = self.weights if self.mlp is None else self.mlp(context)
        assert gate is not None  # one of both is there
        return x * (2.0 * gate.sigmoid())


def mix_experts(outputs: Tensor, gate: Tensor) -> Tensor:
    """Return the outputs of experts, weighted by the softmax of a gate.

    Args:
        outputs: float[B, E, W] of E experts.
        gate: float[B, E].

    Returns:
        float[B, W].
    """
    # Under autocast a softmax on a GPU returns float32, while the outputs are of 16 bits.
    weights = gate.softmax(1).to(outputs.dtype)
    return (weights.unsqueeze(1) @ outputs).squeeze(1)


def funnel_logits(logits: Tensor) -> Tensor:
    """Return the logits of having taken each step of a funnel, for those of each step given the one before.

    The probability of step k is the product of sigmoid(logits) up to k (Ma et al. 2018, arXiv 1804.07931, eq. 1, for
    two steps). In logarithms of both outcomes, so that neither a probability near 0 nor one near 1 is rounded off.

    Args:
        logits: float[B, C], in the order of the steps.

    Returns:
        float[B, C], at least of 32 bits.
    """
    first, *others = logits.to(torch.promote_types(logits.dtype, torch.float32)).unbind(1)
    taken, not_taken = logsigmoid(first), logsigmoid(-first)
    steps = [first]
    for logit in others:
        # Not taken: the step before was not, or it was and this one is not.
        not_taken = torch.logaddexp(not_taken, taken + logsigmoid(-logit))
        taken = taken + logsigmoid(logit)
        steps.append(taken - not_taken)
    return torch.stack(steps, dim=1)
