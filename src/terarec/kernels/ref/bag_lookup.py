"""Pooled lookup, and the way back from the gradient of its result to one gradient a key."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.contract import MEAN, NONE, BadKeyError, bad_offsets


def bag_lookup(weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool) -> Tensor:
    """The vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: [V, D], of any floating type.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: layout array int64[S, 4].
        is_pooled: whether the layout pools; known without reading it.

    Returns:
        [B, S * D], or [N, D] in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    bags, scales, rows = locate(keys, offsets, layout)
    vectors = weights[rows]
    if not is_pooled:
        return vectors
    num_features = layout.shape[0]
    pooled = weights.new_zeros(offsets.numel() - 1, weights.shape[1]).index_add_(0, bags, vectors)
    pooled *= scales.to(weights.dtype)[:, None]
    batch_size = pooled.shape[0] // num_features
    by_feature = pooled.reshape(num_features, batch_size, weights.shape[1])
    return by_feature.transpose(0, 1).reshape(batch_size, num_features * weights.shape[1])


def spread_gradient(keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `bag_lookup`'s result as one vector a key.

    Args:
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: shaped as the result.
        layout: layout array int64[S, 4].

    Returns:
        (arena rows int64[N], gradients [N, D]), in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    bags, scales, rows = locate(keys, offsets, layout)
    if bool((layout[:, 2] == NONE).any()):
        return rows, grad
    num_features = layout.shape[0]
    width = grad.shape[1] // num_features
    by_bag = grad.reshape(-1, num_features, width).transpose(0, 1).reshape(-1, width)
    return rows, by_bag[bags] * scales.to(grad.dtype)[bags, None]


def locate(keys: Tensor, offsets: Tensor, layout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bag of each key int64[N], factor of each bag float32[S * B], arena row of each key int64[N]), all checked.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    _check_offsets(offsets, keys.numel())
    layout = layout.to(keys.device)
    lengths = offsets.diff()
    batch_size = lengths.numel() // layout.shape[0]
    bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=keys.device), lengths)
    features = bags // max(batch_size, 1)
    limits = layout[features, 1]
    outside = (keys < 0) | (keys >= limits)
    if bool(outside.any()):
        position = int(outside.nonzero()[0])
        raise BadKeyError(int(features[position]), position, int(keys[position]), int(limits[position]))
    is_mean = (layout[:, 2] == MEAN).repeat_interleave(batch_size)
    scales = torch.where(is_mean & (lengths > 1), lengths.clamp(min=1).float().reciprocal(), 1.0)
    return bags, scales, layout[features, 0] + keys


def _check_offsets(offsets: Tensor, num_keys: int) -> None:
    if int(offsets[0]) != 0:
        raise bad_offsets(0, int(offsets[0]), num_keys)
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        index = int(falls[0]) + 1
        raise bad_offsets(index, int(offsets[index]), num_keys)
    if int(offsets[-1]) != num_keys:
        raise bad_offsets(offsets.numel() - 1, int(offsets[-1]), num_keys)
