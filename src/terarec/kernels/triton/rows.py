"""First values of rows on the device."""

from __future__ import annotations

import struct

import triton
from torch import Tensor

from terarec.kernels.triton import tiles
from terarec.kernels.triton.device.row_init import fill_kernel
from terarec.kernels.triton.placement import on_its_device
from terarec.kernels.triton.splitmix import table_stream


@on_its_device
def fill_keyed_rows(weights: Tensor, rows: Tensor, keys: Tensor, kind: str, seed: int, scale: float) -> None:
    """Fill row ``rows[i]`` with what `terarec.kernels.ref.rows.fill_rows` writes to row number ``keys[i]``.

    Uniform values are equal bit for bit; normal ones differ by the last bit where a GPU's logarithm or cosine of a
    double does.

    Args:
        weights: [V, D], contiguous, of any floating type.
        rows: int64[n], 0 <= row < V, distinct.
        keys: int64[n]; a negative one counts as key + 2^64.
        kind: "uniform" in [-scale, scale), or "normal" with standard deviation `scale`.
        seed: 64 bits.
        scale: see `kind`.
    """
    num_keys, width = keys.shape[0], weights.shape[1]
    if num_keys == 0:
        return
    tile_rows, pairs = tiles.whole_rows((width + 1) // 2)
    fill_kernel[(triton.cdiv(num_keys, tile_rows),)](
        weights,
        rows.contiguous(),
        keys.contiguous(),
        num_keys,
        table_stream(seed),
        struct.unpack("<q", struct.pack("<d", scale))[0],
        WIDTH=width,
        PAIRS=pairs,
        ROWS=tile_rows,
        IS_NORMAL=kind == "normal",
    )
