# SPDX-License-Identifier: Apache-2.0
"""Launcher of the pooled lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.cpu.host import Report, _embedding, empty_floats, error_of

lookup_fits = _embedding.lookup_fits
"""See `terarec.kernels.ref.bag_lookup`: all tensors in one call, where Python takes as long for a property of one."""


def bag_lookup(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Return the vectors of every bag, or key; see `terarec.kernels.ref.bag_lookup.bag_lookup`."""
    # The core calls `empty_floats` with the shape, which it reads from the tensors faster than Python does.
    result: Tensor | Report = _embedding.bag_lookup(
        weights, keys, offsets, layout, is_pooled, key_weights, empty_floats, torch.get_num_threads()
    )
    if isinstance(result, tuple):
        raise error_of(result, (keys.shape[0],), (layout,))
    return result


def quantized_bag_lookup(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Look up rows of 8-bit codes; see `terarec.kernels.ref.bag_lookup.quantized_bag_lookup`."""
    return bag_lookup(packed, keys, offsets, layout, is_pooled, key_weights)  # the core knows them by their type


def row_dots(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> Tensor:
    """Return the dot products of rows and gradients; see `terarec.kernels.ref.bag_lookup.row_dots`."""
    dots = torch.empty(keys.shape[0])
    report = _embedding.row_dots(weights, keys, offsets, grad, layout, dots, torch.get_num_threads())
    if report[0]:
        raise error_of(report, (keys.shape[0],), (layout,))
    return dots
