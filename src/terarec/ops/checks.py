# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors that reach an op. Each raises `ConfigError` naming the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling

from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.contract import BadKeyError
from terarec.kernels.registry import Op, choose
from terarec.ops.layout import BagLayout, result_shape
from terarec.spec.tables import ROW_TYPES


def is_traced(rows: Tensor) -> bool:
    """Return whether a compiler, a mode or a tensor of another class has to see an op on `rows`.

    All other calls run the kernel at once: the dispatcher of Python ops costs some 20 us a call (Zen 3).
    """
    return type(rows) is not Tensor or is_compiling() or _len_torch_dispatch_stack() > 0


ROW_DTYPES = tuple(getattr(torch, name) for name in ROW_TYPES)
"""Element types of an arena's rows."""


def lookup_fits(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    key_weights: Tensor | None = None,
    grad: Tensor | None = None,
    *,
    traced: bool = False,
) -> None:
    """Raise unless the tensors of a lookup fit `layout` and each other.

    A kernel checks all tensors in host memory at once; if they do not fit, these functions find the ones to name.

    Args:
        weights: [V, D] of one of `ROW_DTYPES`, with at least the rows of `layout`.
        keys: int64[N].
        offsets: int64[S * B + 1].
        layout: Layout of the lookup.
        key_weights: float32[N], if the poolings take some.
        grad: float32, of the shape of the result.
        traced: Whether a compiler follows, which has to see the conditions themselves.
    """
    # That of the CPU on any device: it says no for tensors elsewhere, which are then checked one by one below.
    if not traced and choose(Op.LOOKUP_FITS, "cpu")(weights, keys, offsets, key_weights, grad, layout.extents):
        return
    _weights_fit(weights, layout)
    bags_fit(weights, keys, offsets, layout, key_weights, grad)


def _weights_fit(weights: Tensor, layout: BagLayout) -> None:
    shape = weights.shape
    fits = len(shape) == 2 and shape[1] == layout.width and shape[0] >= layout.num_rows
    if not fits or weights.dtype not in ROW_DTYPES:
        raise ConfigError(
            "weights",
            f"got {name(weights)}, expected float32, bfloat16 or float16 [V, {layout.width}] "
            f"with V >= {layout.num_rows}",
        )


def bags_fit(
    rows: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    key_weights: Tensor | None = None,
    grad: Tensor | None = None,
) -> None:
    """Raise unless keys, offsets, weights of keys and gradient fit `layout` and are on the device of `rows`.

    `keys` is int64[N], `offsets` int64[S * B + 1], `key_weights` float32[N] if the poolings take some, and `grad`
    float32 of the shape of the result.
    """
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ConfigError("keys", f"got {name(keys)}, expected int64[N]")
    num_features = len(layout.feature_names)
    num_bags = offsets.numel() - 1  # read in half the time of `shape`
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or num_bags % num_features:
        raise ConfigError(
            "offsets", f"got {name(offsets)}, expected int64[S * B + 1] for the S = {num_features} features"
        )
    if num_bags < 0:
        raise ConfigError("offsets", "got an empty tensor, expected int64[S * B + 1]")
    if grad is not None:
        _gradient_fits(grad, keys, offsets, layout)
        same_device(rows, (grad,))
    if key_weights is not None:
        _key_weights_fit(key_weights, keys, layout)
        same_device(rows, (key_weights,))
    if not rows.device == keys.device == offsets.device:
        raise _several_devices((rows, keys, offsets))


def places_fit(places: Tensor, keys: Tensor, weights: Tensor, width: int) -> None:
    """Raise unless ``places int64[N]`` of the keys are rows of ``weights [V, width]``."""
    if weights.dim() != 2 or weights.shape[1] != width or weights.dtype not in ROW_DTYPES:
        raise ConfigError("weights", f"got {name(weights)}, expected float32, bfloat16 or float16 [V, {width}]")
    if places.dtype != torch.int64 or places.shape != keys.shape:
        raise ConfigError("places", f"got {name(places)}, expected int64{list(keys.shape)}, one a key")
    same_device(weights, (places,))
    if places.numel():
        # Kernels check keys, but take places on trust: a wrong one would write outside of the arena.
        low, high = (int(bound) for bound in torch.aminmax(places))
        if low < 0 or high >= weights.shape[0]:
            raise ConfigError("places", f"got {low} to {high}, expected 0 <= place < {weights.shape[0]}")


def same_device(first: Tensor, others: Sequence[Tensor]) -> None:
    """Raise unless all tensors are on one device."""
    device = first.device
    if any(tensor.device != device for tensor in others):
        raise _several_devices((first, *others))


def _several_devices(tensors: Sequence[Tensor]) -> ConfigError:
    devices = sorted({str(tensor.device) for tensor in tensors})
    return ConfigError("devices", f"got {', '.join(devices)}, expected all tensors on one device")


def _key_weights_fit(key_weights: Tensor, keys: Tensor, layout: BagLayout) -> None:
    if key_weights.dtype != torch.float32 or key_weights.shape != keys.shape:
        raise ConfigError("key_weights", f"got {name(key_weights)}, expected float32{list(keys.shape)}, one a key")
    if not layout.takes_key_weights:
        raise ConfigError("key_weights", f"got some with pooling {layout.pooling}, expected 'sum', 'mean' or 'sqrtn'")


def _gradient_fits(grad: Tensor, keys: Tensor, offsets: Tensor, layout: BagLayout) -> None:
    expected = result_shape(keys, offsets, len(layout.feature_names), layout.width, layout.is_pooled)
    if grad.shape != expected or grad.dtype != torch.float32:
        raise ConfigError("grad", f"got {name(grad)}, expected float32{list(expected)} as the lookup's result")


def bad_key(layout: BagLayout, feature: int, position: int, key: int) -> KeyOutOfRangeError:
    """Return the error for a key outside its table."""
    return named(BadKeyError(feature, position, key, layout.table_rows[layout.feature_table[feature]]), layout)


def named(error: BadKeyError, layout: BagLayout) -> KeyOutOfRangeError:
    """Return `error` with the names of its feature and table."""
    table = layout.table_names[layout.feature_table[error.feature]]
    return KeyOutOfRangeError(
        f"feature {layout.feature_names[error.feature]!r}",
        f"got key {error.key} at position {error.position}, "
        f"expected 0 <= key < {error.rows}, the rows of table {table!r}",
    )


def name(tensor: Tensor) -> str:
    """Return element type and shape of `tensor`, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
