# SPDX-License-Identifier: Apache-2.0
"""Pooled lookup from rows of floats or 8-bit codes, and its gradient as one vector a key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import MAX, MEAN, NONE, ROW_TAIL_BYTES, SQRTN, SUM, BadKeyError, Extents, bad_offsets

_NUMBERS_AT_ONCE = 1 << 22  # converted to float32 at once, in addition to the rows


def quantize_rows(weights: Tensor) -> Tensor:
    """Pack rows. No value changes by more than range / 510 of its row, except for the rounding of float32.

    Args:
        weights: float32, bfloat16 or float16 [V, D].

    Returns:
        uint8[V, D + 8].

    Raises:
        ConfigError: A value that is not finite, or a row whose range float32 cannot hold; the message has the row.
    """
    rows, width = weights.shape
    packed = torch.empty(rows, width + ROW_TAIL_BYTES, dtype=torch.uint8, device=weights.device)
    chunk = max(1, _NUMBERS_AT_ONCE // max(1, width))
    # In chunks: a float32 copy of a whole table would take up to twice the memory of the table itself.
    for first in range(0, rows, chunk):
        part = weights[first : first + chunk].float()
        lowest, highest = part.amin(dim=1), part.amax(dim=1)
        # One test for all: NaN and infinity carry over to the difference, and a range beyond float32 is infinite.
        wrong = (~(highest - lowest).isfinite()).nonzero()
        if wrong.numel():
            raise ConfigError(
                f"weights[{first + int(wrong[0])}]", "got values that are not finite, or of infinite range"
            )
        # By a tensor: torch multiplies by the inverse of a Python number on a GPU, which rounds another way.
        scale = (highest - lowest) / highest.new_tensor(255.0)
        # A row of one value has scale 0, and codes of 0.
        steps = torch.where(scale > 0.0, scale, 1.0)[:, None]
        # (n, D) minus (n, 1): the lowest value of a row is code 0, the highest is code 255.
        codes = ((part - lowest[:, None]) / steps).round_().clamp_(0.0, 255.0)
        packed[first : first + chunk, :width] = codes.to(torch.uint8)
        packed[first : first + chunk, width:] = torch.stack([scale, lowest], dim=1).view(torch.uint8)
    return packed


def dequantize_rows(packed: Tensor) -> Tensor:
    """Return the values float32[n, D] of ``packed uint8[n, D + 8]`` rows."""
    codes = packed[:, :-ROW_TAIL_BYTES].float()
    tails = packed[:, -ROW_TAIL_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned as float32 has to be
    scale, offset = tails.view(torch.float32).unbind(dim=1)
    return codes * scale[:, None] + offset[:, None]


class Located(NamedTuple):
    """The locations of the keys of a lookup.

    Attributes:
        bags: Bag of each key, int64[N].
        rows: Arena row of each key, int64[N].
        factors: float32[S * B], factor of each bag's sum.
        is_max: Whether each bag is pooled by its maximum, bool[S * B].
    """

    bags: Tensor
    rows: Tensor
    factors: Tensor
    is_max: Tensor


def bag_lookup(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Return the vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: [V, D], of any floating type.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: Layout array int64[S, 4].
        is_pooled: Whether the layout pools; known without reading it.
        key_weights: float32[N], factors of the vectors; not with `MAX` or `NONE`.

    Returns:
        [B, S * D], or [N, D] in the order of the keys; float32 for the narrow types.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    located = locate(keys, offsets, layout, key_weights)
    vectors = widened(weights[located.rows])
    return pool(vectors, located, layout.shape[0], key_weights) if is_pooled else vectors


def quantized_bag_lookup(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Look up ``packed uint8[V, D + 8]`` of `terarec.kernels.ref.bag_lookup.quantize_rows` as `bag_lookup` does."""
    located = locate(keys, offsets, layout, key_weights)
    vectors = dequantize_rows(packed[located.rows])
    return pool(vectors, located, layout.shape[0], key_weights) if is_pooled else vectors


def pool(vectors: Tensor, located: Located, num_features: int, key_weights: Tensor | None) -> Tensor:
    """Return the ``vectors [N, D]`` of the keys, pooled to [B, S * D]."""
    if key_weights is not None:
        vectors = vectors * key_weights[:, None].to(vectors.dtype)
    num_bags, width = located.factors.numel(), vectors.shape[1]
    pooled = vectors.new_zeros(num_bags, width).index_add_(0, located.bags, vectors)
    pooled *= located.factors.to(pooled.dtype)[:, None]
    if bool(located.is_max.any()):
        pooled = torch.where(located.is_max[:, None], bag_maxima(vectors, located.bags, num_bags), pooled)
    # (S * B, D), feature-major, to (B, S * D): bags lie feature by feature, the output sample by sample.
    by_feature = pooled.reshape(num_features, num_bags // num_features, width)
    return by_feature.transpose(0, 1).reshape(num_bags // num_features, num_features * width)


def row_dots(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> Tensor:
    """Return the dot product of each key's row with the gradient of its bag, the input of `key_weight_gradient`.

    Args:
        weights: [V, D], of any floating type.
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: [B, S * D], of the pooled result.
        layout: Layout array int64[S, 4].

    Returns:
        [N] of the type of `grad`.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    # Without key weights: the dots are those of the rows themselves.
    located = locate(keys, offsets, layout)
    return (widened(weights[located.rows]) * by_bags(grad, layout.shape[0])[located.bags]).sum(dim=1)


def key_weight_gradient(dots: Tensor, offsets: Tensor, pooling: Tensor, key_weights: Tensor) -> Tensor:
    """Return the gradient of `bag_lookup`'s result with respect to its key weights w, without a wait for a device.

    With d the `row_dots` of a bag's keys: d for "sum"; (d - sum(w d) / sum(w)) / sum(w) for "mean";
    (d - w sum(w d) / sum(w^2)) / sqrt(sum(w^2)) for "sqrtn". Zero where a bag's divisor is zero.

    Args:
        dots: float32[N].
        offsets: int64[S * B + 1], which `row_dots` has checked.
        pooling: int64[S], the pooling of each feature.
        key_weights: float32[N].

    Returns:
        float32[N].
    """
    lengths = offsets.diff()
    bags = numbered_bags(lengths, dots.numel())
    of_bags = pooling.repeat_interleave(lengths.numel() // pooling.numel())
    factor, of_keys = bag_factors(offsets, of_bags, key_weights)[bags], of_bags[bags]
    weighted = _bag_sums((key_weights * dots)[:, None], offsets)[bags, 0]
    # The derivative of the divisor: for "sqrtn" it has the weight itself as a factor, for "mean" 1.
    turned = torch.where(of_keys == SQRTN, key_weights * factor * factor * weighted, factor * weighted)
    return factor * (dots - torch.where(of_keys == SUM, 0.0, turned))


def spread_gradient(
    keys: Tensor,
    offsets: Tensor,
    grad: Tensor,
    layout: Tensor,
    key_weights: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `bag_lookup`'s result as one vector a key.

    Args:
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: Shaped as the result.
        layout: Layout array int64[S, 4].
        key_weights: float32[N] of the lookup.
        weights: [V, D] as they were at the lookup; read if a feature is pooled by maximum, whose gradient goes, column
            by column, to the first key of the bag that attains it.
        places: int64[N], the row of `weights` in which each key's row lies; None for its arena row.

    Returns:
        (arena rows int64[N], gradients [N, D]), in the order of the keys.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    located = locate(keys, offsets, layout, key_weights)
    if bool((layout[:, 2] == NONE).any()):
        # Without pooling the result has a row a key, and so has its gradient.
        return located.rows, grad
    vectors = None
    # Only here are the rows read: callers may pass None where rows have moved since and no feature needs them.
    if weights is not None and bool(located.is_max.any()):
        vectors = weights[located.rows if places is None else places]
    return located.rows, spread(located, grad, layout.shape[0], key_weights, vectors)


def spread(
    located: Located, grad: Tensor, num_features: int, key_weights: Tensor | None, vectors: Tensor | None
) -> Tensor:
    """Return the gradient [N, D] of each key's vector, without a wait for a device.

    Args:
        located: Where the keys are.
        grad: [B, S * D], of the pooled result.
        num_features: S.
        key_weights: float32[N] of the lookup.
        vectors: [N, D] of the keys if a feature is pooled by maximum; else None.
    """
    by_bag = by_bags(grad, num_features)
    factors = located.factors[located.bags]
    if key_weights is not None:
        factors = factors * key_weights
    values = by_bag[located.bags] * factors.to(grad.dtype)[:, None]
    if vectors is not None:
        at_maximum = first_maxima(widened(vectors), located.bags, by_bag.shape[0])
        values = torch.where(located.is_max[located.bags, None] & ~at_maximum, 0.0, values)
    return values


def by_bags(grad: Tensor, num_features: int) -> Tensor:
    """Return ``[B, S * D]`` as ``[S * B, D]``, a row for each bag."""
    width = grad.shape[1] // num_features
    return grad.reshape(-1, num_features, width).transpose(0, 1).reshape(-1, width)


def bag_maxima(vectors: Tensor, bags: Tensor, num_bags: int) -> Tensor:
    """Return the maximum [S * B, D] of each bag's ``vectors [N, D]``; zeros for an empty bag, NaN for any NaN."""
    index = bags[:, None].expand_as(vectors)
    empty = vectors.new_zeros(num_bags, vectors.shape[1])
    # Without `include_self` the zeros count for empty bags alone: a maximum may be negative.
    return empty.scatter_reduce(0, index, vectors, "amax", include_self=False)


def first_maxima(vectors: Tensor, bags: Tensor, num_bags: int) -> Tensor:
    """Return whether each vector is the first of its bag that holds the maximum of a column, bool[N, D]."""
    largest = bag_maxima(vectors, bags, num_bags)[bags]
    # NaN equals nothing, so a bag whose maximum is NaN needs the second test.
    attains = (vectors == largest) | (vectors.isnan() & largest.isnan())
    position = torch.arange(bags.numel(), device=bags.device)[:, None].expand_as(vectors)
    never = bags.numel()
    index = bags[:, None].expand_as(vectors)
    # Of equal maxima the first wins alone: `amax` of torch spreads a gradient over all of them.
    first = position.new_full((num_bags, vectors.shape[1]), never)
    first = first.scatter_reduce(0, index, torch.where(attains, position, never), "amin")
    return first[bags] == position


def widened(vectors: Tensor) -> Tensor:
    """Return `vectors` of a narrow floating type as float32; others unchanged."""
    return vectors.float() if vectors.dtype in (torch.bfloat16, torch.float16) else vectors


def locate(keys: Tensor, offsets: Tensor, layout: Tensor, key_weights: Tensor | None = None) -> Located:
    """Return where the keys are, all of them and the offsets checked.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    _check_offsets(offsets, keys.numel())
    # The layout array is in host memory, where the launchers read it without waiting for a device.
    layout = layout.to(keys.device)
    located = locate_checked(keys, offsets, layout[:, 0], layout[:, 2], key_weights)
    features = located.bags // max((offsets.numel() - 1) // layout.shape[0], 1)
    limits = layout[features, 1]
    outside = (keys < 0) | (keys >= limits)
    if bool(outside.any()):
        position = int(outside.nonzero()[0])
        raise BadKeyError(int(features[position]), position, int(keys[position]), int(limits[position]))
    return located


def locate_checked(
    keys: Tensor, offsets: Tensor, first_rows: Tensor, pooling: Tensor, key_weights: Tensor | None = None
) -> Located:
    """Return where keys are that a lookup has checked, without a wait for their device.

    Args:
        keys: int64[N].
        offsets: int64[S * B + 1].
        first_rows: int64[S], the first arena row of each feature's table.
        pooling: int64[S], the pooling of each feature.
        key_weights: float32[N] of the lookup.
    """
    lengths = offsets.diff()
    batch_size = lengths.numel() // first_rows.numel()
    bags = numbered_bags(lengths, keys.numel())
    # Feature-major: bags s * B to (s + 1) * B - 1 are those of feature s. An empty batch has no bags to divide.
    rows = first_rows[bags // max(batch_size, 1)] + keys
    of_bags = pooling.repeat_interleave(batch_size)
    return Located(bags, rows, bag_factors(offsets, of_bags, key_weights), of_bags == MAX)


def numbered_bags(lengths: Tensor, num_keys: int) -> Tensor:
    """Return the bag int64[N] of each key of bags with ``lengths int64[n]``."""
    # With the number of keys, for which a device would be waited for.
    return torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths, output_size=num_keys)


def bag_factors(offsets: Tensor, pooling: Tensor, key_weights: Tensor | None) -> Tensor:
    """Return the factor of the sum of each bag, float32[S * B].

    Mean and sqrtn divide by n and sqrt(n), or with key weights w by sum(w) and sqrt(sum(w^2)), as TensorFlow's
    embedding_lookup_sparse does; where that is zero, the bag gives zeros.
    """
    total = squares = offsets.diff().float()
    if key_weights is not None:
        total, squares = _bag_sums(torch.stack([key_weights, key_weights * key_weights], dim=1), offsets).unbind(dim=1)
    # The divisor of an empty bag of mean or sqrtn is 0, too; its sum is zeros with any factor.
    divisor = torch.where(pooling == MEAN, total, torch.where(pooling == SQRTN, squares.sqrt(), 1.0))
    return torch.where(divisor == 0.0, 0.0, divisor.reciprocal())


def _bag_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sums [S * B, C] of each bag's ``values [N, C]``, added in the order of the keys on any device.

    `index_add` adds in an order of each run's own on a GPU. Numbers without columns would be added in a tree there.
    """
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=offsets, axis=0, initial=0, unsafe=True)
    return sums


def _check_offsets(offsets: Tensor, num_keys: int) -> None:
    if int(offsets[0]) != 0:
        raise bad_offsets(0, int(offsets[0]), num_keys)
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel():
        index = int(falls[0]) + 1
        raise bad_offsets(index, int(offsets[index]), num_keys)
    if int(offsets[-1]) != num_keys:
        raise bad_offsets(offsets.numel() - 1, int(offsets[-1]), num_keys)


def lookup_fits(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    key_weights: Tensor | None,
    grad: Tensor | None,
    extents: Extents,
) -> bool:
    """Return whether all tensors are in host memory and have the types and shapes that a lookup and its layout take.

    Args:
        weights: float32, bfloat16 or float16 [V, D], if it fits; all arguments may be any tensors.
        keys: int64[N].
        offsets: int64[S * B + 1].
        key_weights: float32[N], where the layout takes some, or None.
        grad: Gradient of the result: float32[B, S * D], or float32[N, D] for a layout without pooling; or None.
        extents: Extents of the layout.
    """
    num_features, width, num_rows, is_pooled, takes_key_weights = extents
    tensors = [tensor for tensor in (weights, keys, offsets, key_weights, grad) if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    if weights.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weights.dim() != 2:
        return False
    if weights.shape[1] != width or weights.shape[0] < num_rows:
        return False
    if any(tensor.dtype != torch.int64 or tensor.dim() != 1 for tensor in (keys, offsets)):
        return False
    num_bags = offsets.shape[0] - 1
    if num_bags < 0 or num_bags % num_features:
        return False
    if key_weights is not None:
        is_one_a_key = key_weights.dtype == torch.float32 and key_weights.shape == keys.shape
        if not (is_one_a_key and takes_key_weights):
            return False
    shape = (num_bags // num_features, num_features * width) if is_pooled else (keys.shape[0], width)
    return grad is None or (grad.dtype == torch.float32 and tuple(grad.shape) == shape)
