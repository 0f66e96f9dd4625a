"""The keys of one or more gradients, sorted by the arena row that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.contract import NONE, LaidGradient
from terarec.kernels.triton import layouts, status, tiles
from terarec.kernels.triton.device.locate import locate_kernel
from terarec.kernels.triton.device.segments import (
    CHUNK,
    heads_kernel,
    key_parts_kernel,
    part_parts_kernel,
    starts_kernel,
)

_BLOCK = 1024
_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """N > 0 keys by rows; what the fused update reads.

    Attributes:
        grads: float32[R, D].
        order: int64[N], the key at each sorted position.
        sources: int64[N], the row of `grads` that holds a key's gradient.
        scales: float32[N], the factor of that gradient; empty if all are 1.
        rows: [N], sorted arena rows; bad keys have the row V, which no arena has, at the end.
        segments: [N], the number of distinct rows up to and with each sorted position.
        starts: int64[U + 1, and more], the first sorted position of each segment.
        key_parts: float32[2 * blocks, D], see `device.segments`.
        part_parts: float32[2 * blocks of blocks, D].
    """

    grads: Tensor
    order: Tensor
    sources: Tensor
    scales: Tensor
    rows: Tensor
    segments: Tensor
    starts: Tensor
    key_parts: Tensor
    part_parts: Tensor

    @property
    def is_plain(self) -> bool:
        """Whether no gradient is scaled."""
        return self.scales.shape[0] == 0


def segments_of(gradients: Sequence[LaidGradient], num_rows: int, width: int, is_checked: bool) -> Segments | None:
    """Sort the keys of `gradients` and sum the parts of long segments; None without keys.

    Args:
        gradients: of one or more lookups.
        num_rows: arena rows V.
        width: length D of a vector.
        is_checked: wait for the keys' check and raise what is wrong; if not, bad keys have no effect.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    num_keys = sum(gradient.keys.shape[0] for gradient in gradients)
    device = gradients[0].keys.device
    row_type = torch.int32 if num_rows < _INT32_ROWS else torch.int64  # half the passes of the sort
    rows = torch.full((num_keys,), num_rows, dtype=row_type, device=device)
    sources = torch.zeros(num_keys, dtype=torch.int64, device=device)
    is_plain = all(layouts.on_device(gradient.layout, device).is_plain for gradient in gradients)
    scales = torch.ones(0 if is_plain else num_keys, device=device)
    _locate(gradients, rows, sources, scales, num_rows, is_checked)
    if num_keys == 0:
        return None
    grads = [gradient.grad.reshape(-1, width) for gradient in gradients]
    sorted_rows, order = torch.sort(rows, stable=True)
    segments, starts = _cut(sorted_rows)
    return _with_parts(
        Segments(
            grads=torch.cat(grads) if len(grads) > 1 else grads[0].contiguous(),
            order=order,
            sources=sources,
            scales=scales,
            rows=sorted_rows,
            segments=segments,
            starts=starts,
            key_parts=_parts(num_keys, CHUNK.value, width, device),
            part_parts=_parts(num_keys, CHUNK.value**2, width, device),
        )
    )


def _locate(
    gradients: Sequence[LaidGradient], rows: Tensor, sources: Tensor, scales: Tensor, no_row: int, is_checked: bool
) -> None:
    first_key = first_source = 0
    bags, _ = tiles.whole_rows(1)
    for number, (keys, offsets, _, layout, key_weights) in enumerate(gradients):
        if key_weights is not None:
            raise KernelError("row_update_: got key weights, expected none on Triton")
        num_features, num_keys = layout.shape[0], keys.shape[0]
        batch_size = (offsets.shape[0] - 1) // num_features
        if batch_size == 0:
            status.check_no_bags(keys, offsets)
            continue
        held = layouts.on_device(layout, keys.device)
        found = status.new_status(keys.device)
        is_pooled = int(layout[0, 2]) != NONE
        mine = slice(first_key, first_key + num_keys)
        keys, offsets = keys.contiguous(), offsets.contiguous()
        locate_kernel[(triton.cdiv(batch_size, bags), num_features)](
            keys,
            offsets,
            held.array,
            rows[mine],
            sources[mine],
            scales[mine],
            found,
            num_keys,
            batch_size,
            first_source,
            no_row,
            BAGS=bags,
            COLUMNS=layout.shape[1],
            IS_POOLED=is_pooled,
            IS_PLAIN=scales.shape[0] == 0,
        )
        if is_checked:
            status.raise_if_bad(found, keys, offsets, layout, number)
        first_key += num_keys
        first_source += batch_size * num_features if is_pooled else num_keys


def _cut(sorted_rows: Tensor) -> tuple[Tensor, Tensor]:
    """`Segments.segments` and `Segments.starts`."""
    num_keys, device = sorted_rows.shape[0], sorted_rows.device
    heads = torch.empty(num_keys, dtype=torch.int32, device=device)
    grid = (triton.cdiv(num_keys, _BLOCK),)
    heads_kernel[grid](sorted_rows, heads, num_keys, BLOCK=_BLOCK)
    segments = torch.cumsum(heads, 0, dtype=torch.int32 if num_keys <= _INT32_ROWS else torch.int64)
    starts = torch.empty(num_keys + 1, dtype=torch.int64, device=device)
    starts_kernel[grid](sorted_rows, segments, starts, num_keys, BLOCK=_BLOCK)
    return segments, starts


def _parts(num_keys: int, unit: int, width: int, device: torch.device) -> Tensor:
    """Room for the parts of segments of more than `unit` keys."""
    slots = 2 * triton.cdiv(num_keys, unit) if num_keys > unit else 0
    return torch.empty(slots, width, device=device)


def _with_parts(held: Segments) -> Segments:
    """`held` with its parts summed."""
    num_keys, width = held.rows.shape[0], held.grads.shape[1]
    tile_rows, block = tiles.whole_rows(width)
    tile_rows = min(tile_rows, CHUNK.value)
    if num_keys > CHUNK.value:
        key_parts_kernel[(triton.cdiv(num_keys, CHUNK.value),)](
            held.grads,
            held.order,
            held.sources,
            held.scales,
            held.segments,
            held.starts,
            held.key_parts,
            num_keys,
            WIDTH=width,
            BLOCK=block,
            ROWS=tile_rows,
            IS_PLAIN=held.is_plain,
        )
    if num_keys > CHUNK.value**2:
        part_parts_kernel[(triton.cdiv(num_keys, CHUNK.value**2),)](
            held.key_parts,
            held.segments,
            held.starts,
            held.part_parts,
            num_keys,
            WIDTH=width,
            BLOCK=block,
            ROWS=tile_rows,
        )
    return held
