# SPDX-License-Identifier: Apache-2.0
"""The forms of attention within sequences, the biases of its scores, and its definition in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

TIME_BASE = 0.301
"""Difference between the logarithms of two gaps in time that are in neighbouring buckets (HSTU's code)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """Form of the weights of attention.

    Attributes:
        kind: "softmax" of the scores, or "silu" of each (Zhai et al. 2024, arXiv 2402.17152).
        causal: Whether a position attends to itself and earlier ones alone.
        scale: Factor of the dots of queries and keys; None for 1 / sqrt(D).
        divisor: Divisor of the weights.
    """

    kind: Literal["softmax", "silu"] = "softmax"
    causal: bool = True
    scale: float | None = None
    divisor: float = 1.0

    def factor(self, width: int) -> float:
        """Return the factor of the dots of vectors of `width` numbers."""
        return width**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBiases:
    """Biases of the scores of each head, by the distance of two positions and by the gap between their times.

    Attributes:
        position: float[H, 2 M + 1], of the distances -M to M; M + 1 is at least the longest length. None for none.
        time: float[H, K], of K buckets of gaps: floor(log(max(1, gap)) / 0.301), and all longer ones in the last. None
            for none.
        times: int64[T], the time of each position; None without `time`.
    """

    position: Tensor | None = None
    time: Tensor | None = None
    times: Tensor | None = None

    def of_distances(self, distances: Tensor) -> Tensor:
        """Return the places in `position` of distances of queries from keys."""
        assert self.position is not None
        return self.position.shape[1] // 2 + distances

    def of_gaps(self, gaps: Tensor) -> Tensor:
        """Return the places in `time` of gaps int64 between the times of queries and keys, of any sign."""
        assert self.time is not None
        # In float64, which holds all but the longest gaps of nanoseconds exactly.
        buckets = (gaps.abs().clamp(min=1).double().log() / TIME_BASE).long()
        return buckets.clamp(max=self.time.shape[1] - 1)


def earlier(num_queries: int, num_keys: int, first_query: int, device: torch.device) -> Tensor:
    """Return int64[queries, keys], how far each key is before each query; negative for later ones."""
    queries = torch.arange(first_query, first_query + num_queries, device=device)
    return queries.unsqueeze(1) - torch.arange(num_keys, device=device)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, form: AttentionForm, biases: ScoreBiases
) -> Tensor:
    """Return what `terarec.ops.jagged_attention` does in plain PyTorch, one sequence after the other."""
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
