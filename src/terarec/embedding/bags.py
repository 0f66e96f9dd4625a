"""What `torch.nn.EmbeddingBag` and `torch.nn.Embedding` take, as the keys and offsets of a lookup."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from terarec.errors import ConfigError


class Bags(NamedTuple):
    """Bags of one feature: bag b holds ``keys[offsets[b] : offsets[b + 1]]``.

    Attributes:
        keys: int64[N].
        offsets: int64[B + 1].
        key_weights: float32[N], factors of the keys' vectors, or None.
    """

    keys: Tensor
    offsets: Tensor
    key_weights: Tensor | None = None


def bags_of(input: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool) -> Bags:  # noqa: A002
    """The bags that the arguments of `torch.nn.EmbeddingBag` describe.

    Args:
        input: int32 or int64: [N] with `offsets`, [B, L] for bags of L keys, or a jagged nested tensor.
        offsets: int32 or int64: [B], or [B + 1] with `include_last_offset`.
        weights: a factor of each key's vector, shaped as `input`.
        include_last_offset: whether `offsets` holds the end of the last bag, too.

    Raises:
        ConfigError: shapes or types that `torch.nn.EmbeddingBag` does not take.
    """
    if weights is not None and weights.shape != input.shape:
        raise ConfigError(
            f"per_sample_weights: got shape {list(weights.shape)}, expected {list(input.shape)}, the input's"
        )
    if input.is_nested:
        flat = None if weights is None else weights.values().float()
        return Bags(_as_keys(input.values(), "input"), _as_keys(input.offsets(), "input"), flat)  # type: ignore[attr-defined]
    flat = None if weights is None else weights.reshape(-1).float()
    if input.dim() == 2:
        if offsets is not None:
            raise ConfigError("offsets: got a tensor beside an input [B, L], expected None: each row is a bag")
        starts = torch.arange(input.shape[0] + 1, device=input.device)
        return Bags(_as_keys(input, "input").reshape(-1), starts * input.shape[1], flat)
    if input.dim() != 1 or offsets is None or offsets.dim() != 1:
        beside = "none" if offsets is None else f"shape {list(offsets.shape)}"
        got = f"shape {list(input.shape)} with offsets of {beside}"
        raise ConfigError(f"input: got {got}, expected [N] with offsets [B], or [B, L] without")
    offsets = _as_keys(offsets, "offsets")
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), input.shape[0])])
    return Bags(_as_keys(input, "input"), offsets, flat)


def single_keys(input: Tensor) -> Bags:  # noqa: A002
    """A bag for each key of ``input``, int32 or int64 of any shape.

    Raises:
        ConfigError: an input of another type.
    """
    keys = _as_keys(input, "input").reshape(-1)
    return Bags(keys, torch.arange(keys.shape[0] + 1, device=keys.device))


def without_key(bags: Bags, key: int) -> Bags:
    """`bags` with every occurrence of `key` taken out; bags may become empty."""
    kept = bags.keys != key
    ends = torch.cat([bags.offsets.new_zeros(1), kept.cumsum(0)])
    weights = bags.key_weights
    return Bags(bags.keys[kept], ends[bags.offsets], None if weights is None else weights[kept])


def _as_keys(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype == torch.int64:
        return tensor
    if tensor.dtype != torch.int32:
        raise ConfigError(f"{name}: got {str(tensor.dtype).removeprefix('torch.')}, expected int32 or int64")
    return tensor.long()
