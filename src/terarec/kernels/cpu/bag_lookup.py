"""Launcher of the pooled lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.cpu.host import _embedding
from terarec.kernels.cpu.reports import raise_if_bad

# Results at least this large come from the core's own huge pages, which it keeps; smaller ones malloc recycles itself.
_OWN_RESULT_FLOATS = 1 << 20


def bag_lookup(weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool) -> Tensor:
    """The vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: float32[V, D], contiguous.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: layout array int64[S, 4].
        is_pooled: whether the layout pools; known without reading it.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    weights, keys, offsets = weights.contiguous(), keys.contiguous(), offsets.contiguous()
    num_features, width, num_keys = layout.shape[0], weights.shape[1], keys.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    out = _result(batch_size, num_features * width) if is_pooled else _result(num_keys, width)
    report = _embedding.bag_lookup(
        [
            weights.data_ptr(),
            width,
            keys.data_ptr(),
            num_keys,
            offsets.data_ptr(),
            layout.data_ptr(),
            num_features,
            batch_size,
            out.data_ptr(),
            torch.get_num_threads(),
        ]
    )
    raise_if_bad(report, (num_keys,), (layout,))
    return out


def _result(rows: int, columns: int) -> Tensor:
    if rows * columns >= _OWN_RESULT_FLOATS:
        held = _embedding.allocate_result(rows, columns)
        if held is not None:
            return torch.from_numpy(held)
    return torch.empty(rows, columns)
