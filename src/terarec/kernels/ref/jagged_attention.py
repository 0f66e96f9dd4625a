# SPDX-License-Identifier: Apache-2.0
"""Attention within sequences of different lengths in plain PyTorch, one sequence after the other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from terarec.kernels.attention import AttentionForm, ScoreBiases, earlier


def jagged_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, form: AttentionForm, biases: ScoreBiases
) -> Tensor:
    """Return the values that each position mixes; see `terarec.ops.jagged_attention.jagged_attention`."""
    outputs = [value.new_empty(0, *value.shape[1:])]
    for begin, end in pairwise(offsets.tolist()):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        scores = (q @ k.transpose(1, 2)) * form.factor(query.shape[2])
        distances = earlier(end - begin, end - begin, 0, query.device)
        if biases.position is not None:
            scores = scores + biases.position[:, biases.of_distances(distances)]
        if biases.time is not None and biases.times is not None:
            gaps = biases.times[begin:end].unsqueeze(1) - biases.times[begin:end]
            scores = scores + biases.time[:, biases.of_gaps(gaps)]
        masked = (distances < 0) if form.causal else torch.zeros_like(distances, dtype=torch.bool)
        if form.kind == "softmax":
            weights = scores.masked_fill(masked, -torch.inf).softmax(2)
        else:
            weights = silu(scores).masked_fill(masked, 0.0)
        outputs.append((weights.to(v.dtype) / form.divisor @ v).transpose(0, 1))
    return torch.cat(outputs)
