"""`quantize_rows` and `quantized_bag_lookup`: tables of 8-bit rows, for inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import NONE, ROW_TAIL_BYTES, BadKeyError
from terarec.kernels.ref import quantized
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.layout import BagLayout, result_shape
from terarec.ops.tracing import is_traced


def quantize_rows(weights: Tensor) -> Tensor:
    """Pack rows as codes of 8 bits, each row with a scale and an offset of its own.

    No value moves by more than 1 / 510 of its row's range, but for the rounding of float32; rows of one value repeated
    stay as they are.

    Args:
        weights: float32, bfloat16 or float16 [V, D].

    Returns:
        uint8[V, D + 8]: a row is D codes, then its scale and its offset as little-endian float32; code c stands for
        offset + scale * c.

    Raises:
        ConfigError: another type or shape, a value that is not finite, or a row whose range float32 cannot hold; the
            message has the row.
    """
    if weights.dim() != 2 or weights.dtype not in checks.ROW_TYPES:
        raise ConfigError(f"weights: got {checks.name(weights)}, expected float32, bfloat16 or float16 [V, D]")
    return quantized.quantize_rows(weights)


def quantized_bag_lookup(
    packed: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """As `terarec.ops.bag_lookup`, from rows that `quantize_rows` packed. There is no way back.

    Args:
        packed: uint8[V, D + 8].
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major, rising from 0 to N.
        layout: the S features and their tables.
        key_weights: float32[N], as `terarec.ops.bag_lookup` takes them.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[B, S * D], or float32[N, D] for a layout without pooling.

    Raises:
        KeyOutOfRangeError: a key outside its table; names feature, key, table and rows.
        ConfigError: tensors that do not fit the layout, or offsets that fall or do not cover the keys.
        KernelError: an implementation asked for by name that cannot run here.
    """
    columns = layout.width + ROW_TAIL_BYTES
    fits = packed.dim() == 2 and packed.shape[1] == columns and packed.shape[0] >= layout.num_rows
    if not fits or packed.dtype != torch.uint8:
        raise ConfigError(
            f"packed: got {checks.name(packed)}, expected uint8[V, {columns}] with V >= {layout.num_rows}"
        )
    checks.bags_fit(packed, keys, offsets, layout, key_weights)
    result: Tensor
    try:
        if is_traced(packed):
            result = _quantized_bag_lookup_op(
                packed, keys, offsets, layout.array, layout.pooling_codes, key_weights, implementation
            )
        else:
            kernel = choose("quantized_bag_lookup", packed.device, implementation)
            result = kernel(packed, keys, offsets, layout.array, layout.is_pooled, key_weights)
    except BadKeyError as error:
        raise checks.named(error, layout) from None
    return result


# `layout` is the layout array and `pooling` its third column, known without reading it.
def _quantized_bag_lookup(
    packed: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    pooling: Sequence[int],
    key_weights: Tensor | None,
    implementation: str,
) -> Tensor:
    kernel = choose("quantized_bag_lookup", packed.device, implementation)
    result: Tensor = kernel(packed, keys, offsets, layout, NONE not in pooling, key_weights)
    return result


_quantized_bag_lookup_op = torch.library.custom_op("terarec::quantized_bag_lookup", mutates_args=())(
    _quantized_bag_lookup
)


@_quantized_bag_lookup_op.register_fake
def _fake(packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, pooling: Sequence[int], *_: object) -> Tensor:
    width = packed.shape[1] - ROW_TAIL_BYTES
    shape = result_shape(keys, offsets, layout.shape[0], width, NONE not in pooling)
    return packed.new_empty(shape, dtype=torch.float32)
