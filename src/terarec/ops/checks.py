"""Checks of the tensors that reach an op. Each raises `ConfigError` naming the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.contract import BadKeyError
from terarec.ops.layout import BagLayout


def weights_fit(weights: Tensor, layout: BagLayout) -> None:
    """Raise unless `weights` is float32[V, D] with the width and at least the rows of `layout`."""
    shape = weights.shape
    if len(shape) != 2 or shape[1] != layout.width or shape[0] < layout.num_rows or weights.dtype != torch.float32:
        raise ConfigError(
            f"weights: got {_name(weights)}, expected float32[V, {layout.width}] with V >= {layout.num_rows}"
        )


def same_device(tensors: Sequence[Tensor]) -> None:
    """Raise unless all tensors are on one device."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ConfigError(f"devices: got {', '.join(sorted(map(str, devices)))}, expected all tensors on one device")


def bags_fit(keys: Tensor, offsets: Tensor, layout: BagLayout) -> None:
    """Raise unless `keys` is int64[N] and `offsets` int64[S * B + 1] with the S of `layout`."""
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ConfigError(f"keys: got {_name(keys)}, expected int64[N]")
    num_features = len(layout.feature_names)
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or (offsets.shape[0] - 1) % num_features:
        raise ConfigError(
            f"offsets: got {_name(offsets)}, expected int64[S * B + 1] for the S = {num_features} features"
        )
    if offsets.shape[0] == 0:
        raise ConfigError("offsets: got an empty tensor, expected int64[S * B + 1]")


def gradient_fits(grad: Tensor, keys: Tensor, offsets: Tensor, layout: BagLayout) -> None:
    """Raise unless `grad` is shaped as the result of looking up `keys`."""
    num_features = len(layout.feature_names)
    if layout.is_pooled:
        expected = ((offsets.shape[0] - 1) // num_features, num_features * layout.width)
    else:
        expected = (keys.shape[0], layout.width)
    if tuple(grad.shape) != expected or grad.dtype != torch.float32:
        raise ConfigError(f"grad: got {_name(grad)}, expected float32{list(expected)} as the lookup's result")


def named(error: BadKeyError, layout: BagLayout) -> KeyOutOfRangeError:
    """`error` with the names of its feature and table."""
    table = layout.table_names[layout.feature_table[error.feature]]
    return KeyOutOfRangeError(
        f"feature {layout.feature_names[error.feature]!r}: got key {error.key} at position {error.position}, "
        f"expected 0 <= key < {error.rows}, the rows of table {table!r}"
    )


def _name(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
