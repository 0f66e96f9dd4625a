"""Rows as codes of 8 bits with a scale and an offset each, for inference.

A packed row is D codes, then its scale and its offset as little-endian float32, so that one row is neighbouring memory.
Code c stands for offset + scale * c; offset is the row's least value and scale its range / 255.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import ROW_TAIL_BYTES

_NUMBERS_AT_ONCE = 1 << 22  # what is held in float32 beside the rows


def quantize_rows(weights: Tensor) -> Tensor:
    """Pack rows. No value moves by more than range / 510 of its row, but for the rounding of float32.

    Args:
        weights: float32, bfloat16 or float16 [V, D].

    Returns:
        uint8[V, D + 8].

    Raises:
        ConfigError: a value that is not finite, or a row whose range float32 cannot hold; the message has the row.
    """
    rows, width = weights.shape
    packed = torch.empty(rows, width + ROW_TAIL_BYTES, dtype=torch.uint8, device=weights.device)
    chunk = max(1, _NUMBERS_AT_ONCE // max(1, width))
    for first in range(0, rows, chunk):
        part = weights[first : first + chunk].float()
        lowest, highest = part.amin(dim=1), part.amax(dim=1)
        wrong = (~(highest - lowest).isfinite()).nonzero()
        if wrong.numel():
            raise ConfigError(f"weights[{first + int(wrong[0])}]: got values that are not finite, or of infinite range")
        scale = (highest - lowest) / 255.0
        steps = torch.where(scale > 0.0, scale, 1.0)[:, None]
        codes = ((part - lowest[:, None]) / steps).round_().clamp_(0.0, 255.0)
        packed[first : first + chunk, :width] = codes.to(torch.uint8)
        packed[first : first + chunk, width:] = torch.stack([scale, lowest], dim=1).view(torch.uint8)
    return packed


def dequantize_rows(packed: Tensor) -> Tensor:
    """The values float32[n, D] that the ``packed uint8[n, D + 8]`` rows stand for."""
    codes = packed[:, :-ROW_TAIL_BYTES].float()
    tails = packed[:, -ROW_TAIL_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned as float32 has to be
    scale, offset = tails.view(torch.float32).unbind(dim=1)
    return codes * scale[:, None] + offset[:, None]
