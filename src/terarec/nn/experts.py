# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, and probabilities of the steps of a funnel, for models of several labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


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
